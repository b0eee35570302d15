"""The bounded memory of samples, and the filters against a naive loop."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from ttac.adaptation.filters import Remembered, filter_pseudo_labels
from ttac.adaptation.memory import SampleQueue
from ttac.common.state import cloned
from ttac.model.inputs import ImageInput


def queue_of(capacity: int, classes: int = 2) -> SampleQueue:
    """A queue with the columns of the filters."""
    blank = {name: rows[0] for name, rows in vars(Remembered.blank(1, classes)).items()}
    return SampleQueue(capacity, ImageInput(None, None, None), blank)


def numbered(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32).reshape(-1, 1, 1, 1)


def everything(queue: SampleQueue) -> torch.Tensor:
    return queue.take(torch.arange(len(queue)))


def test_queue_keeps_the_newest_like_a_deque() -> None:
    queue, reference = queue_of(7, 2), deque(maxlen=7)
    first = 0
    for count in (3, 1, 5, 20, 2, 7, 1):
        queue.push(numbered(first, count))
        reference.extend(range(first, first + count))
        first += count
        assert sorted(everything(queue).flatten().tolist()) == sorted(map(float, reference))
        newest = queue.take(queue.newest(min(count, 7))).flatten().tolist()
        assert newest == list(reference)[-min(count, 7) :]


def test_queue_forgets_what_it_remembered_of_a_replaced_sample() -> None:
    queue = queue_of(4, 2)
    queue.push(numbered(0, 4))
    ones = torch.ones(4).long()
    queue.remember(torch.arange(4), {"average": torch.ones(4, 2), "visits": ones, "excluded": ones})
    queue.push(numbered(4, 1))
    assert queue.columns["visits"].tolist() == [0, 1, 1, 1]
    assert queue.columns["average"][0].tolist() == [0, 0]


def test_minibatches_cover_the_queue_once_without_a_tiny_tail() -> None:
    queue = queue_of(257, 2)
    queue.push(numbered(0, 257))
    parts = list(queue.minibatches(256, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(parts).tolist()) == list(range(257))
    assert [len(part) for part in parts] == [129, 128]
    assert len(parts) == queue.minibatch_count(256)


def test_a_short_walk_takes_the_newcomers_and_the_least_visited() -> None:
    queue, generator = queue_of(64, 2), torch.Generator().manual_seed(0)
    visits = torch.zeros(64, dtype=torch.int64)  # counted here
    for window in range(16):  # the ring goes round twice
        queue.push(numbered(8 * window, 8))
        visits[queue.newest(8)] = 0
        parts = list(queue.minibatches(8, generator, walk=24))
        walked = torch.cat(parts)
        assert len(walked.unique()) == len(walked) == min(24, len(queue))
        assert len(parts) == queue.minibatch_count(8, 24) == min(3, window + 1)
        assert set(queue.newest(8).tolist()) <= set(walked.tolist())
        left = torch.ones(len(queue)).bool().scatter(0, walked, False)
        older = walked[~torch.isin(walked, queue.newest(8))]
        if left.any():
            assert visits[older].max() <= visits[: len(queue)][left].min()
        visits[walked] += 1
        queue.settle()
    assert int(visits.max()) <= 4, "24 visits a window are shared evenly among 64 samples"


def test_a_walk_as_long_as_the_queue_is_the_whole_queue() -> None:
    queue = queue_of(8, 2)
    queue.push(numbered(0, 8))
    walks = [list(queue.minibatches(3, torch.Generator().manual_seed(1), walk)) for walk in (0, 8, 20)]
    for other in walks[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(walks[0], other, strict=True))


def test_queue_state_round_trips() -> None:
    queue, other = queue_of(5, 3), queue_of(5, 3)
    queue.push(numbered(0, 8))
    list(queue.minibatches(2, torch.Generator(), walk=3))
    queue.remember(torch.tensor([1]), {"average": torch.ones(1, 3), "visits": torch.tensor([4])})
    other.load_state(cloned(queue.state()))
    for each in (queue, other):
        each.push(numbered(8, 2))
    walks = [torch.cat(list(each.minibatches(2, torch.Generator().manual_seed(2), walk=3))) for each in (queue, other)]
    assert torch.equal(*walks)
    assert torch.equal(everything(queue), everything(other))
    assert torch.equal(queue.columns["visits"], other.columns["visits"])
    assert queue.fresh == other.fresh == 10


def test_queue_refuses_another_image_size() -> None:
    queue = queue_of(5, 3)
    queue.push(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="resize all images"):
        queue.push(torch.zeros(1, 3, 9, 8))
    assert len(queue) == 1


def test_filters_equal_a_naive_loop_over_samples_and_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    count, classes, xi, tau_tc, tau_pp, cooldown = 200, 4, 0.9, -0.05, 0.6, 3
    memory = Remembered.blank(count, classes)
    average: list[list[float] | None] = [None] * count
    out = [0] * count
    rejected = 0
    for _ in range(8):
        posterior = torch.softmax(3 * torch.randn(count, classes, generator=generator), 1)
        filtered = filter_pseudo_labels(posterior, memory, xi=xi, tau_tc=tau_tc, tau_pp=tau_pp, cooldown=cooldown)
        for i, q in enumerate(posterior.tolist()):
            label = max(range(classes), key=q.__getitem__)
            past = average[i]
            consistent = past is None or q[label] - past[label] > tau_tc
            average[i] = q if past is None else [(1 - xi) * p + xi * new for p, new in zip(past, q, strict=True)]
            passed = consistent and out[i] == 0 and max(average[i]) > tau_pp
            out[i] = max(out[i] - 1, 0) if consistent else cooldown
            rejected += not consistent
            assert filtered.assignment[i] == (label if passed else -1)
        memory = filtered.memory
    assert rejected > 50  # the loop exercised the filter


def test_filters_do_not_write_into_the_memory_they_are_given() -> None:
    memory = Remembered.blank(3, 2)
    filter_pseudo_labels(torch.full((3, 2), 0.5), memory, xi=0.9, tau_tc=0.0, tau_pp=0.9, cooldown=5)
    assert memory.visits.tolist() == [0, 0, 0]

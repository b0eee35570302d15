"""The bounded memory of samples, and the filters against a naive loop."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from ttac.filters import Memory, filter_pseudo_labels
from ttac.sample_queue import SampleQueue


def numbered(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32).reshape(-1, 1, 1, 1)


def test_queue_keeps_the_newest_like_a_deque() -> None:
    queue, reference = SampleQueue(7, 2), deque(maxlen=7)
    first = 0
    for count in (3, 1, 5, 20, 2, 7, 1):
        queue.push(numbered(first, count))
        reference.extend(range(first, first + count))
        first += count
        assert sorted(queue.images.flatten().tolist()) == sorted(map(float, reference))
        newest = queue.images[queue.newest(min(count, 7))].flatten().tolist()
        assert newest == list(reference)[-min(count, 7) :]


def test_queue_forgets_what_it_remembered_of_a_replaced_sample() -> None:
    queue = SampleQueue(4, 2)
    queue.push(numbered(0, 4))
    queue.remember(torch.arange(4), Memory(torch.ones(4, 2), torch.ones(4).long(), torch.ones(4).long()))
    queue.push(numbered(4, 1))
    assert queue.memory.visits.tolist() == [0, 1, 1, 1]
    assert queue.memory.average[0].tolist() == [0, 0]


def test_minibatches_cover_the_queue_once_without_a_tiny_tail() -> None:
    queue = SampleQueue(257, 2)
    queue.push(numbered(0, 257))
    parts = list(queue.minibatches(256, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(parts).tolist()) == list(range(257))
    assert [len(part) for part in parts] == [129, 128]
    assert len(parts) == queue.minibatch_count(256)


def test_queue_state_round_trips() -> None:
    queue, other = SampleQueue(5, 3), SampleQueue(5, 3)
    queue.push(numbered(0, 8))
    queue.remember(torch.tensor([1]), Memory(torch.ones(1, 3), torch.tensor([4]), torch.tensor([2])))
    other.load(queue.state())
    for each in (queue, other):
        each.push(numbered(8, 2))
    assert torch.equal(queue.images, other.images)
    assert torch.equal(queue.memory.visits, other.memory.visits)
    assert queue.fresh == other.fresh == 10


def test_queue_refuses_another_image_size() -> None:
    queue = SampleQueue(5, 3)
    queue.push(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="resize all images"):
        queue.push(torch.zeros(1, 3, 9, 8))
    assert len(queue) == 1


def test_filters_equal_a_naive_loop_over_samples_and_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    count, classes, xi, tau_tc, tau_pp, cooldown = 200, 4, 0.9, -0.05, 0.6, 3
    memory = Memory.blank(count, classes)
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
            assert filtered.assignment[i] == (label if passed else -1)
        memory = filtered.memory
    assert rejected > 50  # the loop exercised the filter


def test_filters_do_not_write_into_the_memory_they_are_given() -> None:
    memory = Memory.blank(3, 2)
    filter_pseudo_labels(torch.full((3, 2), 0.5), memory, xi=0.9, tau_tc=0.0, tau_pp=0.9, cooldown=5)
    assert memory.visits.tolist() == [0, 0, 0]

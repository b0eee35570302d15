"""The ring hands images on in order, and counts each that it does not, whenever a process is killed."""

from __future__ import annotations

import random
import time
from itertools import count, groupby, pairwise

import numpy as np
import pytest
from shared_helpers import Deadly, Halting, best_seconds, ends_before, forked, killed, shared_memory
from waiting import until

from ttac.serving.shared import SampleRing

SHAPE, LARGE = (3, 4, 4), (3, 32, 32)


def new_ring(capacity: int, shape: tuple[int, int, int] = SHAPE) -> SampleRing:
    return SampleRing(shared_memory(SampleRing.bytes_needed(shape, capacity)), shape, capacity)


def samples(first: int, number: int, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    """Images whose pixels are all the number of the image."""
    return np.broadcast_to(np.arange(first, first + number, dtype=np.float32)[:, None, None, None], (number, *shape))


def numbers_of(images: np.ndarray) -> list[int]:
    """Read the numbers back, and look that no image has pixels of two."""
    numbers = images[:, 0, 0, 0]
    assert (images == numbers[:, None, None, None]).all()
    return numbers.astype(int).tolist()


def test_samples_come_in_order_around_the_end() -> None:
    ring = new_ring(5)
    taken = []
    for first in range(0, 30, 3):
        ring.push(samples(first, 3))
        taken += numbers_of(ring.take(2)) + numbers_of(ring.take(2))
        assert ring.position == ring.pushed == len(taken)
    assert taken == list(range(30))
    assert (ring.dropped, ring.waiting) == (0, 0)
    assert ring.take(4).shape == (0, *SHAPE)


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 20])
def test_oldest_samples_are_dropped_and_counted(batch: int) -> None:
    ring = new_ring(4)
    for first in range(0, 20, batch):
        ring.push(samples(first, min(batch, 20 - first)))
    assert (ring.pushed, ring.dropped, ring.waiting, ring.position) == (20, 16, 4, 16)
    assert numbers_of(ring.take(3)) == [16, 17, 18]
    assert (ring.pushed, ring.dropped, ring.waiting, ring.position) == (20, 16, 1, 19)
    ring.push(samples(20, 5))
    assert numbers_of(ring.take(9)) == [21, 22, 23, 24]
    assert (ring.dropped, ring.waiting) == (18, 0)


def test_samples_taken_are_a_copy() -> None:
    ring = new_ring(2)
    ring.push(samples(0, 2))
    taken = ring.take(2)
    ring.push(samples(2, 2))
    assert numbers_of(taken) == [0, 1]


@pytest.mark.parametrize(
    ("position", "then", "dropped"),
    [
        (13, [13, 14, 15], 6),  # back, all held: taken again
        (12, [12, 13, 14, 15], 6),
        (10, [12, 13, 14, 15], 8),  # back, 10 and 11 are lost
        (14, [14, 15], 6),  # where it is
        (15, [15], 7),  # forth, 14 is passed over
        (99, [], 8),  # forth, to what comes next
    ],
)
def test_seek(position: int, then: list[int], dropped: int) -> None:
    ring = new_ring(4)
    ring.push(samples(0, 10))
    assert numbers_of(ring.take(4)) == [6, 7, 8, 9]
    ring.push(samples(10, 4))
    ring.take(4)
    ring.push(samples(14, 2))
    ring.seek(position)
    assert (ring.dropped, ring.waiting) == (dropped, len(then))
    assert numbers_of(ring.take(9)) == then
    assert ring.position == 16


def test_seek_to_what_is_overwritten_counts_it_once() -> None:
    ring = new_ring(4)
    ring.push(samples(0, 10))
    ring.seek(0)
    assert (ring.position, ring.dropped, ring.waiting) == (6, 6, 4)
    ring.seek(8)
    assert (ring.position, ring.dropped, ring.waiting) == (8, 8, 2)


def test_seek_in_new_memory() -> None:
    ring = new_ring(4)
    ring.seek(5000)
    assert (ring.position, ring.dropped) == (0, 0)
    with pytest.raises(ValueError, match="none with number -1"):
        ring.seek(-1)


def test_bad_samples_are_refused() -> None:
    ring = new_ring(4)
    for images in (samples(0, 2).astype(np.float64), samples(0, 2)[0], samples(0, 2)[:, :, :2]):
        with pytest.raises(ValueError, match="expected float32 \\[N, 3, 4, 4\\]"):
            ring.push(images)
    assert ring.pushed == 0
    with pytest.raises(ValueError, match="at least 1"):
        new_ring(0)


def test_reopened_memory_goes_on() -> None:
    memory = shared_memory(SampleRing.bytes_needed(SHAPE, 4))
    ring = SampleRing(memory, SHAPE, 4)
    ring.push(samples(0, 7))
    ring.take(2)
    successor = SampleRing(memory, SHAPE, 4)
    assert (successor.pushed, successor.dropped, successor.waiting, successor.position) == (7, 3, 2, 5)
    successor.push(samples(7, 1))
    assert numbers_of(ring.take(9)) == [5, 6, 7]


def push_on(ring: SampleRing, end: int, shape: tuple[int, int, int] = SHAPE) -> None:
    """Push samples of the next numbers, a few at a time."""
    rng = random.Random(1)
    while ring.pushed < end:
        ring.push(samples(ring.pushed, min(rng.randint(1, 40), end - ring.pushed), shape))
        if rng.random() < 0.03:  # else a fast machine could overtake almost every reader
            time.sleep(0.002)


def test_unchecked_samples_are_not_those_asked_for() -> None:
    ring = new_ring(64)
    wrong = 0
    with forked(lambda: push_on(ring, 2**23)):
        until(lambda: ring.pushed > 64)
        cells = Halting(ring._cells, lambda: ring.pushed, 128)
        for _ in range(200):
            numbers = np.arange(48) + ring.pushed - 64
            wrong += (cells[numbers % 64] != numbers[:, None, None, None]).any()
    assert wrong > 40


def test_none_is_torn_or_uncounted_while_the_producer_races() -> None:
    ring = new_ring(64)
    cells = ring._cells
    taken: list[int] = []
    with forked(lambda: push_on(ring, 2**23)):
        ring._cells = Halting(cells, lambda: ring.pushed, 128)  # of this process alone

        def enough() -> bool:
            taken.extend(numbers_of(ring.take(48)))
            return len(taken) > 5000 and ring.dropped > 5000

        until(enough)
    ring._cells = cells  # the producer has ended, and nobody need wait for it
    while ring.waiting:
        taken += numbers_of(ring.take(48))
    assert len(taken) + ring.dropped == ring.pushed
    assert all(former < latter for former, latter in pairwise(taken))


def test_producer_is_killed_anywhere() -> None:
    ring = new_ring(64, LARGE)
    taken: list[int] = []
    rng = random.Random(0)
    for _ in range(30):
        before = ring.pushed
        with forked(lambda: push_on(ring, 2**23, LARGE)):
            until(lambda before=before: ring.pushed > before)
            taken += numbers_of(ring.take(48))
            time.sleep(rng.random() * 0.002)
        taken += numbers_of(ring.take(30))
        ring.push(samples(ring.pushed, 1, LARGE))
        assert len(taken) + ring.dropped + ring.waiting == ring.pushed
    assert all(former < latter for former, latter in pairwise(taken))


@pytest.mark.parametrize("spared", [0, 1])  # stores: the images go around the end, and are stored in two parts
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_producer_is_killed_in_the_midst_of_a_push(share: float, spared: int) -> None:
    ring = new_ring(64)
    ring.push(samples(0, 44))
    taken: list[int] = []
    for _ in range(3):
        before = ring.pushed
        assert before % 64 == 44

        def push(before: int = before) -> None:
            ring._cells = Deadly(ring._cells, share, spared)  # of that process alone
            ring.push(samples(before, 40))

        killed(push)
        assert (ring.pushed, ring._begun_pushed.item(0)) == (before, before + 40)
        assert (ring._cells[44] == before).all() == (spared == 1 or share > 0)
        taken += numbers_of(ring.take(30))
        ring.push(samples(before, 64))
        assert len(taken) + ring.dropped + ring.waiting == ring.pushed
    assert all(former < latter for former, latter in pairwise(taken))
    assert len(taken) >= 3 * 24


@pytest.mark.parametrize(
    ("action", "before", "between", "after"),  # position, dropped, waiting
    [
        ("push", (8, 6, 6), (11, 9, 3), (11, 9, 8)),
        ("take", (8, 6, 6), None, (11, 6, 3)),
        ("seek back", (8, 6, 6), None, (6, 9, 8)),
        ("seek forth", (8, 6, 6), None, (12, 10, 2)),
    ],
)
def test_process_ends_before_any_line(action: str, before: object, between: object, after: object) -> None:
    seen = []
    for line in count():
        memory = shared_memory(SampleRing.bytes_needed(SHAPE, 8))
        ring = SampleRing(memory, SHAPE, 8)
        ring.push(samples(0, 14))
        ring.take(2)
        actions = {
            "push": lambda ring=ring: ring.push(samples(14, 5)),
            "take": lambda ring=ring: ring.take(3),
            "seek back": lambda ring=ring: ring.seek(3),
            "seek forth": lambda ring=ring: ring.seek(12),
        }
        ended = ends_before(line, actions[action])
        successor = SampleRing(memory, SHAPE, 8)
        seen.append((successor.position, successor.dropped, successor.waiting))
        successor.push(samples(successor.pushed, 2))
        rest = numbers_of(successor.take(99))
        assert rest == list(range(successor.pushed - len(rest), successor.pushed))
        assert len(rest) == min(seen[-1][2] + 2, 8 - (successor._begun_pushed.item(0) - successor.pushed))
        if not ended:
            break
    assert [state for state, _ in groupby(seen)] == [state for state in (before, between, after) if state]


def test_speed() -> None:
    ring, image = new_ring(256, LARGE), samples(0, 1, LARGE)
    cells = np.empty((100, *LARGE), np.float32)

    def store_a_hundred(_: int) -> None:
        for cell in cells:
            cell[:] = image[0]

    assert best_seconds(lambda number: ring.push(image)) < best_seconds(store_a_hundred)  # some tenth of it

"""A bounded first-in-first-out memory of samples and of what is remembered about each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ttac.common.state import Stateful
from ttac.model.inputs import ImageInput, ImageStorage

NOWHERE = -1  # the place of a sample that came outside of an epoch


class SampleQueue(Stateful):
    """The last `capacity` samples in a ring that never moves them, with columns of values that a method has for each.

    `fresh` counts the samples that came since the last `settle`, so that the adapter knows when a window is full. After
    `begin_epoch` samples are known by their place in the epoch, and the columns of each outlive its stay.

    >>> queue = SampleQueue(3, ImageInput(None, None, 1))
    >>> queue.push(torch.arange(5.0).reshape(5, 1, 1, 1))
    >>> len(queue), queue.fresh, queue.take(torch.arange(3)).flatten().tolist()
    (3, 5, [3.0, 4.0, 2.0])
    """

    samples: ImageStorage
    fresh: int
    length: int
    next: int
    walked: Tensor
    columns: dict[str, Tensor]
    archive: dict[str, Tensor] | None
    places: Tensor
    place: int

    def __init__(self, capacity: int, kind: ImageInput, blank: Mapping[str, Tensor] | None = None) -> None:
        """Make room for `capacity` samples of a kind of input; `blank` has a row of each column, as of a newcomer."""
        self.capacity = capacity
        self._device = kind.device
        self._blank = blank or {}
        self.declare(
            samples=lambda: kind.storage(capacity),
            fresh=lambda: 0,
            length=lambda: 0,
            next=lambda: 0,
            walked=lambda: torch.zeros(capacity, dtype=torch.int64),  # how often each slot was in a minibatch
            columns=lambda: {name: self._blanks(name, capacity) for name in self._blank},
            archive=lambda: None,  # columns by place in the epoch, for several passes over a target set
            places=lambda: torch.full((capacity,), NOWHERE),  # of the slots in the archive
            place=lambda: 0,  # of the next sample
        )

    def _blanks(self, name: str, count: int, device: torch.device | str | None = None) -> Tensor:
        row = self._blank[name].to(device or self._device)
        return row.expand(count, *row.shape).clone()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, or raise where its numbers do not fit together."""
        super().load_state(state)
        stored = self.samples.images is not None
        if not (0 <= self.length <= self.capacity and 0 <= self.next < self.capacity and self.fresh >= 0):
            raise ValueError(f"a queue of {self.capacity} cannot have {self.length} samples, the next at {self.next}")
        if bool(self.length) != stored or not isinstance(self.archive, dict | None):
            raise ValueError(f"the queue has {self.length} samples and {'some' if stored else 'no'} images")

    def begin_epoch(self) -> None:
        """Count places from the first again, and keep what is remembered of every place from now on."""
        self.place = 0
        self.archive = self.archive or {name: self._blanks(name, 0, "cpu") for name in self._blank}

    def __len__(self) -> int:
        return self.length

    def check(self, images: Tensor) -> None:
        """Raise an error where samples cannot stand beside those that came before."""
        self.samples.check(images)

    def take(self, slots: Tensor) -> Tensor:
        """Give the samples at `slots [n]`, as they were pushed."""
        return self.samples.read(slots)

    def push(self, images: Tensor, *, of_epoch: bool = False) -> None:
        """Store samples `[N, ...]`, forgetting the oldest ones; those of an epoch are known by their place in it."""
        kept = images.detach()[-self.capacity :]
        first = (self.next + len(images) - len(kept)) % self.capacity
        slots = (first + torch.arange(len(kept))) % self.capacity
        self.samples.write(slots, kept)  # first, as it alone may fail: floats take four times the memory
        for name, values in self._recalled(len(images), slots, of_epoch).items():
            self.columns[name][slots] = values.to(self._device)
        self.walked[slots] = 0
        self.fresh += len(images)
        self.next = (first + len(kept)) % self.capacity
        self.length = min(self.length + len(images), self.capacity)

    def _recalled(self, count: int, slots: Tensor, of_epoch: bool) -> dict[str, Tensor]:
        """Give the columns of the newest samples, for `slots`, of the `count` that come."""
        if self.archive is None or not of_epoch:
            self.places[slots] = NOWHERE
            return {name: self._blanks(name, len(slots)) for name in self._blank}
        places = self.place + torch.arange(count)
        self.place += count
        for name, known in self.archive.items():
            if self.place > len(known):
                self.archive[name] = torch.cat([known, self._blanks(name, self.place - len(known), "cpu")])
        self.places[slots] = places[-len(slots) :]
        return {name: known[places[-len(slots) :]] for name, known in self.archive.items()}

    def recall(self, slots: Tensor) -> dict[str, Tensor]:
        """Give the columns of the samples at `slots [n]`."""
        return {name: column[slots] for name, column in self.columns.items()}

    def remember(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """Replace columns of the samples at `slots [n]`."""
        places = self.places[slots]
        known = places != NOWHERE
        for name, rows in values.items():
            self.columns[name][slots] = rows
            if self.archive is not None:
                self.archive[name][places[known]] = rows.cpu()[known]

    def settle(self) -> None:
        """Count from nothing again: the window that was full has been learned from."""
        self.fresh = 0

    def newest(self, count: int) -> Tensor:
        """Give the slots of the last `count` samples, or of all where there are fewer, oldest first: `[n]`."""
        count = min(count, self.length)
        return (self.next - count + torch.arange(count)) % self.capacity

    def minibatches(self, size: int, generator: torch.Generator, walk: int = 0) -> Iterator[Tensor]:
        """Walk samples once in random order, in near-equal minibatches of about `size`: slots `[n]`.

        With `walk` only so many of them: those that came since the last `settle`, and of the others those that were
        walked least often, so that a long queue is seen evenly at the price of a short one.
        """
        order = torch.randperm(self.length, generator=generator)
        if 0 < walk < self.length:
            walked = self.walked.clone()
            walked[self.newest(min(self.fresh, walk))] = -1
            chosen = order[walked[order].argsort(stable=True)[:walk]]
            order = chosen[torch.randperm(walk, generator=generator)]  # newcomers are no minibatch of their own
        self.walked[order] += 1
        yield from order.tensor_split(self.minibatch_count(size, walk))

    def minibatch_count(self, size: int, walk: int = 0) -> int:
        """How many minibatches one walk has: those of at most `size`, but none of one, which has no statistics."""
        count = min(walk or self.length, self.length)
        return max(1, min(-(-count // size), count // 2))

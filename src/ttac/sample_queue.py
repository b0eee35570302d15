"""A bounded first-in-first-out memory of samples and of what is remembered about each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ttac.filters import Memory

NOWHERE = -1  # the place of a sample that came outside of an epoch


class SampleQueue:
    """The last `capacity` samples with their posterior memory, in a ring that never moves them.

    `fresh` counts the samples that came since the last `settle`, so a method knows when its window is full. After
    `begin_epoch` samples are known by their place in the epoch, and what is remembered of them outlives their stay.

    >>> queue = SampleQueue(capacity=3, num_classes=2)
    >>> queue.push(torch.arange(5.0).reshape(5, 1, 1, 1))
    >>> len(queue), queue.fresh, queue.images.flatten().tolist()
    (3, 5, [3.0, 4.0, 2.0])
    """

    def __init__(self, capacity: int, num_classes: int) -> None:
        self.capacity = capacity
        self.num_classes = num_classes
        self.fresh = 0
        self._length = 0
        self._next = 0
        self._images: Tensor | None = None  # [capacity, C, H, W], made when the first sample shows its shape
        self._memory: Memory | None = None
        self._archive: Memory | None = None  # by place in the epoch, for several passes over a target set
        self._places = torch.full((capacity,), NOWHERE)  # of the slots in the archive
        self._place = 0  # of the next sample

    def begin_epoch(self) -> None:
        """Count places from the first again, and keep what is remembered of every place from now on."""
        self._place = 0
        self._archive = self._archive or Memory.blank(0, self.num_classes)

    def __len__(self) -> int:
        return self._length

    @property
    def images(self) -> Tensor:
        """The stored images `[n, C, H, W]`, in ring order."""
        assert self._images is not None, "the queue is empty"
        return self._images[: self._length]

    @property
    def memory(self) -> Memory:
        """What is remembered of the stored images, in the same order; written in place by `remember`."""
        assert self._memory is not None, "the queue is empty"
        return self._memory.rows(slice(0, self._length))

    def check(self, images: Tensor) -> None:
        """Raise an error where images do not have the shape of those that came before."""
        if self._images is not None and images.shape[1:] != self._images.shape[1:]:
            raise ValueError(
                f"images are {tuple(images.shape[1:])}, those before were {tuple(self._images.shape[1:])}: "
                "resize all images of a stream to one size"
            )

    def push(self, images: Tensor) -> None:
        """Store `images [N, C, H, W]`, forgetting the oldest ones."""
        self.check(images)
        self.fresh += len(images)
        if self._images is None or self._memory is None:
            self._images = images.new_empty(self.capacity, *images.shape[1:])
            self._memory = Memory.blank(self.capacity, self.num_classes, images.device)
        kept = images.detach()[-self.capacity :]
        self._next = (self._next + len(images) - len(kept)) % self.capacity
        slots = (self._next + torch.arange(len(kept), device=images.device)) % self.capacity
        self._images[slots] = kept
        self._memory.write(slots, self._recall(len(images), slots).to(images.device))
        self._next = (self._next + len(kept)) % self.capacity
        self._length = min(self._length + len(images), self.capacity)

    def _recall(self, count: int, slots: Tensor) -> Memory:
        """Give what is remembered of the newest samples, for `slots`, of the `count` that come."""
        if self._archive is None:
            return Memory.blank(len(slots), self.num_classes)
        places = self._place + torch.arange(count)
        self._place += count
        if self._place > len(self._archive.visits):
            self._archive = self._archive.joined(
                Memory.blank(self._place - len(self._archive.visits), self.num_classes)
            )
        self._places[slots.cpu()] = places[-len(slots) :]
        return self._archive.rows(places[-len(slots) :])

    def settle(self) -> None:
        """Count from nothing again: the window that was full has been learned from."""
        self.fresh = 0

    def newest(self, count: int) -> Tensor:
        """Give the slots of the last `count` samples, oldest first: `[count]`."""
        return (self._next - count + torch.arange(count)) % self.capacity

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Walk all samples once in random order, in near-equal minibatches of about `size`: slots `[n]`."""
        order = torch.randperm(self._length, generator=generator)
        yield from order.tensor_split(self.minibatch_count(size))

    def minibatch_count(self, size: int) -> int:
        """How many minibatches one walk has: those of at most `size`, but none of one, which has no statistics."""
        return max(1, min(-(-self._length // size), self._length // 2))

    def remember(self, slots: Tensor, memory: Memory) -> None:
        """Replace what is remembered of the samples at `slots`."""
        assert self._memory is not None, "the queue is empty"
        self._memory.write(slots, memory)
        if self._archive is not None:
            places = self._places[slots.cpu()]
            known = places != NOWHERE
            self._archive.write(places[known], memory.to("cpu").rows(known))

    def state(self) -> dict[str, Tensor | int]:
        """Give all content, by name."""
        state: dict[str, Tensor | int] = {"fresh": self.fresh, "length": self._length, "next": self._next}
        if self._images is not None and self._memory is not None:
            state |= {"images": self.images.clone(), **{k: v.clone() for k, v in vars(self.memory).items()}}
        if self._archive is not None:
            archive = {f"archive_{name}": tensor.clone() for name, tensor in vars(self._archive).items()}
            state |= {"places": self._places.clone(), "place": self._place, **archive}
        return state

    def load(self, state: dict[str, Tensor | int]) -> None:
        """Take back what `state` gave."""
        self._images = self._memory = None
        self._length = self._next = self._place = 0
        self._archive = None
        self._places.fill_(NOWHERE)
        if "images" in state:
            images = state["images"]
            assert isinstance(images, Tensor)
            self.push(images)
            names = vars(self.memory)
            self.remember(torch.arange(len(images)), Memory(**{name: state[name] for name in names}))  # type: ignore[arg-type]
        self.fresh, self._length, self._next = (int(state[name]) for name in ("fresh", "length", "next"))
        if "place" in state:
            archive = {name: state[f"archive_{name}"] for name in ("average", "visits", "excluded")}
            self._archive = Memory(**archive)  # type: ignore[arg-type]
            self._places, self._place = state["places"].clone(), int(state["place"])  # type: ignore[union-attr]

"""A bounded first-in-first-out memory of samples and of what is remembered about each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ttac.adaptation.filters import Memory
from ttac.common.tensor_memory import held_bytes

NOWHERE = -1  # the place of a sample that came outside of an epoch


def levels_of(images: Tensor, *, multiplied: bool = False) -> Tensor | None:
    """Give the levels 0 ... 255 of images that `pixels_of` gives back bit for bit, None where a value is lost.

    >>> levels_of(torch.tensor([0.0, 1.0])), levels_of(torch.tensor([0.0, 0.5]))
    (tensor([  0, 255], dtype=torch.uint8), None)
    """
    levels = (255 * images.float()).round().to(torch.uint8)  # half precision would round 255 x to a neighbour
    again = pixels_of(levels, images.dtype, multiplied=multiplied)
    # Bits, as -0 equals 0.
    made, given = (pixels.contiguous().view(torch.uint8) for pixels in (again, images))
    return levels if torch.equal(made, given) else None


def pixels_of(levels: Tensor, dtype: torch.dtype, *, multiplied: bool = False) -> Tensor:
    """Divide levels by 255, or multiply them by 1 / 255 as some loaders do, which gives other bits."""
    if multiplied:
        return levels.to(dtype) * (1 / 255)
    # By a tensor, as a GPU multiplies by the reciprocal of a number.
    return levels.to(dtype) / torch.tensor(255, dtype=dtype, device=levels.device)


class SampleQueue:
    """The last `capacity` samples with their posterior memory, in a ring that never moves them.

    Images are held as 8-bit levels as long as all that came are exactly that, and from then on as they come; what is
    taken out is bit for bit what was pushed. The ring is made whole with the first sample and never grows.

    `fresh` counts the samples that came since the last `settle`, so a method knows when its window is full. After
    `begin_epoch` samples are known by their place in the epoch, and what is remembered of them outlives their stay.

    >>> queue = SampleQueue(capacity=3, num_classes=2)
    >>> queue.push(torch.arange(5.0).reshape(5, 1, 1, 1))
    >>> len(queue), queue.fresh, queue.take(torch.arange(3)).flatten().tolist()
    (3, 5, [3.0, 4.0, 2.0])
    """

    def __init__(self, capacity: int, num_classes: int) -> None:
        self.capacity = capacity
        self.num_classes = num_classes
        self.fresh = 0
        self._length = 0
        self._next = 0
        self._images: Tensor | None = None  # [capacity, C, H, W], made when the first sample shows its shape
        self._dtype = torch.float32  # of the stream; where all of it is 8-bit, `_images` is uint8
        self._multiplied = False  # how the stream was made of levels, see `pixels_of`
        self._walked = torch.zeros(capacity, dtype=torch.int64)  # how often each slot was in a minibatch
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

    def take(self, slots: Tensor) -> Tensor:
        """Give the images at `slots [n]`, as they were pushed: `[n, C, H, W]`."""
        assert self._images is not None, "the queue is empty"
        images = self._images[: self._length][slots]
        return self._pixels(images) if images.dtype == torch.uint8 else images

    @property
    def limit(self) -> int:
        """The bytes that it can come to in one pass: those of now, and of images whose levels are not enough."""
        assert self._images is not None, "the queue is empty"
        return held_bytes(self) + self._images.numel() * (self._dtype.itemsize - self._images.itemsize)

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
        if self._images is None or self._memory is None:
            self._images = images.new_empty(self.capacity, *images.shape[1:], dtype=torch.uint8)
            self._dtype = images.dtype
            self._multiplied = levels_of(images) is None  # if they are levels at all
            self._memory = Memory.blank(self.capacity, self.num_classes, images.device)
        kept = images.detach()[-self.capacity :]
        first = (self._next + len(images) - len(kept)) % self.capacity
        slots = (first + torch.arange(len(kept), device=images.device)) % self.capacity
        self._store(slots, kept.to(self._dtype))  # first, as it alone may fail: floats take four times the memory
        self._memory.write(slots, self._recall(len(images), slots).to(images.device))
        self._walked[slots.cpu()] = 0
        self.fresh += len(images)
        self._next = (first + len(kept)) % self.capacity
        self._length = min(self._length + len(images), self.capacity)

    def _store(self, slots: Tensor, images: Tensor) -> None:
        assert self._images is not None, "the queue is empty"
        if self._images.dtype == torch.uint8:
            levels = levels_of(images, multiplied=self._multiplied)
            if levels is None:
                self._images = self._pixels(self._images)
            else:
                images = levels
        self._images[slots] = images

    def _pixels(self, levels: Tensor) -> Tensor:
        return pixels_of(levels, self._dtype, multiplied=self._multiplied)

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

    def minibatches(self, size: int, generator: torch.Generator, walk: int = 0) -> Iterator[Tensor]:
        """Walk samples once in random order, in near-equal minibatches of about `size`: slots `[n]`.

        With `walk` only so many of them: those that came since the last `settle`, and of the others those that were
        walked least often, so that a long queue is seen evenly at the price of a short one.
        """
        order = torch.randperm(self._length, generator=generator)
        if 0 < walk < self._length:
            walked = self._walked.clone()
            walked[self.newest(min(self.fresh, walk))] = -1
            chosen = order[walked[order].argsort(stable=True)[:walk]]
            order = chosen[torch.randperm(walk, generator=generator)]  # newcomers are no minibatch of their own
        self._walked[order] += 1
        yield from order.tensor_split(self.minibatch_count(size, walk))

    def minibatch_count(self, size: int, walk: int = 0) -> int:
        """How many minibatches one walk has: those of at most `size`, but none of one, which has no statistics."""
        count = min(walk or self._length, self._length)
        return max(1, min(-(-count // size), count // 2))

    def remember(self, slots: Tensor, memory: Memory) -> None:
        """Replace what is remembered of the samples at `slots`."""
        assert self._memory is not None, "the queue is empty"
        self._memory.write(slots, memory)
        if self._archive is not None:
            places = self._places[slots.cpu()]
            known = places != NOWHERE
            self._archive.write(places[known], memory.to("cpu").rows(known))

    def state(self) -> dict[str, Tensor | int]:
        """Give all content, by name: no copies, which `Adapter.state_dict` makes of everything."""
        state: dict[str, Tensor | int] = {"fresh": self.fresh, "length": self._length, "next": self._next}
        state["walked"] = self._walked
        if self._images is not None and self._memory is not None:
            state |= {"images": self._images[: self._length], **vars(self.memory)}
            if self._images.dtype == torch.uint8:
                state["like"] = torch.empty(0, dtype=self._dtype)  # what the levels are to be taken out as
                state["multiplied"] = self._multiplied
        if self._archive is not None:
            archive = {f"archive_{name}": tensor for name, tensor in vars(self._archive).items()}
            state |= {"places": self._places, "place": self._place, **archive}
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
            self._images = images.new_empty(self.capacity, *images.shape[1:])
            self._images[: len(images)] = images
            # States of before images were held as levels have floats, and go on with those; they know no walks either.
            self._dtype = (images if images.is_floating_point() else state["like"]).dtype  # type: ignore[union-attr]
            self._memory = Memory.blank(self.capacity, self.num_classes, images.device)
            self._memory.write(torch.arange(len(images)), Memory(**{name: state[name] for name in vars(self._memory)}))  # type: ignore[arg-type]
        self._multiplied = bool(state.get("multiplied", False))
        self._walked.copy_(state.get("walked", torch.zeros_like(self._walked)))  # type: ignore[arg-type]
        self.fresh, self._length, self._next = (int(state[name]) for name in ("fresh", "length", "next"))
        if "place" in state:
            archive = {name: state[f"archive_{name}"].clone() for name in ("average", "visits", "excluded")}  # type: ignore[union-attr]
            self._archive = Memory(**archive)
            self._places, self._place = state["places"].clone(), int(state["place"])  # type: ignore[union-attr]

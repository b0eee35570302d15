"""Memory that two processes share without locks: the newest content of a writer, and a queue of images.

Either process may be killed between any two instructions, and the other one, or a successor, goes on: nothing here is
ever held, and all counters are in the shared memory. A counter is an aligned int64 that numpy stores and loads in one
instruction, so it is never seen half written; and each word has one process that writes it.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

WORD = 8  # bytes of a counter
LINE = 64  # bytes of a cache line: parts begin on one, so that no two processes write to the same
TRIES = 1000  # of a copy that the writer overtakes; so many in a row fail only where the content is damaged


class Slots:
    """Two slots with a version each: one writer, one or more readers that never see a torn content.

    The writer fills the slot that is not the newest, then names it as the newest. A reader copies the newest slot, and
    looks afterwards whether its version is still the same: it has the whole time of one more publishing for its copy,
    and copies again when that was too short.

    >>> slots = Slots(memoryview(bytearray(Slots.bytes_needed(5))), 5)
    >>> slots.publish(1, b"hello")
    >>> slots.read(), slots.read(after=1)
    ((1, bytearray(b'hello')), None)
    """

    def __init__(self, memory: memoryview, size: int) -> None:
        """Take memory of `bytes_needed(size)` bytes, zeroed or in use already, for contents of up to `size` bytes."""
        stride = LINE + _whole_lines(size)
        words, rest = _parts(memory, self.bytes_needed(size))
        slots = [rest[start : start + stride] for start in (0, stride)]
        self._newest = words  # [0]: 2 * version + number of its slot, in one word that changes at once
        self._heads = [slot[:LINE].view(np.int64) for slot in slots]  # version (0: being written), bytes, check sum
        self._contents = [slot[LINE : LINE + size] for slot in slots]
        self._size = size

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Count the bytes of memory for contents of up to `size` bytes.

        >>> Slots.bytes_needed(100)
        448
        """
        return LINE + 2 * (LINE + _whole_lines(size))

    @property
    def version(self) -> int:
        """Give the newest version, 0 where nothing has been published."""
        return self._newest.item(0) >> 1

    def publish(self, version: int, content: bytes | bytearray | memoryview) -> None:
        """Make `content` the newest one; its version must be greater than that of the one before."""
        newest = self._newest.item(0)
        if version <= newest >> 1:
            raise ValueError(f"version {version} is not newer than version {newest >> 1}, which is published")
        source = np.frombuffer(content, np.uint8)
        if len(source) > self._size:
            raise ValueError(f"a content of {len(source)} bytes does not fit into slots of {self._size}")
        check_sum = _check_sum(version, source)
        slot = 1 - (newest & 1)
        head = self._heads[slot]
        head[0] = 0
        head[1] = len(source)
        head[2] = check_sum
        self._contents[slot][: len(source)] = source  # numpy lets other threads run meanwhile
        head[0] = version
        self._newest[0] = 2 * version + slot

    def read(self, after: int = 0, reuse: bytearray | None = None) -> tuple[int, bytearray] | None:
        """Copy the newest content, with its version; None where its version is not greater than `after`.

        None too where it is damaged, which the next publishing mends. The copy goes to `reuse` where that has the right
        length: a content read before that nobody needs any more.
        """
        for _ in range(TRIES):
            newest = self._newest.item(0)
            version, slot = newest >> 1, newest & 1
            if version <= after:
                return None
            content = self._copy(slot, version, reuse)
            if content is not None:
                return version, content
        return None

    def _copy(self, slot: int, version: int, reuse: bytearray | None) -> bytearray | None:
        """Copy a slot, None where it does not hold this version from the beginning of the copy to its end."""
        head = self._heads[slot]
        if head.item(0) != version:
            return None
        length = head.item(1)
        # A new bytearray is zeroed while no other thread runs, a tenth of a second for the weights of a large network.
        content = reuse if reuse is not None and len(reuse) == length else bytearray(length)
        target = np.frombuffer(content, np.uint8)
        target[:] = self._contents[slot][:length]
        if head.item(0) != version:
            return None
        # Stores and loads keep their order on x86, but for copies past the cache; and on other machines they need not.
        # The check sum is of the version too: a new version seen before its content is no content of that version.
        return content if head.item(2) == _check_sum(version, target) else None


class SampleRing:
    """Bounded queue of float32 images `[C, H, W]`: one producer, one consumer; the oldest are dropped and counted.

    Samples are numbered from 0 on, and sample n is in cell n mod capacity. The producer keeps two numbers: `begun`,
    stored before it writes to cells, and `pushed`, stored after. The consumer copies samples below `pushed`, and then
    looks at `begun`: whatever is older than `begun - capacity` by then may have been overwritten, and is dropped.

    >>> ring = SampleRing(memoryview(bytearray(SampleRing.bytes_needed((1, 1, 1), 2))), (1, 1, 1), capacity=2)
    >>> ring.push(np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1))
    >>> ring.take(8).ravel().tolist(), ring.pushed, ring.dropped, ring.waiting
    ([1.0, 2.0], 3, 1, 0)
    """

    # The two numbers are check numbers before and after the pixels of all cells being written. That is exact where
    # stores and loads keep their order, as on x86. On a machine where they need not, a sample that is overwritten in
    # the moment of its copy might have pixels of two images of the stream, or be the one that came before it: all
    # pixels are of images that were sent, and a learner takes no harm from one such image. A check sum would exclude
    # it, at more than the cost of the push itself, on the path of every request.

    def __init__(self, memory: memoryview, shape: tuple[int, int, int], capacity: int) -> None:
        """Take memory of `bytes_needed(shape, capacity)` bytes, zeroed or in use already."""
        self._begun_pushed, rest = _parts(memory, self.bytes_needed(shape, capacity))
        consumer = Slots.bytes_needed(2 * WORD)
        self._consumer = Slots(rest[:consumer].data, 2 * WORD)  # position and dropped, which change together
        pixels = rest[consumer:].view(np.float32)
        self._cells = pixels[: capacity * int(np.prod(shape))].reshape(capacity, *shape)
        self._shape, self._capacity = shape, capacity

    @staticmethod
    def bytes_needed(shape: tuple[int, int, int], capacity: int) -> int:
        """Count the bytes of memory for so many images of this shape.

        >>> SampleRing.bytes_needed((3, 32, 32), 1024) - 1024 * 3 * 32 * 32 * 4
        384
        """
        if capacity < 1 or min(shape) < 1:
            raise ValueError(f"a ring needs a capacity and a shape of at least 1, not {capacity} and {shape}")
        pixels = capacity * int(np.prod(shape))
        return LINE + Slots.bytes_needed(2 * WORD) + _whole_lines(4 * pixels)

    @property
    def pushed(self) -> int:
        """Count all samples that came in."""
        return self._begun_pushed.item(1)

    @property
    def position(self) -> int:
        """Give the number of the sample that the consumer takes next, from 0 on; overwritten ones are behind it."""
        return self._place()[0]

    @property
    def dropped(self) -> int:
        """Count the samples that the consumer has passed over, or will because they are overwritten."""
        return self._place()[1]

    @property
    def waiting(self) -> int:
        """Count the samples that can be taken."""
        position = self.position  # before `pushed`, which only grows: never less than none
        return self.pushed - position

    def push(self, images: NDArray[np.float32]) -> None:
        """Add images `[N, C, H, W]`, over the oldest where there is no room; never waits."""
        if images.dtype != np.float32 or images.shape[1:] != self._shape:
            raise ValueError(
                f"samples are {images.dtype} of shape {images.shape}; expected float32 [N, {str(self._shape)[1:-1]}]"
            )
        for start in range(0, len(images), self._capacity):
            self._push(images[start : start + self._capacity])

    def _push(self, images: NDArray[np.float32]) -> None:
        numbers = self._begun_pushed
        pushed = numbers.item(1)
        end = pushed + len(images)
        if numbers.item(0) < end:  # greater only where a producer was killed: what it began to write is not whole
            numbers[0] = end
        cell = pushed % self._capacity
        room = self._capacity - cell
        self._cells[cell : cell + len(images)] = images[:room]
        if len(images) > room:
            self._cells[: len(images) - room] = images[room:]
        numbers[1] = end

    def take(self, most: int) -> NDArray[np.float32]:
        """Take up to `most` samples `[n, C, H, W]`, oldest first; none only where none is waiting.

        Samples that are overwritten meanwhile are passed over and counted.
        """
        while True:
            position, dropped = self._place()
            end = min(position + most, self.pushed)
            numbers = np.arange(position, end)
            samples = self._cells[numbers % self._capacity]
            lost = min(max(self._oldest() - position, 0), len(numbers))
            if len(numbers):
                self._move(position + len(numbers), dropped + lost)
            if lost < len(numbers) or not len(numbers):
                return samples[lost:]

    def seek(self, position: int) -> None:
        """Go back or forth to a sample, or to the nearest one that is held or comes next.

        Going back, the samples that are no longer held count as dropped; going forth, those that are passed over.
        Those between there and here have their second turn: whether taken or dropped, they count again.
        """
        if position < 0:
            raise ValueError(f"samples are numbered from 0 on, there is none with number {position}")
        here, dropped = self._noted()
        there = min(max(position, self._oldest()), self.pushed)
        self._move(there, dropped + max(there - min(here, position), 0))

    def _place(self) -> tuple[int, int]:
        """Give position and dropped as they are once the overwritten samples are passed over."""
        oldest = self._oldest()  # first: what the consumer takes after this is not lost
        position, dropped = self._noted()
        lost = max(oldest - position, 0)
        return position + lost, dropped + lost

    def _noted(self) -> tuple[int, int]:
        """Read position and dropped as the consumer left them."""
        found = self._consumer.read()
        if found is None:
            return 0, 0
        position, dropped = np.frombuffer(found[1], np.int64).tolist()
        return position, dropped

    def _move(self, position: int, dropped: int) -> None:
        self._consumer.publish(self._consumer.version + 1, np.array([position, dropped]).tobytes())

    def _oldest(self) -> int:
        """Give the number of the oldest sample that nothing has been written over."""
        return max(self._begun_pushed.item(0) - self._capacity, 0)


def _parts(memory: memoryview, needed: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Split memory into a line of counters and the rest."""
    whole = np.frombuffer(memory, np.uint8)
    if len(whole) < needed:
        raise ValueError(f"{len(whole)} bytes of memory are too few; {needed} are needed")
    words = whole[:LINE].view(np.int64)
    if not words.flags.aligned:
        raise ValueError(f"shared memory must begin at a multiple of {WORD} bytes")
    return words, whole[LINE:needed]


def _whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


def _check_sum(version: int, content: NDArray[np.uint8]) -> int:
    return zlib.crc32(content.data, zlib.crc32(f"{version} {len(content)}".encode()))

"""The newest content is read whole by other processes, whenever its writer is killed."""

from __future__ import annotations

import platform
import random
import time
import zlib
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from shared_helpers import Deadly, Halting, best_seconds, ends_before, forked, killed, shared_memory
from waiting import until

from ttac.serving import shared
from ttac.serving.shared import Slots

MIB = 2**20


def new_slots(size: int, kind: type[Slots] = Slots) -> Slots:
    return kind(shared_memory(Slots.bytes_needed(size)), size)


def content_of(version: int, size: int = MIB) -> bytes:
    return bytes([version % 251]) * size


def publish_on(slots: Slots, size: int = MIB) -> None:
    rng = random.Random(1)
    for version in count(slots.version + 1):
        slots.publish(version, content_of(version, size))
        if rng.random() < 0.1:  # else a fast machine could overtake each of a reader's thousand tries
            time.sleep(0.002)


def test_newest_content_is_read_once() -> None:
    slots = new_slots(100)
    assert slots.version == 0
    assert slots.read() is None
    for version, content in ((1, b"one"), (2, b""), (7, bytes(range(100))), (8, b"eight")):
        slots.publish(version, content)
        assert slots.version == version
        assert slots.read(after=version - 1) == (version, content)
        assert slots.read(after=version) is None


def test_read_is_a_private_copy() -> None:
    slots = new_slots(3)
    slots.publish(1, b"one")
    found = slots.read()
    assert found is not None
    found[1][0] = 0
    slots.publish(2, b"two")
    slots.publish(3, b"six")
    assert found[1][1:] == b"ne"
    assert slots.read() == (3, b"six")


def test_memory_of_an_earlier_content_is_used_again() -> None:
    slots = new_slots(3)
    slots.publish(1, b"one")
    spare = bytearray(3)
    found = slots.read(reuse=spare)
    assert found is not None
    assert found[1] is spare
    slots.publish(2, b"of")
    assert slots.read(reuse=spare) == (2, b"of")
    assert spare == b"one"


def test_counter_is_never_seen_half_written() -> None:
    counter = new_slots(1)._newest
    ends = 0, 2**63 - 1

    def alternate() -> None:
        for number in count():
            counter[0] = ends[number % 2]

    with forked(alternate):
        until(lambda: counter.item(0) == ends[1])
        seen = {counter.item(0) for _ in range(200_000)}
        until(lambda: seen.add(counter.item(0)) is None and len(seen) > 1)  # with one core, a turn shows one end alone
    assert seen == set(ends)


@pytest.mark.parametrize("version", [-1, 0, 4, 5])
def test_old_version_is_refused(version: int) -> None:
    slots = new_slots(10)
    slots.publish(5, b"five")
    with pytest.raises(ValueError, match=f"version {version} is not newer than version 5"):
        slots.publish(version, b"other")
    assert slots.read() == (5, b"five")


def test_content_that_is_too_large_is_refused() -> None:
    slots = new_slots(10)
    slots.publish(1, b"one")
    with pytest.raises(ValueError, match="11 bytes does not fit into slots of 10"):
        slots.publish(2, bytes(11))
    assert slots.read() == (1, b"one")


def test_memory_that_does_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match="too few; 320 are needed"):
        Slots(memoryview(bytearray(319)), 10)
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        Slots(shared_memory(1000)[4:], 10)


def test_damaged_content_is_never_given() -> None:
    memory = shared_memory(Slots.bytes_needed(100))
    slots = Slots(memory, 100)
    slots.publish(1, b"content")
    memory[bytes(memory).index(b"content") + 3] ^= 1
    assert slots.read() is None
    slots.publish(2, b"repaired")
    assert slots.read() == (2, b"repaired")


def test_version_seen_before_its_content_is_not_taken() -> None:
    slots = new_slots(100)
    slots.publish(1, b"one")
    slots.publish(2, b"two")
    slot = slots._newest.item(0) & 1
    slots._heads[1 - slot][0] = 3  # the last stores of the next writing, as if they had overtaken the others
    slots._newest[0] = 2 * 3 + 1 - slot
    assert slots.read() is None


class OvertakenReader(Slots):
    """A reader during whose copy the writer publishes twice, a number of times."""

    times = 5

    def _copy(self, slot: int, version: int, reuse: bytearray | None) -> bytearray | None:
        if self.times:
            self.times -= 1
            self.publish(self.version + 1, b"between")
            self.publish(self.version + 1, b"newest")
        return super()._copy(slot, version, reuse)


def test_slow_reader_reads_again() -> None:
    slots = new_slots(10, OvertakenReader)
    slots.publish(1, b"first")
    assert slots.read() == (11, b"newest")


class _Overwritten:
    """A slot that the writer begins to write again when it is copied."""

    def __init__(self, slot: np.ndarray, write: Callable[[], object]) -> None:
        self.slot, self.write = slot, write

    def __getitem__(self, part: slice) -> np.ndarray:
        self.write()
        return self.slot[part]


def test_half_written_slot_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_check_sum", lambda version, content: 0)
    for line in count():
        memory = shared_memory(Slots.bytes_needed(5))
        writer, reader = Slots(memory, 5), Slots(memory, 5)
        writer.publish(1, b"first")
        ended = []

        def write(writer: Slots = writer, line: int = line, ended: list[bool] = ended) -> None:
            if writer.version == 1:
                writer.publish(2, b"other")
                ended.append(ends_before(line, lambda: writer.publish(3, b"third")))

        reader._contents = [_Overwritten(slot, write) for slot in reader._contents]
        assert reader.read() in [(1, b"first"), (2, b"other"), (3, b"third")]
        if not ended[0]:
            break
    assert line > 10


class UncheckedReader(Slots):
    """A reader that does not look at the version again after the copy."""

    def _copy(self, slot: int, version: int, reuse: bytearray | None) -> bytearray | None:
        return bytearray(self._contents[slot][: self._size])


def reads_beside_a_writer(slots: Slots, number: int) -> list[tuple[int, bytearray]]:
    """Read so many times while another process publishes, mostly as fast as it can."""
    found = []
    with forked(lambda: publish_on(slots)):
        until(lambda: slots.version > 2)
        # Of this process alone; two publishings write over what is being copied.
        slots._contents = [Halting(content, lambda: slots.version, 4) for content in slots._contents]
        for _ in range(number):
            newest = slots.read()
            assert newest is not None
            found.append(newest)
    return found


def is_torn(content: bytearray) -> bool:
    return content.count(content[0]) != len(content)


def test_unchecked_reads_are_torn() -> None:
    found = reads_beside_a_writer(new_slots(MIB, UncheckedReader), 100)
    assert sum(is_torn(content) for _, content in found) > 10


@pytest.mark.parametrize("check_sum", [True, False])
def test_checked_reads_are_never_torn(check_sum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not check_sum:  # the version alone is enough where stores and loads keep their order
        if platform.machine() not in ("x86_64", "AMD64"):
            pytest.skip("loads and stores of this machine have no order")
        monkeypatch.setattr(shared, "_check_sum", lambda version, content: 0)
    found = reads_beside_a_writer(new_slots(MIB), 40)
    assert all(content == content_of(version) for version, content in found)


def check_that_it_goes_on(slots: Slots, size: int) -> None:
    """Read the newest content whole, then publish and read another one."""
    version = slots.version
    assert slots.read() == (version, content_of(version, size))
    slots.publish(version + 1, content_of(version + 1, size))
    assert slots.read() == (version + 1, content_of(version + 1, size))


def test_writer_is_killed_anywhere() -> None:
    size = MIB // 4
    slots = new_slots(size)
    rng = random.Random(0)
    for _ in range(50):
        before = slots.version
        with forked(lambda: publish_on(slots, size)):
            until(lambda before=before: slots.version > before)
            time.sleep(rng.random() * 0.002)
        check_that_it_goes_on(slots, size)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999, 1.0])
def test_writer_is_killed_in_the_midst_of_a_content(share: float) -> None:
    size = MIB // 4
    slots = new_slots(size)
    slots.publish(1, content_of(1, size))
    for _ in range(4):  # both slots, and over what a kill has left
        before = slots.version

        def write(before: int = before) -> None:
            slots._contents = [Deadly(content, share) for content in slots._contents]  # of that process alone
            slots.publish(before + 1, content_of(before + 1, size))

        killed(write)
        assert slots.version == before
        half = slots._contents[[head.item(0) for head in slots._heads].index(0)]
        assert (half == (before + 1) % 251).sum() == round(share * size)
        check_that_it_goes_on(slots, size)


def test_writer_ends_before_any_line() -> None:
    for line in count():
        memory = shared_memory(Slots.bytes_needed(100))
        slots = Slots(memory, 100)
        slots.publish(3, b"three")
        slots.publish(4, b"four")
        ended = ends_before(line, lambda slots=slots: slots.publish(6, b"six"))
        successor = Slots(memory, 100)
        assert successor.read() in ([(4, b"four"), (6, b"six")] if ended else [(6, b"six")])
        version = successor.version + 1
        successor.publish(version, b"next")
        assert slots.read() == (version, b"next")
        if not ended:
            break
    assert line > 10


def test_speed() -> None:
    slots, content = new_slots(MIB), content_of(1)
    needed = best_seconds(lambda number: (bytearray(content), zlib.crc32(content)))
    assert best_seconds(lambda number: slots.publish(number, content)) < 5 * needed
    assert best_seconds(lambda number: slots.read()) < 5 * needed

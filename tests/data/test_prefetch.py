"""Reading ahead: what is read when, how much is held at a time, and that no thread outlives its stream."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import ttac
from data_helpers import read_data
from ttac import checks
from ttac.adaptation.adapter import Adapter
from ttac.data.labelled import LabelledImages, from_tensors
from ttac.data.streams import Domain, Scenario, Stream
from ttac.data.streams.prefetch import prefetched

BATCH = 8


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("prefetch")}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert not threads()
    yield
    gc.collect()
    assert not threads()


class Reader:
    """Images that are counted: how many rows have been read, and how many batches of them are still held."""

    def __init__(self, count: int = 96, breaks_at: int | None = None, classes: int = 4) -> None:
        pixels = torch.randint(
            0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        self.source = from_tensors(pixels, torch.arange(count) % classes, classes)
        self.data: LabelledImages = replace(self.source, read=self.read)
        self.breaks_at = breaks_at
        self.rows = 0

    def read(self, rows: Tensor) -> Tensor:
        if self.breaks_at is not None and self.breaks_at in rows.tolist():
            raise OSError("the disk is gone")
        self.rows += len(rows)
        return self.source.read(rows)

    def stream(self, prefetch: int, order: str = "given") -> Stream:
        scenario = Scenario(order=order, batch=BATCH)  # type: ignore[arg-type]
        return Stream([Domain("a", self.data)], scenario, prefetch=prefetch)


def settled(reader: Reader, least: int = 0) -> int:
    """Wait until at least so many rows are read, then until nothing more is, and give the rows so far."""
    until = time.monotonic() + 60
    while reader.rows < least:
        assert time.monotonic() < until
        time.sleep(0.001)
    before = -1
    while before != reader.rows:
        before = reader.rows
        time.sleep(0.05)
    return before


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_no_more_is_read_than_told(prefetch: int) -> None:
    reader = Reader()
    stream = reader.stream(prefetch)
    arrivals = iter(stream)
    assert settled(reader) == 0  # neither the plan nor the iterator reads a pixel
    for taken in range(1, 97 // BATCH + 1):
        next(arrivals)
        told = min(BATCH * (taken + prefetch), 96)
        assert settled(reader, told) == told
    assert next(arrivals, None) is None
    assert not threads()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_batch_is_forgotten_when_its_turn_is_over(prefetch: int) -> None:
    made: list[weakref.ref[Tensor]] = []

    def read(number: int) -> Tensor:
        batch = torch.full((1000,), number)
        made.append(weakref.ref(batch))
        return batch

    for batch in prefetched(read, range(20), prefetch):
        time.sleep(0.01)
        alive = sum(reference() is not None for reference in made)
        assert batch is not None
        assert alive <= prefetch + 1
    assert len(made) == 20


def test_all_ways_of_reading_give_the_same() -> None:
    whole = [list(Reader().stream(prefetch, "shuffled")) for prefetch in (0, 1, 2, 50)]
    for other in whole[1:]:
        for one, two in zip(whole[0], other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_walks_of_one_stream_do_not_disturb_each_other() -> None:
    stream = Reader().stream(2, "shuffled")
    alone = [arrival.images for arrival in stream]
    together = list(zip(stream, stream, strict=True))
    for expected, (one, other) in zip(alone, together, strict=True):
        assert torch.equal(one.images, expected)
        assert torch.equal(other.images, expected)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_reader_raises_comes_at_its_turn_and_says_where(prefetch: int) -> None:
    reader = Reader(breaks_at=30)
    arrivals = iter(reader.stream(prefetch))
    for _ in range(3):
        next(arrivals)
    with pytest.raises(
        ValueError, match=r"samples 25 to 32 of the stream.*rows 24, 25, 26, ... of a\): the disk is gone"
    ):
        next(arrivals)
    assert not threads()
    assert next(arrivals, None) is None


@pytest.mark.parametrize("end", ["close", "forget", "break"])
def test_the_thread_ends_with_its_walk(end: str) -> None:
    reader = Reader()
    arrivals = iter(reader.stream(2))
    next(arrivals)
    assert len(threads()) == 1
    if end == "close":
        arrivals.close()  # type: ignore[attr-defined]
    elif end == "break":
        for _ in arrivals:
            break
    del arrivals
    assert not threads()
    assert settled(reader) < 96


@pytest.mark.parametrize(
    ("protocol", "moment"),
    [("N-O-SF", "__call__"), ("N-O-SF", "progress"), ("N-M-SF", "learn"), ("N-M-SF", "begin_epoch")],
)
def test_the_thread_ends_where_a_walk_breaks_off(protocol: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    adapter = checks.subject("tent").make()
    stream = reader.stream(2)

    def fail(*arguments: object) -> None:
        for argument in arguments:
            if isinstance(argument, Iterator):
                next(argument)
        raise RuntimeError("no")

    if moment != "progress":
        monkeypatch.setattr(Adapter, moment, fail)
    with pytest.raises(RuntimeError, match="no") as held:
        ttac.evaluate(adapter, stream, protocol, progress=fail)
    assert not threads()  # while the error with all its frames is still there
    assert held.value is not None
    assert settled(reader) <= 3 * BATCH


def test_a_process_ends_in_the_middle_of_a_walk() -> None:
    code = (
        "from ttac.data.streams.prefetch import prefetched\n"
        "numbers = prefetched(abs, range(1000), 2)\n"
        "assert next(numbers) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_folder_is_read_as_it_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttac.data import folder

    random = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    opened: list[str] = []
    decode = folder.read_image

    def counted(path: Path, *arguments: object) -> Tensor:
        opened.append(path.name)
        return decode(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folder, "read_image", counted)
    data = read_data(str(tmp_path))
    stream = Stream([Domain("a", data)], Scenario(batch=10), prefetch=1)
    assert opened == []
    arrivals = iter(stream)
    next(arrivals)
    next(arrivals)
    assert len(opened) <= 30
    labels = torch.cat([arrival.labels for arrival in stream])
    assert labels.bincount().tolist() == [20, 20]
    (tmp_path / "a/00.png").write_text("no image")
    with pytest.raises(ValueError, match=r"of the stream cannot be read .* of a\): .*00.png cannot be read"):
        list(stream)

"""Arrays of hours: written front to back, gone on with after an interruption, and never taken for whole too early."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ttac.common.files import replacing, text_hash, to_disk
from ttac.common.resumable import StoppedError

SYNC_SECONDS = 5.0


class ArrayFile:
    """A uint8 `.npy` of a known shape `[N, ...]` that is written in order, from the rows that are on disk already.

    Rows go to `.<name>.part`, and the file takes its name when all of them are there. What counts after a crash is the
    number in `.<name>.rows`, written after those rows have reached the disk; anything behind them is cut off. Beside it
    is a hash of the `settings`, all that the rows depend on: those of other settings do not count. Rows are plainly
    written: a memory map of a sparse file would end the process, without a message, where the disk is full.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, ArrayFile(Path(folder, "a.npy"), (3, 2), {}) as file:
    ...     file.fill(lambda start: np.full((1, 2), start, np.uint8))
    ...     np.load(file.path).tolist()
    [[0, 0], [1, 1], [2, 2]]
    """

    def __init__(self, path: Path, shape: tuple[int, ...], settings: Mapping[str, Any]) -> None:
        self.path, self.shape = path, shape
        self._part, self._note = part_of(path), path.with_name(f".{path.name}.rows")
        self._header = _header(shape)
        self._settings = text_hash([json.dumps(settings, sort_keys=True)])
        self._row_bytes = math.prod(shape[1:])
        self.rows = self._rows_there()
        self._stack = ExitStack()
        self._synced = time.monotonic()

    def __enter__(self) -> ArrayFile:
        """Open the file behind the rows that count."""
        if self.path.exists():
            self._note.unlink(missing_ok=True)  # where the process died between the two
            return self
        with self._failures_explained():
            if not self.rows and self._note.exists():
                self._note.unlink()  # first, or it would count the new rows as those of its own settings
                to_disk(self.path.parent)
            self._part.touch()
            self._file = self._stack.enter_context(io.FileIO(self._part, "r+"))
            self._file.truncate(self._place(self.rows) if self.rows else 0)
            self._file.seek(0, os.SEEK_END)
            if not self.rows:
                self._write(self._header)
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file and leave it as it is."""
        self._stack.close()

    @property
    def whole(self) -> bool:
        """Whether all rows are there."""
        return self.rows == self.shape[0]

    def fill(self, produce: Callable[[int], np.ndarray], noted: Sequence[int] = ()) -> None:
        """Append what `produce` makes from each row on until the file is whole, or a signal is noted."""
        while not self.whole:
            self.append(produce(self.rows))
            if noted:
                self.sync()
                done = f"stopped after {self.rows} of {self.shape[0]} images of {self.path.name}"
                raise StoppedError(noted[0], f"{done}; the same command goes on from there")
        self.finish()

    def append(self, rows: np.ndarray) -> None:
        """Write some rows `[n, ...]` behind those that are there."""
        if rows.dtype != np.uint8 or rows.shape[1:] != self.shape[1:] or self.rows + len(rows) > self.shape[0]:
            raise ValueError(f"rows {rows.dtype} {rows.shape} do not fit behind {self.rows} of uint8 {self.shape}")
        with self._failures_explained():
            try:
                self._write(rows.tobytes())
            except OSError:
                with suppress(OSError):  # without the torn rows there may be space to count the others
                    self._file.truncate(self._place(self.rows))
                    self._sync()
                raise
            self.rows += len(rows)
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read some of the rows that are there."""
        with (self.path if self.path.exists() else self._part).open("rb") as file:
            file.seek(self._place(start))
            count = (min(stop, self.rows) - start) * self._row_bytes
            return np.fromfile(file, np.uint8, count).reshape(-1, *self.shape[1:])

    def sync(self) -> None:
        """Make the rows so far count."""
        with self._failures_explained():
            self._sync()

    def finish(self) -> None:
        """Give the file its name, if all rows are there."""
        if not self.whole:
            raise ValueError(f"{self.path} has {self.rows} of {self.shape[0]} rows")
        if self.path.exists():
            return
        with self._failures_explained():
            self._sync()
            self._part.replace(self.path)
            to_disk(self.path.parent)
            self._note.unlink()

    def _rows_there(self) -> int:
        if self.path.exists():
            if not self._begins_well(self.path) or self.path.stat().st_size != self._place(self.shape[0]):
                raise ValueError(
                    f"{self.path} is not an array of uint8 {self.shape}: delete it, and the same command writes it "
                    "again"
                )
            return self.shape[0]
        try:
            count, settings = self._note.read_text().split()
            rows = int(count)
        except (OSError, ValueError):
            return 0
        fits = settings == self._settings and 0 <= rows <= self.shape[0] and self._begins_well(self._part)
        return rows if fits and self._part.stat().st_size >= self._place(rows) else 0

    def _begins_well(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(self._header)) == self._header

    def _place(self, row: int) -> int:
        return len(self._header) + row * self._row_bytes

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:  # a disk that is nearly full takes the first part of it
            rest = rest[self._file.write(rest) :]

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        with replacing(self._note) as draft:
            draft.write_text(f"{self.rows} {self._settings}\n")
        self._synced = time.monotonic()

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            missing = self._place(self.shape[0]) - self._place(self.rows)
            free = shutil.disk_usage(self.path.parent).free
            raise OSError(
                f"{self.path} cannot be written after {self.rows} of {self.shape[0]} rows ({error.strerror}): "
                f"{mebibytes(missing)} are missing, {mebibytes(free)} are free. What is there is kept: make space, and "
                "the same command goes on"
            ) from error


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a small array at once, atomically."""
    with replacing(path) as draft, draft.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def save_labels(path: Path, labels: Tensor, num_classes: int) -> None:
    """Write labels `[N]` as uint8, as the public sets have them, or as int64 where there are more classes."""
    save_array(path, _stored(labels, num_classes))


def has_labels(path: Path, labels: Tensor, num_classes: int) -> bool:
    """Tell whether a file is there that `save_labels` wrote; raise an error where it is another or damaged."""
    if not path.exists():
        return False
    expected = io.BytesIO()
    np.save(expected, _stored(labels, num_classes), allow_pickle=False)
    if path.read_bytes() != expected.getvalue():
        raise ValueError(f"{path} does not hold the labels: delete it, and the same command writes it again")
    return True


def part_of(path: Path) -> Path:
    """Give the name of a file while it is not whole."""
    return path.with_name(f".{path.name}.part")


def check_space(out: Path, sizes: dict[str, int]) -> None:
    """Raise an error where the files of `sizes` (name: bytes) are not in the folder `out` and have no space there."""
    needed = 0
    for name, size in sizes.items():
        there = [path.stat().st_size for path in (out / name, part_of(out / name)) if path.is_file()]
        needed += max(0, size - max(there, default=0))
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            f"{out} needs {mebibytes(needed)} more, and {mebibytes(free)} are free: make space, or choose another --out"
        )


def mebibytes(count: int) -> str:
    """Write a number of bytes for people.

    >>> mebibytes(5 * 2**19)
    '2.5 MiB'
    """
    return f"{count / 2**20:.1f} MiB"


def _stored(labels: Tensor, num_classes: int) -> np.ndarray:
    return labels.numpy().astype(np.uint8 if num_classes <= 256 else np.int64)


def _header(shape: tuple[int, ...]) -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return text.getvalue()

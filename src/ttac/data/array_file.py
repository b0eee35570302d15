"""Arrays of hours: written front to back, gone on with after an interruption, and never taken for whole too early."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ttac.common.files import check_space, replacing, text_hash, to_disk, writing
from ttac.common.resumable import Checkpoints

SYNC_SECONDS = 5.0


class ArrayFile:
    """A uint8 `.npy` of a known shape `[N, ...]` that is written in order, from the rows that are on disk already.

    Rows go to `.<name>.part`, and the file takes its name when all of them are there. What counts after a crash is the
    number in `.<name>.rows`, written after those rows have reached the disk; anything behind them is cut off. Beside it
    is a hash of the `settings`, all that the rows depend on: those of other settings do not count. Rows are plainly
    written: a memory map of a sparse file would end the process, without a message, where the disk is full.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ArrayFile(Path(folder, "a.npy"), (3, 2), {}).fill(lambda start: np.full((1, 2), start, np.uint8))
    ...     np.load(Path(folder, "a.npy")).tolist()
    [[0, 0], [1, 1], [2, 2]]
    """

    def __init__(self, path: Path, shape: tuple[int, ...], settings: Mapping[str, Any]) -> None:
        self.path, self.shape = path, shape
        self._part, self._note = part_of(path), path.with_name(f".{path.name}.rows")
        self._header = _header(shape)
        self._settings = text_hash([json.dumps([shape, settings], sort_keys=True)])
        self._row_bytes = math.prod(shape[1:])
        self.rows = self._rows_there()

    @property
    def whole(self) -> bool:
        """Whether all rows are there."""
        return self.rows == self.shape[0]

    def fill(self, produce: Callable[[int], np.ndarray], noted: Sequence[int] = ()) -> None:
        """Append what `produce` makes from each row on until the file is whole, or a signal is noted."""
        if not self.path.exists():
            with writing(self.path):
                self._write_rows(produce, noted)
                self._part.replace(self.path)
                to_disk(self.path.parent)
        self._note.unlink(missing_ok=True)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read some of the rows that are there."""
        with (self.path if self.path.exists() else self._part).open("rb") as file:
            file.seek(self._place(start))
            count = (min(stop, self.rows) - start) * self._row_bytes
            return np.fromfile(file, np.uint8, count).reshape(-1, *self.shape[1:])

    def _write_rows(self, produce: Callable[[int], np.ndarray], noted: Sequence[int]) -> None:
        if self.rows:
            os.truncate(self._part, self._place(self.rows))
        else:
            self._note.unlink(missing_ok=True)  # first, or it would count the new rows as those of its own settings
            to_disk(self.path.parent)
        with io.FileIO(self._part, "a" if self.rows else "w") as file:
            if not self.rows:
                _write(file, self._header)
            checkpoints = Checkpoints(SYNC_SECONDS, noted, lambda: self._sync(file))
            while not self.whole:
                rows = produce(self.rows)
                try:
                    _write(file, rows.tobytes())
                except OSError:
                    with suppress(OSError):  # without the torn rows there may be space to count the others
                        file.truncate(self._place(self.rows))
                        self._sync(file)
                    raise
                self.rows += len(rows)
                checkpoints.after_step(f"{self.rows} of {self.shape[0]} images of {self.path.name}", self.whole)

    def _rows_there(self) -> int:
        if self.path.exists():
            with self.path.open("rb") as file:
                begins_well = file.read(len(self._header)) == self._header
            if not begins_well or self.path.stat().st_size != self._place(self.shape[0]):
                wrong = f"{self.path} is not an array of uint8 {self.shape}"
                raise ValueError(f"{wrong}: delete it, and the same command writes it again")
            return self.shape[0]
        try:
            count, settings = self._note.read_text().split()
            rows, there = int(count), self._part.stat().st_size
        except (OSError, ValueError):
            return 0
        fits = settings == self._settings and 0 <= rows <= self.shape[0] and there >= self._place(rows)
        return rows if fits else 0

    def _place(self, row: int) -> int:
        return len(self._header) + row * self._row_bytes

    def _sync(self, file: io.FileIO) -> None:
        """Make the rows so far count."""
        os.fsync(file.fileno())
        with replacing(self._note) as draft:
            draft.write_text(f"{self.rows} {self._settings}\n")


def _write(file: io.FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:  # a disk that is nearly full takes the first part of it
        rest = rest[file.write(rest) :]


def ensure_labels(path: Path, labels: Tensor, num_classes: int) -> bool:
    """Write labels `[N]` where there is no file of them, and tell if there was; raise an error where it has others.

    They are uint8, as the public sets have them, or int64 where there are more classes.
    """
    content = io.BytesIO()
    np.save(content, labels.numpy().astype(np.uint8 if num_classes <= 256 else np.int64), allow_pickle=False)
    if not path.exists():
        with replacing(path) as draft:
            draft.write_bytes(content.getvalue())
        return False
    if path.read_bytes() != content.getvalue():
        raise ValueError(f"{path} does not hold the labels: delete it, and the same command writes it again")
    return True


def part_of(path: Path) -> Path:
    """Give the name of a file while it is not whole."""
    return path.with_name(f".{path.name}.part")


def check_space_of(out: Path, sizes: dict[str, int]) -> None:
    """Raise an error where the files of `sizes` (name: bytes) are not in the folder `out` and have no space there."""
    needed = 0
    for name, size in sizes.items():
        there = [path.stat().st_size for path in (out / name, part_of(out / name)) if path.is_file()]
        needed += max(0, size - max(there, default=0))
    check_space(out, needed)


def _header(shape: tuple[int, ...]) -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return text.getvalue()

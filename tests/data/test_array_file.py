"""Arrays that are written for hours: whole or not there, whatever ends the process in between."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ttac.common.resumable import StoppedError
from ttac.data import array_file
from ttac.data.array_file import ArrayFile, check_space_of, ensure_labels

SHAPE = (10, 4, 3)
SETTINGS = {"seed": 0}
WHOLE = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


def three_rows(start: int) -> np.ndarray:
    return WHOLE[start : start + 3]


def saved_by_numpy(folder: Path) -> bytes:
    np.save(folder / "numpy.npy", WHOLE)
    return (folder / "numpy.npy").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out/images.npy"


def leave_after(rows: int, path: Path, settings: dict[str, int] = SETTINGS) -> None:
    """Write some rows that count, and end."""
    noted: list[int] = []

    def produce(start: int) -> np.ndarray:
        noted.extend([signal.SIGTERM] * (start == rows - 1))
        return WHOLE[start : start + 1]

    with pytest.raises(StoppedError):
        ArrayFile(path, SHAPE, settings).fill(produce, noted)


class DiedError(Exception):
    """As a process does, without a word."""


def die_after(rows: int, path: Path, settings: dict[str, int] = SETTINGS) -> None:
    """Write some rows that nobody counts, and end."""

    def produce(start: int) -> np.ndarray:
        if start == rows:
            raise DiedError
        return WHOLE[start : start + 1]

    with pytest.raises(DiedError):
        ArrayFile(path, SHAPE, settings).fill(produce)


def test_the_file_is_what_numpy_saves(path: Path) -> None:
    ArrayFile(path, SHAPE, SETTINGS).fill(three_rows)
    assert path.read_bytes() == saved_by_numpy(path.parent.parent)
    assert list(path.parent.iterdir()) == [path]
    mapped = np.load(path, mmap_mode="r")
    assert (mapped.dtype, mapped.shape, mapped.flags.c_contiguous) == (np.uint8, SHAPE, True)


def test_the_name_is_not_there_before_the_last_row(path: Path) -> None:
    def produce(start: int) -> np.ndarray:
        assert not path.exists()
        return three_rows(start)

    ArrayFile(path, SHAPE, SETTINGS).fill(produce)
    assert np.array_equal(np.load(path), WHOLE)


def test_rows_go_on_behind_those_that_count(path: Path) -> None:
    leave_after(4, path)
    file = ArrayFile(path, SHAPE, SETTINGS)
    assert file.rows == 4
    assert np.array_equal(file.read(1, 9), WHOLE[1:4])
    file.fill(three_rows)
    assert np.array_equal(file.read(2, 10), WHOLE[2:])
    assert path.read_bytes() == saved_by_numpy(path.parent.parent)


def test_a_torn_tail_is_cut_off(path: Path) -> None:
    leave_after(4, path)
    with array_file.part_of(path).open("ab") as part:
        part.write(b"\xff" * 17)  # a whole row and half of one that were never counted
    file = ArrayFile(path, SHAPE, SETTINGS)
    assert file.rows == 4
    file.fill(three_rows)
    assert np.array_equal(np.load(path), WHOLE)


def test_rows_that_nobody_counted_do_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die_after(3, path)
    assert ArrayFile(path, SHAPE, SETTINGS).rows == 0
    monkeypatch.setattr(array_file, "SYNC_SECONDS", 0.0)
    die_after(3, path)
    assert ArrayFile(path, SHAPE, SETTINGS).rows == 3


def lose_the_part(path: Path) -> None:
    array_file.part_of(path).unlink()


def shorten_the_part(path: Path) -> None:
    os.truncate(array_file.part_of(path), 140)


def note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.rows")


def count_with(text: str) -> Any:
    return lambda path: note_of(path).write_text(note_of(path).read_text().replace("4", text, 1))


def lose_the_settings(path: Path) -> None:
    note_of(path).write_text("4\n")


@pytest.mark.parametrize(
    "damage",
    [
        lose_the_part,
        shorten_the_part,
        lose_the_settings,
        *map(count_with, ("", "four", "-1", "11", "4.0", "99")),
    ],
)
def test_what_is_damaged_is_written_again(damage: Any, path: Path) -> None:
    leave_after(4, path)
    damage(path)
    file = ArrayFile(path, SHAPE, SETTINGS)
    assert file.rows == 0
    file.fill(three_rows)
    assert np.array_equal(np.load(path), WHOLE)


def test_a_part_of_another_shape_is_written_again(path: Path) -> None:
    leave_after(4, path)
    assert ArrayFile(path, (9, 4, 3), SETTINGS).rows == 0


def test_rows_of_other_settings_are_written_again(path: Path) -> None:
    leave_after(4, path)
    other = {"seed": 1}
    assert ArrayFile(path, SHAPE, other).rows == 0
    die_after(5, path, other)
    # Rows of the others are on disk that nobody counted, and what was counted before is gone.
    assert [ArrayFile(path, SHAPE, given).rows for given in (SETTINGS, other)] == [0, 0]
    ArrayFile(path, SHAPE, SETTINGS).fill(three_rows)
    assert np.array_equal(np.load(path), WHOLE)


def test_a_whole_file_is_left_alone_and_another_is_refused(path: Path) -> None:
    ArrayFile(path, SHAPE, SETTINGS).fill(three_rows)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    note_of(path).write_text("10\n")  # as after a death between rename and removal
    file = ArrayFile(path, SHAPE, SETTINGS)
    assert file.whole
    file.fill(lambda start: pytest.fail("it was written again"))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert list(path.parent.iterdir()) == [path]
    for content in (path.read_bytes()[:-1], b"something else"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not an array of uint8"):
            ArrayFile(path, SHAPE, SETTINGS)
        assert path.read_bytes() == content


def test_a_noted_signal_ends_after_the_rows_and_they_count(path: Path) -> None:
    noted: list[int] = []

    def produce(start: int) -> np.ndarray:
        noted.extend([signal.SIGTERM] * (start == 3))
        return three_rows(start)

    with pytest.raises(StoppedError, match="stopped after 6 of 10 images") as stop:
        ArrayFile(path, SHAPE, SETTINGS).fill(produce, noted)
    assert stop.value.signum == signal.SIGTERM
    assert ArrayFile(path, SHAPE, SETTINGS).rows == 6


@pytest.mark.parametrize("place", ["write", "fsync"])
def test_a_full_disk_is_said_and_what_is_there_is_kept(place: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_after(4, path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ArrayFile(path, SHAPE, SETTINGS)
    with monkeypatch.context() as patched:
        patched.setattr(*((os, "fsync", full) if place == "fsync" else (array_file, "_write", full)))
        with pytest.raises(OSError, match=r"images.npy cannot be written, the disk is full: make space"):
            file.fill(three_rows)
    file = ArrayFile(path, SHAPE, SETTINGS)
    assert file.rows == 4
    file.fill(three_rows)
    assert path.read_bytes() == saved_by_numpy(path.parent.parent)


# In a mount namespace of its own, so that the disk is gone with the process.
ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
import numpy as np
from ttac.data.array_file import ArrayFile

def write():
    file = ArrayFile(Path(disk, "a.npy"), (64, 16384), {})
    print(file.rows)
    file.fill(lambda start: np.full((4, 16384), start, np.uint8))

disk = sys.argv[1]
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk]).returncode:
    sys.exit(77)
try:
    write()
except OSError as error:
    print(error)
print(Path(disk, "a.npy").exists())
subprocess.run(["mount", "-o", "remount,size=2m", disk], check=True)
write()
expected = np.repeat(np.arange(0, 64, 4, dtype=np.uint8), 4)[:, None].repeat(16384, 1)
print(np.array_equal(np.load(Path(disk, "a.npy")), expected))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare to mount a small disk with")
    ended = subprocess.run(
        [unshare, "--map-root-user", "--mount", sys.executable, "-c", ON_A_SMALL_DISK, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == 77 or ended.stderr.startswith("unshare"):
        pytest.skip("mounting a small disk is not permitted here")
    assert ended.returncode == 0, ended.stderr  # a sparse memory map would have died of SIGBUS
    began, failure, existed, went_on, right = ended.stdout.splitlines()
    assert (began, existed, went_on, right) == ("0", "False", "28", "True")
    assert "a.npy cannot be written, the disk is full" in failure


def test_space_is_counted_before(tmp_path: Path) -> None:
    out = tmp_path / "not/yet/there"
    check_space_of(out, {"a.npy": 1000})
    with pytest.raises(OSError, match=r"there needs 1048576.0 MiB more, and [\d.]+ MiB are free: make space"):
        check_space_of(out, {"a.npy": 2**39, "b.npy": 2**39})
    assert not (tmp_path / "not").exists()


def test_space_of_what_is_there_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    (tmp_path / "a.npy").write_bytes(b"x" * 400)
    (tmp_path / ".b.npy.part").write_bytes(b"x" * 300)
    check_space_of(tmp_path, {"a.npy": 400, "b.npy": 400})
    with pytest.raises(OSError, match="make space"):
        check_space_of(tmp_path, {"a.npy": 400, "b.npy": 401})


def test_labels_are_bytes_while_they_fit(tmp_path: Path) -> None:
    for classes, kind in ((256, np.uint8), (257, np.int64)):
        (tmp_path / "labels.npy").unlink(missing_ok=True)
        assert not ensure_labels(tmp_path / "labels.npy", torch.arange(classes), classes)
        labels = np.load(tmp_path / "labels.npy")
        assert labels.dtype == kind
        assert np.array_equal(labels, np.arange(classes))
        assert ensure_labels(tmp_path / "labels.npy", torch.arange(classes), classes)
        with pytest.raises(ValueError, match=r"labels.npy does not hold the labels: delete it, and the same command"):
            ensure_labels(tmp_path / "labels.npy", torch.arange(classes).flip(0), classes)
    assert {path.name for path in tmp_path.iterdir()} == {"labels.npy"}

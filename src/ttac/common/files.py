"""Files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DENIED = "permission is denied: choose another place, or get the permission"
REASONS = {
    errno.ENOSPC: "the disk is full: make space, and run the same command again",
    errno.EDQUOT: "your share of the disk is full: make space, and run the same command again",
    errno.EROFS: "the disk is read-only: choose another place",
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EFBIG: "it is larger than files may be here (ulimit -f)",
}


class DiskError(OSError):
    """A place does not take what is written to it; the message says where, why and what to do."""


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raise a `DiskError` that names `path` where the block cannot write."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskError) or error.errno not in REASONS:
            raise
        raise DiskError(f"{path} cannot be written, {REASONS[error.errno]}") from error


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give a temporary path beside `path`, and move it there when the block ends well.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, replacing(Path(folder) / "a.txt") as draft:
    ...     _ = draft.write_text("whole")
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield draft
            to_disk(draft)
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def check_output(path: Path, kind: Literal["file", "folder"], option: str) -> None:
    """Raise an error where `path` could not be written; `option` is what the user calls it.

    A file that is made and gone at once is the only test that holds for every disk and every user.
    """
    if path.exists() and path.is_dir() != (kind == "folder"):
        raise ValueError(f"{option} {path} is a {'file' if kind == 'folder' else 'folder'}; name a {kind}")
    place = _nearest(path.parent if kind == "file" else path)
    if not place.is_dir():
        raise ValueError(f"{option} {path} cannot be made: {place} is no folder")
    with writing(f"{option} {path}"), tempfile.TemporaryFile(dir=place) as probe:
        probe.write(bytes(4096))


def check_space(path: Path, needed: int) -> None:
    """Raise an error where so many bytes have no space below `path`, which need not be there yet."""
    free = shutil.disk_usage(_nearest(path)).free
    if needed > free:
        lack = f"{path} needs {_mebibytes(needed)} more, and {_mebibytes(free)} are free"
        raise DiskError(f"{lack}: make space, or take another folder")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _nearest(path: Path) -> Path:
    """Give the deepest of a path and the folders that it is in that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one))


def to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, would outlast a power cut."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and its file system journals their changes
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # it writes out what it may write to
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """Give the folder where this user's models and data sets are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ttac"


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_pickle(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values as torch saves them, atomically."""
    import torch  # not before it is due: the command line waits for this module

    with replacing(path) as draft, draft.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # what torch says of the end of a file that Python could not write
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def text_hash(lines: list[str]) -> str:
    """Hash a list of lines: a short name for what was listed.

    >>> text_hash(["a", "b"]) == text_hash(["ab"])
    False
    """
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_lines(path: Path) -> tuple[str, ...]:
    """Read the lines of a text file, such as class names, without the space around them."""
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())

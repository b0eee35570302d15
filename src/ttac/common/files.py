"""Files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give a temporary path beside `path`, and move it there when the block ends well.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, replacing(Path(folder) / "a.txt") as draft:
    ...     _ = draft.write_text("whole")
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        to_disk(draft)
        draft.chmod(0o666 & ~_umask())  # safetensors keeps its files from everybody else
        draft.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:  # a write does not say of which file
            raise OSError(errno.ENOSPC, "no space left on the disk for", str(path)) from error
        raise
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Say at a full disk what was being written, for commands that go on with it."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        kept = f"what is there of {path} is kept"
        raise OSError(f"the disk is full: {kept}; make space, and the same command goes on") from error


def to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, would outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


def user_cache() -> Path:
    """Give the folder where this user's models and data sets are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ttac"


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def text_hash(lines: list[str]) -> str:
    """Hash a list of lines: a short name for what was listed.

    >>> text_hash(["a", "b"]) == text_hash(["ab"])
    False
    """
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_lines(path: Path) -> tuple[str, ...]:
    """Read the lines of a text file, such as class names, without the space around them."""
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())

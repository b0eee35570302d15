"""Archives from outside, unpacked without letting them reach beyond their own folder."""

from __future__ import annotations

import gzip
import math
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from ttac.common.files import to_disk

CHUNK = 2**20
MAX_MEMBERS = 3_000_000
MAX_HEADER = 2**20  # bytes before the content of a member, with its long name and all else
MAX_PADDING = 2**24
# RuntimeError is of headers that nest too deep, and the errors of files are of one that stands where a folder should.
_DAMAGE = (
    tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, RuntimeError, FileExistsError,
    NotADirectoryError,
)  # fmt: skip


def unpack(archive: Path, target: Path, limit: int) -> None:
    """Unpack a `.tar` or `.tar.gz` of at most `limit` bytes into a folder, whole or not at all.

    It is read to its end before anything is written. A single folder of the target's name at the top becomes the
    target itself.
    """
    draft = target.with_name(f".{target.name}.unpacking")
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
    if target.exists():
        raise ValueError(f"{target} is in the way of what {archive} holds: remove it")
    try:
        _check(archive, limit)
        _extract(archive, draft)
        for path in (*draft.rglob("*"), draft):  # the name must not reach the disk before the content
            to_disk(path)
        inner = draft / target.name
        (inner if inner.is_dir() and list(draft.iterdir()) == [inner] else draft).rename(target)
        to_disk(target.parent)
    except _DAMAGE as error:
        raise ValueError(f"{archive} is cut off, damaged or not to be trusted: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Content:
    """The bytes of an archive, of which `left` may be read: headers are held in memory, however long they are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.left = file, float(MAX_HEADER)
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self.left -= size
        if size < 0 or self.left < 0:
            raise tarfile.ReadError("a header, or what follows the last member, is too long")
        return self._file.read(size)


@contextmanager
def _opened(archive: Path) -> Iterator[tuple[tarfile.TarFile, _Content]]:
    with archive.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content = _Content(cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if zipped else file)
        yield tarfile.TarFile(fileobj=cast("IO[bytes]", content)), content


def _members(opened: tarfile.TarFile, content: _Content) -> Iterator[tarfile.TarInfo]:
    while (member := opened.next()) is not None:
        content.left = math.inf
        yield member
        content.left = MAX_HEADER
        opened.members = []  # type: ignore[attr-defined]  # a million would be remembered


def _check(archive: Path, limit: int) -> None:
    """Read an archive to its end, and refuse what is not to be unpacked."""
    number = 0
    with _opened(archive) as (opened, content):
        for number, member in enumerate(_members(opened, content), 1):
            limit -= member.size
            if limit < 0 or member.size < 0 or number > MAX_MEMBERS:
                raise tarfile.ReadError("it holds more than is expected of it")
            if not (member.isfile() or member.isdir()):
                raise tarfile.ReadError(f"{member.name!r} is a link or a device, which are not unpacked")
        content.left = MAX_PADDING
        while rest := content.read(CHUNK):  # to the end, where gzip compares its own checksum
            if rest.strip(b"\0"):  # the reader takes a header that is damaged for the end
                raise tarfile.ReadError("what follows its last member is neither a member nor padding")
    if not number:
        raise tarfile.ReadError("it is empty")


def _extract(archive: Path, folder: Path) -> None:
    with _opened(archive) as (opened, content):
        for member in _members(opened, content):
            if member.isfile() and (folder / member.name).exists():
                raise tarfile.ReadError(f"it holds {member.name!r} twice")
            opened.extract(member, folder, filter="data")

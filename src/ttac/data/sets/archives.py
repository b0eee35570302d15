"""Archives from outside, unpacked without letting them reach beyond their own folder."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from ttac.common.files import to_disk

MAX_MEMBERS = 3_000_000
MAX_HEADER = 2**20  # bytes of one member, with its long name and all else that stands before its content
MAX_PADDING = 2**24
CHUNK = 2**20
# What the readers raise; RuntimeError is of headers that nest too deep.
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, RuntimeError)


@dataclass
class _Member:
    name: str
    size: int
    is_folder: bool
    refusal: str | None  # why it is neither a plain file nor a folder
    content: IO[bytes] | None


def unpack(archive: Path, target: Path, limit: int) -> None:
    """Unpack a `.tar` or `.tar.gz` of at most `limit` bytes into the folder `target`, whole or not at all.

    Members are written as new plain files: no links, devices, owners or modes are taken over. A single folder of the
    target's name at the top becomes the target itself.
    """
    draft = target.with_name(f".{target.name}.unpacking")
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
    if target.exists():
        raise ValueError(f"{target} is in the way of what {archive} holds: remove it")
    try:
        draft.mkdir(parents=True)
        left = limit
        with _opened(archive, limit) as members:
            for number, member in enumerate(members):
                if number == MAX_MEMBERS:
                    raise ValueError(f"{archive} has more than {MAX_MEMBERS} members")
                left -= member.size
                if left < 0:
                    raise ValueError(f"{archive} holds more than the {limit} bytes that are expected of it")
                _write(archive, member, draft)
        entries = list(draft.iterdir())
        if not entries:
            raise ValueError(f"{archive} is empty")
        for folder, _, files in os.walk(draft, topdown=False):  # the name must not reach the disk before the content
            for path in (*(Path(folder, name) for name in files), Path(folder)):
                to_disk(path)
        inner = draft / target.name
        (inner if entries == [inner] and inner.is_dir() else draft).rename(target)
        to_disk(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(archive: Path, member: _Member, folder: Path) -> None:
    parts = PurePosixPath(member.name).parts
    if member.is_folder and not parts:  # the archive of a folder's content, as `tar -C folder -c .` makes it
        return
    if not parts or member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise ValueError(f"{archive} holds {member.name!r}, which leads out of its folder")
    if member.refusal is not None:
        raise ValueError(f"{archive} holds {member.name!r}, {member.refusal}, which is not unpacked")
    path = folder.joinpath(*parts)
    try:
        if member.is_folder:
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        out = path.open("xb")
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{archive} holds {member.name!r} twice") from error
    assert member.content is not None
    left = member.size
    with out, member.content as content:
        while left and (chunk := content.read(min(CHUNK, left))):
            out.write(chunk)
            left -= len(chunk)
    if left:
        raise ValueError(f"{archive} is cut off within {member.name}")


class _Source:
    """An archive's bytes in their order, of which no more than is allowed are inflated or held in memory."""

    def __init__(self, content: IO[bytes], limit: int) -> None:
        self._content, self._limit, self._position = content, limit, 0
        self.header_left: int | None = None  # while content is read
        self.last = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise tarfile.ReadError("a member begins before the end of another")
        while self._position < position and self._take(min(CHUNK, position - self._position)):
            pass

    def read(self, size: int) -> bytes:
        if self.header_left is not None:
            self.header_left -= size
            if self.header_left < 0:
                raise tarfile.ReadError(f"a header has more than {MAX_HEADER} bytes")
        self.last = self._take(size)
        return self.last

    def _take(self, size: int) -> bytes:
        taken = self._content.read(min(size, self._limit - self._position + 1))
        self._position += len(taken)
        if self._position > self._limit:
            raise tarfile.ReadError(f"more than {self._limit} bytes come out of it")
        return taken


@contextmanager
def _opened(archive: Path, limit: int) -> Iterator[Iterator[_Member]]:
    """Yield the members one after the other; whatever a damaged archive raises becomes an error that names it."""
    try:
        with archive.open("rb") as packed:
            zipped = packed.read(2) == b"\x1f\x8b"
            packed.seek(0)
            # A quarter more is for headers: enough where a member has 4 KiB.
            content = cast("IO[bytes]", gzip.GzipFile(fileobj=packed)) if zipped else packed
            source = _Source(content, limit + limit // 4 + MAX_PADDING)
            with _header(source):
                opened = tarfile.TarFile(fileobj=cast("IO[bytes]", source))
            yield _members(opened, source)
    except _DAMAGE as error:
        raise ValueError(f"{archive} is cut off, damaged or no archive: {error}") from error


def _members(archive: tarfile.TarFile, source: _Source) -> Iterator[_Member]:
    while True:
        with _header(source):
            member = archive.next()
        if member is None:
            break
        if member.isfile():  # sparse files too, whose size is what they would take
            yield _Member(member.name, member.size, False, None, archive.extractfile(member))
        else:
            kind = "a link" if member.issym() or member.islnk() else "a device"
            yield _Member(member.name, 0, member.isdir(), None if member.isdir() else kind, None)
        archive.members, archive.pax_headers = [], {}  # type: ignore[attr-defined]  # a million would be remembered
    _check_end(source)


@contextmanager
def _header(source: _Source) -> Iterator[None]:
    source.header_left = MAX_HEADER
    try:
        yield
    except ValueError as error:  # numbers that are none
        raise tarfile.ReadError(str(error)) from error
    finally:
        source.header_left = None


def _check_end(source: _Source) -> None:
    """Refuse an end that is no padding: the reader takes a header that is damaged, or that is missing, for the end.

    All is read, for gzip compares its own checksum last.
    """
    block = source.last
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("its end is missing")
    padding = 0
    while block:
        padding += len(block)
        if block.strip(b"\0"):
            raise tarfile.ReadError("what follows its last member is neither a member nor padding")
        if padding > MAX_PADDING:
            raise tarfile.ReadError("it goes on behind its end")
        block = source.read(CHUNK)
    if padding % tarfile.BLOCKSIZE:
        raise tarfile.ReadError("its end is missing")

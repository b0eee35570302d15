"""Archives from outside, unpacked without letting them reach beyond their own folder."""

from __future__ import annotations

import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

MAX_MEMBERS = 3_000_000
MAX_PADDING = 2**24
CHUNK = 2**20
# What the readers raise; RuntimeError is of methods of compression that are not known.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


@dataclass
class _Member:
    name: str
    size: int
    is_folder: bool
    refusal: str | None  # why it is neither a plain file nor a folder
    content: IO[bytes] | None


def unpack(archive: Path, target: Path, limit: int) -> None:
    """Unpack a `.tar`, `.tar.gz` or `.zip` of at most `limit` bytes into the folder `target`, whole or not at all.

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
        with _opened(archive) as members:
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
        os.sync()  # the name must not reach the disk before the content
        inner = draft / target.name
        (inner if entries == [inner] and inner.is_dir() else draft).rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(archive: Path, member: _Member, folder: Path) -> None:
    parts = PurePosixPath(member.name).parts
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


@contextmanager
def _opened(archive: Path) -> Iterator[Iterator[_Member]]:
    """Yield the members one after the other; whatever a damaged archive raises becomes an error that names it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened_zip:
                yield _of_zip(opened_zip)
        else:
            _check_end(archive)
            with tarfile.open(archive, "r:gz" if _is_gzip(archive) else "r:") as opened_tar:
                yield _of_tar(opened_tar)
    except _DAMAGE as error:
        raise ValueError(f"{archive} is cut off, damaged or no archive: {error}") from error
    except OSError as error:
        if error.errno is None:  # gzip's complaints
            raise ValueError(f"{archive} is cut off, damaged or no archive: {error}") from error
        raise


def _of_tar(archive: tarfile.TarFile) -> Iterator[_Member]:
    while (member := archive.next()) is not None:
        if member.isfile():  # sparse files too, whose size is what they would take
            yield _Member(member.name, member.size, False, None, archive.extractfile(member))
        else:
            kind = "a link" if member.issym() or member.islnk() else "a device"
            yield _Member(member.name, 0, member.isdir(), None if member.isdir() else kind, None)
        archive.members = []  # type: ignore[attr-defined]  # it would remember a million of them
    # Padding comes last, and behind it gzip's own checksum, which is compared when all has been read.
    assert archive.fileobj is not None
    for _ in range(MAX_PADDING // CHUNK):
        if not archive.fileobj.read(CHUNK):
            return
    raise tarfile.ReadError("it goes on behind its end")


def _of_zip(archive: zipfile.ZipFile) -> Iterator[_Member]:
    for member in archive.infolist():
        if member.flag_bits & 1:
            raise ValueError(f"{archive.filename} is encrypted")
        kind = stat.S_IFMT(member.external_attr >> 16)
        plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
        content = archive.open(member) if plain and not member.is_dir() else None
        yield _Member(
            member.filename, member.file_size, member.is_dir(), None if plain else "a link or a device", content
        )


def _is_gzip(archive: Path) -> bool:
    with archive.open("rb") as content:
        return content.read(2) == b"\x1f\x8b"


def _check_end(archive: Path) -> None:
    """Refuse a plain tar that was cut off between two members, which its reader would take for whole."""
    if _is_gzip(archive):
        return
    with archive.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - 512))
        if size % 512 or content.read().strip(b"\0"):
            raise tarfile.ReadError("its end is missing")

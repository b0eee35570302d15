"""Archives are unpacked whole or not at all, and never reach beyond their folder."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from ttac.data.sets import archives
from ttac.data.sets.archives import unpack

LIMIT = 10_000
PLAIN = {"set/a.txt": b"a" * 700, "set/deep/b.txt": b"b"}


def tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for info, body in members:
            info.size = len(body) if info.isfile() else 0
            archive.addfile(info, io.BytesIO(body))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def plain_tar(path: Path, mode: str = "w", files: dict[str, bytes] = PLAIN) -> Path:
    return tar(path, [(member(name), body) for name, body in files.items()], mode)


def unpacked(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(archive: Path, message: str = "is cut off, damaged or not to be trusted: ") -> None:
    """Expect an error that names the archive, and nothing beside it."""
    before = sorted(archive.parent.rglob("*"))
    with pytest.raises(ValueError, match=rf"{archive.name} {message}"):
        unpack(archive, archive.parent / "set", LIMIT)
    assert sorted(archive.parent.rglob("*")) == before


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "named wrongly"])
def test_what_is_plain_comes_out(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / ("a.tar" if kind == "named wrongly" else f"a.{kind}")
    plain_tar(archive, "w" if kind == "tar" else "w:gz")
    unpack(archive, tmp_path / "set", LIMIT)  # the only folder at the top has its name
    assert unpacked(tmp_path / "set") == {"a.txt": b"a" * 700, "deep/b.txt": b"b"}
    unpack(archive, tmp_path / "other", LIMIT)
    assert unpacked(tmp_path / "other") == {"set/a.txt": b"a" * 700, "set/deep/b.txt": b"b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([archive.name, "set", "other"])


def test_modes_and_owners_are_not_taken_over(tmp_path: Path) -> None:
    info = member("a")
    info.mode, info.uid = 0o6777, 12345
    unpack(tar(tmp_path / "a.tar", [(member("f", tarfile.DIRTYPE), b""), (info, b"x")]), tmp_path / "set", LIMIT)
    found = (tmp_path / "set/a").stat()
    assert not found.st_mode & (stat.S_ISUID | stat.S_ISGID)
    assert found.st_uid == os.getuid()
    assert (tmp_path / "set/f").is_dir()


@pytest.mark.parametrize("name", ["../out", "/../out", "a/../../out", ".."])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    refused(tar(folder / "a.tar", [(member("fine"), b"x"), (member(name), b"x")]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        (tarfile.SYMTYPE, "/etc"),
        (tarfile.SYMTYPE, "fine"),
        (tarfile.LNKTYPE, "../../secret"),
        (tarfile.CHRTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ],
)
def test_links_and_devices_are_refused(kind: bytes, link: str, tmp_path: Path) -> None:
    refused(tar(tmp_path / "a.tar", [(member("fine"), b"x"), (member("bad", kind, link), b"")]))


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    big = {"zeros": bytes(50 * LIMIT)}
    refused(plain_tar(tmp_path / "a.tar.gz", "w:gz", big))
    many = {f"{number}": bytes(LIMIT // 4) for number in range(5)}
    refused(plain_tar(tmp_path / "b.tar.gz", "w:gz", many))


@pytest.mark.parametrize("kind", ["path", "comment", "GNU.sparse.map"])
@pytest.mark.parametrize("place", [0, 1])
def test_headers_take_no_more_than_a_little_memory(kind: str, place: int, tmp_path: Path) -> None:
    bomb = member("bomb")
    bomb.pax_headers = {kind: "1" * 50 * archives.MAX_HEADER}
    members = [(member("fine"), b"x"), (member("more"), b"x")]
    members.insert(place, (bomb, b""))
    archive = tar(tmp_path / "a.tar.gz", members, "w:gz")
    tracemalloc.start()
    try:
        refused(archive)
        assert tracemalloc.get_traced_memory()[1] < 10 * archives.MAX_HEADER
    finally:
        tracemalloc.stop()


def test_headers_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = b"".join(member("a", tarfile.XHDTYPE).tobuf() for _ in range(3000))
    (tmp_path / "a.tar").write_bytes(nested)
    refused(tmp_path / "a.tar")
    monkeypatch.setattr(archives, "MAX_PADDING", 2**20)
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(plain_tar(tmp_path / "b.tar").read_bytes() + bytes(2**22)))
    refused(tmp_path / "b.tar.gz")


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE])
def test_sizes_below_zero_are_refused(kind: bytes, tmp_path: Path) -> None:
    info = member("a", kind)
    info.size = -512  # which would lead the reader back to where it was
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    refused(tmp_path / "a.tar")


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    refused(plain_tar(tmp_path / "a.tar", files={f"{number}": b"" for number in range(4)}))


@pytest.mark.parametrize("second", ["a/b", "./a/b", "a/b/c", "a//b"])
def test_names_that_come_twice_are_refused(second: str, tmp_path: Path) -> None:
    refused(tar(tmp_path / "a.tar", [(member("a/b"), b"x"), (member(second), b"y")]))


def test_nothing_is_written_of_an_archive_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarfile.TarFile, "extract", lambda *_, **__: pytest.fail("something was written"))
    refused(plain_tar(tmp_path / "a.tar", files={"small": b"x", "large": bytes(2 * LIMIT)}))


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_every_truncation_is_noticed(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / f"a.{kind}"
    files = {f"set/{number}": os.urandom(600) for number in range(3)}
    whole = plain_tar(archive, f"w:{kind[4:]}", files).read_bytes()
    # A plain tar that ends between two members looks whole: its size tells.
    end = 3 * (512 + 1024) - 1 if kind == "tar" else len(whole) - 9
    for size in {0, 1, 511, 512, 1000, 1535, 2 * 1536 - 1, end}:
        archive.write_bytes(whole[: min(size, end)])
        refused(archive)


def test_bits_that_flipped_are_noticed(tmp_path: Path) -> None:
    archive = plain_tar(tmp_path / "a.tar.gz", "w:gz", {"a": os.urandom(1000)})
    body = bytearray(archive.read_bytes())
    body[700] ^= 1
    archive.write_bytes(body)
    refused(archive)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", [3, 130, 150])  # in the name, the size and the checksum
def test_a_header_that_is_damaged_is_noticed(place: int, zipped: bool, tmp_path: Path) -> None:
    files = {f"{number}": b"x" * 600 for number in range(6)}  # of 512 + 1024 bytes each
    body = bytearray(plain_tar(tmp_path / "plain.tar", files=files).read_bytes())
    body[3 * 1536 + place] ^= 1
    archive = tmp_path / "a.tar"
    archive.write_bytes(gzip.compress(body) if zipped else body)
    refused(archive)


def test_the_archive_of_a_folders_content_comes_out(tmp_path: Path) -> None:
    members = [(member(".", tarfile.DIRTYPE), b""), (member("./a", tarfile.DIRTYPE), b""), (member("./a/b"), b"x")]
    unpack(tar(tmp_path / "a.tar", members), tmp_path / "new", LIMIT)
    assert unpacked(tmp_path / "new") == {"a/b": b"x"}


def test_a_tar_that_ends_with_a_zip_file_is_a_tar(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("inner", "x")
    unpack(plain_tar(tmp_path / "a.tar", files={"a": b"a", "b.zip": packed.getvalue()}), tmp_path / "new", LIMIT)
    assert unpacked(tmp_path / "new") == {"a": b"a", "b.zip": packed.getvalue()}


def test_what_was_written_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def note(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "set").exists()))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("other disks are nobody's business"))
    unpack(plain_tar(tmp_path / "a.tar"), tmp_path / "set", LIMIT)
    expected = {(path.stat().st_ino, False) for path in (tmp_path / "set", *(tmp_path / "set").rglob("*"))}
    assert expected < set(synced)
    assert synced[-1] == (tmp_path.stat().st_ino, True)


def test_other_files_are_no_archives(tmp_path: Path) -> None:
    for name, body in (("a.tar", b"<html>" * 1000), ("b.tar", gzip.compress(b"text")), ("c.tar", bytes(1024))):
        (tmp_path / name).write_bytes(body)
        refused(tmp_path / name)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    archive = plain_tar(tmp_path / "a.tar")
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match=r"set is in the way of what .*a.tar holds"):
        unpack(archive, tmp_path / "set", LIMIT)
    (tmp_path / ".new.unpacking").mkdir()  # left by a process that was killed
    (tmp_path / ".new.unpacking/old").write_text("old")
    unpack(archive, tmp_path / "new", LIMIT)
    assert sorted(unpacked(tmp_path / "new")) == ["set/a.txt", "set/deep/b.txt"]

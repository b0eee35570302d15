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


def refused(archive: Path, message: str, limit: int = LIMIT) -> None:
    """Expect an error that names the archive, and nothing beside it."""
    before = sorted(archive.parent.rglob("*"))
    with pytest.raises(ValueError, match=rf"{archive.name} {message}"):
        unpack(archive, archive.parent / "set", limit)
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
    assert not found.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IXUSR)
    assert found.st_uid == os.getuid()
    assert (tmp_path / "set/f").is_dir()


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "..", "a\\..\\out"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    refused(tar(folder / "a.tar", [(member("fine"), b"x"), (member(name), b"x")]), r"holds .* leads out of its folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]


@pytest.mark.parametrize(
    ("kind", "link", "what"),
    [
        (tarfile.SYMTYPE, "/etc", "a link"),
        (tarfile.SYMTYPE, "fine", "a link"),
        (tarfile.LNKTYPE, "../../secret", "a link"),
        (tarfile.CHRTYPE, "", "a device"),
        (tarfile.FIFOTYPE, "", "a device"),
    ],
)
def test_links_and_devices_are_refused(kind: bytes, link: str, what: str, tmp_path: Path) -> None:
    refused(tar(tmp_path / "a.tar", [(member("fine"), b"x"), (member("bad", kind, link), b"")]), f"holds 'bad', {what}")


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    refused(tar(tmp_path / "a.tar", [(member("a"), b"x"), (member("a"), b"y")]), "holds 'a' twice")
    refused(tar(tmp_path / "b.tar", [(member("a"), b"x"), (member("a/b"), b"y")]), "holds 'a/b' twice")


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    big = {"zeros": bytes(50 * LIMIT)}
    refused(plain_tar(tmp_path / "a.tar.gz", "w:gz", big), f"holds more than the {LIMIT} bytes")
    many = {f"{number}": bytes(LIMIT // 4) for number in range(5)}
    refused(plain_tar(tmp_path / "b.tar.gz", "w:gz", many), f"holds more than the {LIMIT} bytes")


def with_header(name: str, size: int) -> tarfile.TarInfo:
    info = member(name)
    info.pax_headers = {"comment": "x" * size}
    return info


def test_a_header_that_is_a_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar.gz", [(member("fine"), b"x"), (with_header("bad", 2**25), b"x")], "w:gz")
    tracemalloc.start()
    refused(archive, "is cut off, damaged or no archive: a header has more than 1048576 bytes")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_many_headers_are_within_the_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_PADDING", 2**18)
    members = [(with_header(f"{number}", 2**16), b"x") for number in range(8)]
    total = LIMIT + LIMIT // 4 + 2**18
    refused(tar(tmp_path / "a.tar.gz", members, "w:gz"), f"is cut off, damaged or no archive: more than {total} bytes")


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    refused(plain_tar(tmp_path / "a.tar", files={f"{number}": b"" for number in range(4)}), "has more than 3 members")


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_every_truncation_is_noticed(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / f"a.{kind}"
    files = {f"set/{number}": os.urandom(600) for number in range(3)}
    whole = plain_tar(archive, f"w:{kind[4:]}", files).read_bytes()
    # The end of a plain tar is padding: the blocks with members are what may be missing.
    end = 3 * (512 + 1024) if kind == "tar" else len(whole) - 9
    for size in {0, 1, 511, 512, 1000, 1536, 2 * 1536, len(whole) // 2, end} - {len(whole)}:
        archive.write_bytes(whole[: min(size, end)])
        refused(archive, "")


def test_bits_that_flipped_are_noticed(tmp_path: Path) -> None:
    archive = plain_tar(tmp_path / "a.tar.gz", "w:gz", {"a": os.urandom(1000)})
    body = bytearray(archive.read_bytes())
    body[700] ^= 1
    archive.write_bytes(body)
    refused(archive, "is cut off, damaged or no archive")


SIX = {f"{number}": b"x" * 600 for number in range(6)}  # of 512 + 1024 bytes each
FOURTH = 3 * 1536


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("damage", ["flipped name", "flipped size", "flipped sum", "zeroed", "two", "no end"])
def test_an_archive_that_ends_too_early_is_noticed(damage: str, zipped: bool, tmp_path: Path) -> None:
    body = bytearray(plain_tar(tmp_path / "plain.tar", files=SIX).read_bytes())
    if damage == "zeroed":
        body[FOURTH : FOURTH + 1536] = bytes(1536)
    elif damage == "two":
        body *= 2
    elif damage == "no end":
        del body[6 * 1536 :]
    else:
        body[FOURTH + {"flipped name": 3, "flipped size": 130, "flipped sum": 150}[damage]] ^= 1
    archive = tmp_path / "a.tar"
    archive.write_bytes(gzip.compress(body) if zipped else body)
    refused(archive, "is cut off, damaged or no archive: ")


def test_the_archive_of_a_folders_content_comes_out(tmp_path: Path) -> None:
    members = [(member(".", tarfile.DIRTYPE), b""), (member("./a", tarfile.DIRTYPE), b""), (member("./a/b"), b"x")]
    unpack(tar(tmp_path / "a.tar", members), tmp_path / "new", LIMIT)
    assert unpacked(tmp_path / "new") == {"a/b": b"x"}
    refused(tar(tmp_path / "b.tar", [(member("."), b"x")]), r"holds '\.', which leads out")


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


def test_what_goes_on_behind_the_end_of_a_tar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_PADDING", 2**20)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain_tar(tmp_path / "a.tar").read_bytes() + bytes(2**22)))
    refused(tmp_path / "a.tar.gz", "is cut off, damaged or no archive: it goes on behind its end")


def test_other_files_are_no_archives(tmp_path: Path) -> None:
    for name, body in (("a.tar", b"<html>" * 1000), ("b.tar", gzip.compress(b"text")), ("c.tar", bytes(1024))):
        (tmp_path / name).write_bytes(body)
        refused(tmp_path / name, "is ")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    archive = plain_tar(tmp_path / "a.tar")
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match=r"set is in the way of what .*a.tar holds"):
        unpack(archive, tmp_path / "set", LIMIT)
    (tmp_path / ".new.unpacking").mkdir()  # left by a process that was killed
    (tmp_path / ".new.unpacking/old").write_text("old")
    unpack(archive, tmp_path / "new", LIMIT)
    assert sorted(unpacked(tmp_path / "new")) == ["set/a.txt", "set/deep/b.txt"]

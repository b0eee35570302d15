"""Archives are unpacked whole or not at all, and never reach beyond their folder."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
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


def plain_zip(path: Path, files: dict[str, bytes] = PLAIN) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


def unpacked(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(archive: Path, message: str, limit: int = LIMIT) -> None:
    """Expect an error that names the archive, and nothing beside it."""
    before = sorted(archive.parent.rglob("*"))
    with pytest.raises(ValueError, match=rf"{archive.name} {message}"):
        unpack(archive, archive.parent / "set", limit)
    assert sorted(archive.parent.rglob("*")) == before


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "named wrongly", "zip"])
def test_what_is_plain_comes_out(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / ("a.tar" if kind == "named wrongly" else f"a.{kind}")
    if kind == "zip":
        plain_zip(archive)
    else:
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
    refused(plain_zip(folder / "a.zip", {"fine": b"x", name: b"x"}), r"holds .* leads out of its folder")
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


def test_links_in_zip_files_are_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("bad")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    refused(tmp_path / "a.zip", "holds 'bad', a link")


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    refused(tar(tmp_path / "a.tar", [(member("a"), b"x"), (member("a"), b"y")]), "holds 'a' twice")
    refused(tar(tmp_path / "b.tar", [(member("a"), b"x"), (member("a/b"), b"y")]), "holds 'a/b' twice")


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    big = {"zeros": bytes(50 * LIMIT)}
    refused(plain_tar(tmp_path / "a.tar.gz", "w:gz", big), f"holds more than the {LIMIT} bytes")
    refused(plain_zip(tmp_path / "a.zip", big), f"holds more than the {LIMIT} bytes")
    many = {f"{number}": bytes(LIMIT // 4) for number in range(5)}
    refused(plain_zip(tmp_path / "b.zip", many), f"holds more than the {LIMIT} bytes")


@pytest.mark.parametrize(("true", "claimed"), [(50 * LIMIT, 100), (LIMIT // 3, LIMIT // 2)])
def test_a_zip_file_that_lies_about_its_size_is_refused(true: int, claimed: int, tmp_path: Path) -> None:
    archive = plain_zip(tmp_path / "a.zip", {"zeros": bytes(true)})
    assert archive.read_bytes().count(true.to_bytes(4, "little")) == 2
    archive.write_bytes(archive.read_bytes().replace(true.to_bytes(4, "little"), claimed.to_bytes(4, "little")))
    refused(archive, "is cut off")


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    refused(plain_tar(tmp_path / "a.tar", files={f"{number}": b"" for number in range(4)}), "has more than 3 members")


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_every_truncation_is_noticed(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / f"a.{kind}"
    files = {f"set/{number}": os.urandom(600) for number in range(3)}
    whole = (plain_zip(archive, files) if kind == "zip" else plain_tar(archive, f"w:{kind[4:]}", files)).read_bytes()
    # The end of a plain tar is padding: the blocks with members are what may be missing.
    end = 3 * (512 + 1024) if kind == "tar" else len(whole) - 9
    for size in {0, 1, 511, 512, 1000, 1536, 2 * 1536, len(whole) // 2, end} - {len(whole)}:
        archive.write_bytes(whole[: min(size, end)])
        refused(archive, "")


def test_bits_that_flipped_are_noticed(tmp_path: Path) -> None:
    files = {"a": os.urandom(1000)}
    for archive in (plain_zip(tmp_path / "a.zip", files), plain_tar(tmp_path / "a.tar.gz", "w:gz", files)):
        body = bytearray(archive.read_bytes())
        body[700] ^= 1
        archive.write_bytes(body)
        refused(archive, "is cut off, damaged or no archive")


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

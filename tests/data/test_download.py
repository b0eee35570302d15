"""Downloads go on after an interruption, are checked, and never look whole before they are."""

from __future__ import annotations

import hashlib
import io
import subprocess
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path
from urllib.request import Request

import pytest

from ttac.data.sets import download as module
from ttac.data.sets.download import DownloadError, SafeRedirects, check_file, download
from ttac.data.sets.spec import RemoteFile
from web_server import Web, serving

BODY = bytes(range(256)) * 1200  # 300 KiB
NAME = "data.bin"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(module, "PAUSE", 0.001)
    monkeypatch.setattr(module, "CHUNK", 2**14)
    with serving(data__bin=BODY) as web:
        yield web


def remote(web: Web, size: int | None = len(BODY), body: bytes = BODY) -> RemoteFile:
    return RemoteFile(f"{web.address}/{NAME}", size, f"sha256:{hashlib.sha256(body).hexdigest()}")


def bring(web: Web, folder: Path, *urls: str, file: RemoteFile | None = None) -> Path:
    file = file or remote(web)
    download(file, folder / NAME, urls or (file.url,), lambda done, total: None)
    assert not (folder / f".{NAME}.part").exists()
    return folder / NAME


@pytest.mark.parametrize("size", [len(BODY), None])
def test_a_whole_file_arrives(web: Web, tmp_path: Path, size: int | None) -> None:
    assert bring(web, tmp_path, file=remote(web, size)).read_bytes() == BODY
    assert web.asked == [(f"/{NAME}", None)]


def test_what_breaks_off_is_gone_on_with(web: Web, tmp_path: Path) -> None:
    web.breaks = [100_000, 50_000]
    assert bring(web, tmp_path).read_bytes() == BODY
    assert [asked for _, asked in web.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_connections_that_are_reset_get_on(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2**20)
    body = BODY * 6
    web.files[NAME], web.resets = body, 300_000
    assert bring(web, tmp_path, file=remote(web, len(body), body)).read_bytes() == body
    assert len(web.asked) >= 7


def test_the_part_of_an_earlier_process_is_gone_on_with(web: Web, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.part").write_bytes(BODY[:1000])
    assert bring(web, tmp_path).read_bytes() == BODY
    assert web.asked == [(f"/{NAME}", "bytes=1000-")]


def test_a_part_that_is_whole_needs_no_server(web: Web, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.part").write_bytes(BODY)
    assert bring(web, tmp_path).read_bytes() == BODY
    assert not web.asked


def test_without_ranges_it_starts_again(web: Web, tmp_path: Path) -> None:
    web.ranges = False
    (tmp_path / f".{NAME}.part").write_bytes(b"x" * 1000)
    assert bring(web, tmp_path).read_bytes() == BODY


def test_another_range_than_was_asked_for_is_not_taken(web: Web, tmp_path: Path) -> None:
    web.wrong_ranges = True
    (tmp_path / f".{NAME}.part").write_bytes(BODY[:1000])
    assert bring(web, tmp_path).read_bytes() == BODY


def test_a_part_of_nobody_knows_where_is_not_taken(web: Web, tmp_path: Path) -> None:
    web.raw = b"HTTP/1.0 206 Partial Content\r\nContent-Range: bytes 500-503/504\r\n\r\nabcd"
    (tmp_path / f".{NAME}.part").write_bytes(BODY[:1000])
    with pytest.raises(DownloadError):
        bring(web, tmp_path, file=RemoteFile(f"{web.address}/{NAME}"))
    assert (tmp_path / f".{NAME}.part").read_bytes() == BODY[:1000]


@pytest.mark.parametrize("size", [len(BODY), None])
def test_a_part_that_is_too_long_is_thrown_away(web: Web, tmp_path: Path, size: int | None) -> None:
    (tmp_path / f".{NAME}.part").write_bytes(BODY + b"more")
    assert bring(web, tmp_path, file=remote(web, size)).read_bytes() == BODY


def test_passing_errors_are_waited_out(web: Web, tmp_path: Path) -> None:
    web.errors = [503, 429, 500]
    assert bring(web, tmp_path).read_bytes() == BODY


def test_attempts_that_bring_nothing_come_to_an_end(web: Web, tmp_path: Path) -> None:
    web.breaks = [100_000] + [0] * 100
    with pytest.raises(DownloadError, match="broke off after 100000 of 307200 bytes"):
        bring(web, tmp_path)
    assert len(web.asked) == 1 + module.ATTEMPTS
    assert (tmp_path / f".{NAME}.part").stat().st_size == 100_000  # for the next time
    assert not (tmp_path / NAME).exists()


def test_a_wrong_sum_is_told_and_nothing_is_left(web: Web, tmp_path: Path) -> None:
    other = b"?" + BODY[1:]
    with pytest.raises(DownloadError, match=f"has sha256:{hashlib.sha256(BODY).hexdigest()}, expected sha256:"):
        bring(web, tmp_path, file=remote(web, body=other))
    assert not (tmp_path / NAME).exists()
    assert not (tmp_path / f".{NAME}.part").exists()


def test_a_stale_part_is_not_blamed_on_the_server(web: Web, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.part").write_bytes(b"?" * 1000)
    assert bring(web, tmp_path).read_bytes() == BODY
    assert [asked for _, asked in web.asked] == ["bytes=1000-", None]
    (tmp_path / f".{NAME}.part").write_bytes(b"?" * 1000)
    with pytest.raises(DownloadError):
        bring(web, tmp_path, file=remote(web, body=b"?" + BODY[1:]))
    assert len(web.asked) == 4  # once again, and no more


def test_two_versions_are_not_mixed_where_no_sum_is_published(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    file = RemoteFile(f"{web.address}/{NAME}", len(BODY))
    web.tag, web.breaks = '"one"', [100_000, 0, 0]
    with pytest.raises(DownloadError):
        bring(web, tmp_path, file=file)
    web.breaks = [50_000]  # the same version is gone on with
    assert bring(web, tmp_path, file=file).read_bytes() == BODY
    assert [asked for _, asked in web.asked][-2:] == ["bytes=100000-", "bytes=150000-"]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    web.breaks = [100_000, 0, 0]
    with pytest.raises(DownloadError):
        bring(web, tmp_path, file=file)
    web.files[NAME], web.tag = BODY[::-1], '"two"'
    assert bring(web, tmp_path, file=file).read_bytes() == BODY[::-1]


def test_more_than_the_file_is_thrown_away(web: Web, tmp_path: Path) -> None:
    web.length, web.files[NAME] = "", BODY + b"more"
    with pytest.raises(DownloadError):
        bring(web, tmp_path)
    assert not (tmp_path / NAME).exists()
    assert not (tmp_path / f".{NAME}.part").exists()


@pytest.mark.parametrize("answer", ["204 No Content", "200 OK\r\nContent-Length: 0", "200 OK"])
def test_an_empty_answer_is_no_file(web: Web, tmp_path: Path, answer: str) -> None:
    web.raw = f"HTTP/1.0 {answer}\r\n\r\n".encode()
    with pytest.raises(DownloadError):
        bring(web, tmp_path, file=RemoteFile(f"{web.address}/{NAME}"))
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("length", ["\u00b2\u00b3", "9" * 5000, "-1", "many"])
def test_a_length_that_is_no_number_is_not_counted_on(web: Web, tmp_path: Path, length: str) -> None:
    web.length = length
    assert bring(web, tmp_path).read_bytes() == BODY


def test_failures_are_one_line(web: Web, tmp_path: Path) -> None:
    web.redirects = {"/loop": f"{web.address}/loop"}
    with pytest.raises(DownloadError, match="infinite loop") as loop:
        bring(web, tmp_path, f"{web.address}/loop")
    web.raw = b"\x1b[31mgarbage" * 500 + b"\r\n\r\n"
    with pytest.raises(DownloadError, match="garbage") as garbage:
        bring(web, tmp_path)
    for failure in (loop, garbage):
        assert str(failure.value).isprintable()
        assert len(str(failure.value)) < 400


def test_a_page_in_its_place_is_refused_by_its_size(web: Web, tmp_path: Path) -> None:
    web.files[NAME], web.ranges = b"<html>please log in</html>", False
    (tmp_path / f".{NAME}.part").write_bytes(BODY[:1000])
    with pytest.raises(DownloadError, match="it has 26 bytes there, expected 307200"):
        bring(web, tmp_path)
    assert not (tmp_path / NAME).exists()
    assert (tmp_path / f".{NAME}.part").read_bytes() == BODY[:1000]  # another address may go on with it


def test_addresses_are_tried_in_order(web: Web, tmp_path: Path) -> None:
    damaged = bytes(len(BODY))
    web.files["damaged"] = damaged
    urls = [f"{web.address}/missing", f"{web.address}/damaged", f"{web.address}/mirror/{NAME}", f"{web.address}/never"]
    assert bring(web, tmp_path, *urls).read_bytes() == BODY
    assert [path for path, _ in web.asked] == ["/missing", "/damaged", f"/mirror/{NAME}"]


def test_all_failures_are_told(web: Web, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"/one: .*404.*; .*/two: .*404"):
        bring(web, tmp_path, f"{web.address}/one", f"{web.address}/two")
    with pytest.raises(DownloadError):
        bring(web, tmp_path, "https://nowhere.invalid/file")


def test_redirects_stay_in_the_web(web: Web, tmp_path: Path) -> None:
    web.redirects = {"/moved": f"{web.address}/{NAME}", "/file": f"file://{tmp_path}/secret"}
    (tmp_path / "secret").write_bytes(BODY)
    with pytest.raises(DownloadError):
        bring(web, tmp_path, f"{web.address}/file")
    assert bring(web, tmp_path, f"{web.address}/moved").read_bytes() == BODY


@pytest.mark.parametrize("address", ["http://other.invalid/file", "ftp://other.invalid/file", "file:///etc/passwd"])
def test_https_stays_https(address: str) -> None:
    asked = Request("https://example.invalid/file")
    with pytest.raises(DownloadError):
        SafeRedirects().redirect_request(asked, io.BytesIO(), 302, "", HTTPMessage(), address)
    safer = SafeRedirects().redirect_request(asked, io.BytesIO(), 302, "", HTTPMessage(), "https://other.invalid/")
    assert safer is not None


def test_an_interruption_keeps_the_part(web: Web, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        assert total == len(BODY)
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(remote(web), tmp_path / NAME, [f"{web.address}/{NAME}"], interrupt)
    there = (tmp_path / f".{NAME}.part").stat().st_size
    assert 100_000 < there < len(BODY)
    assert bring(web, tmp_path).read_bytes() == BODY
    assert web.asked[-1] == (f"/{NAME}", f"bytes={there}-")


def test_a_full_disk_keeps_the_part(web: Web, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        with pytest.raises(OSError, match="the disk is full"):
            bring(web, tmp_path)
        part = tmp_path / f".{NAME}.part"
        there = part.stat().st_size
        assert part.read_bytes() == BODY[:there]
        assert there > 100_000
        subprocess.run(["mount", "-o", "remount,size=1m", str(tmp_path)], check=True)
        assert bring(web, tmp_path).read_bytes() == BODY
        assert web.asked[-1] == (f"/{NAME}", f"bytes={there}-")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_is_compared_with_all_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(BODY)
    sums = [f"{kind}:{hashlib.new(kind, BODY).hexdigest()}" for kind in ("md5", "sha256")]
    assert [check_file(path, RemoteFile("", len(BODY), known)) for known in sums] == ["md5", "sha256"]
    assert check_file(path, RemoteFile("")) == "nothing to compare it with is published"
    for wrong in (RemoteFile("", 5), RemoteFile("", None, f"md5:{'0' * 32}"), RemoteFile("", 5, sums[0])):
        with pytest.raises(ValueError, match=r"data.bin has"):
            check_file(path, wrong)

"""Downloads go on after an interruption, are checked, and never look whole before they are."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request

import pytest

from ttac.data.sets import download as module
from ttac.data.sets.download import DownloadError, check_file, download
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
    return RemoteFile(f"{web.address}/{NAME}", size, hashlib.md5(body).hexdigest(), hashlib.sha256(body).hexdigest())


def bring(web: Web, folder: Path, *urls: str, file: RemoteFile | None = None) -> Path:
    file = file or remote(web)
    download(file, folder / NAME, urls or (file.url,), lambda done, total: None)
    assert not (folder / f"{NAME}.part").exists()
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
    (tmp_path / f"{NAME}.part").write_bytes(BODY[:1000])
    assert bring(web, tmp_path).read_bytes() == BODY
    assert web.asked == [(f"/{NAME}", "bytes=1000-")]


def test_a_part_that_is_whole_needs_no_server(web: Web, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(BODY)
    assert bring(web, tmp_path).read_bytes() == BODY
    assert not web.asked


def test_without_ranges_it_starts_again(web: Web, tmp_path: Path) -> None:
    web.ranges = False
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    assert bring(web, tmp_path).read_bytes() == BODY


def test_another_range_than_was_asked_for_is_not_taken(web: Web, tmp_path: Path) -> None:
    web.wrong_ranges = True
    (tmp_path / f"{NAME}.part").write_bytes(BODY[:1000])
    assert bring(web, tmp_path).read_bytes() == BODY
    assert [asked for _, asked in web.asked] == ["bytes=1000-", None]


@pytest.mark.parametrize("size", [len(BODY), None])
def test_a_part_that_is_too_long_is_thrown_away(web: Web, tmp_path: Path, size: int | None) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(BODY + b"more")
    assert bring(web, tmp_path, file=remote(web, size)).read_bytes() == BODY


def test_passing_errors_are_waited_out(web: Web, tmp_path: Path) -> None:
    web.errors = [503, 429, 500]
    assert bring(web, tmp_path).read_bytes() == BODY


def test_attempts_that_bring_nothing_come_to_an_end(web: Web, tmp_path: Path) -> None:
    web.breaks = [100_000] + [0] * 100
    with pytest.raises(DownloadError, match="broke off after 100000 of 307200 bytes"):
        bring(web, tmp_path)
    assert len(web.asked) == 1 + module.ATTEMPTS
    assert (tmp_path / f"{NAME}.part").stat().st_size == 100_000  # for the next time
    assert not (tmp_path / NAME).exists()


def test_a_wrong_sum_is_told_and_nothing_is_left(web: Web, tmp_path: Path) -> None:
    other = b"?" + BODY[1:]
    right = hashlib.md5(other).hexdigest()
    with pytest.raises(DownloadError, match=f"has the md5 {hashlib.md5(BODY).hexdigest()}, expected {right}"):
        bring(web, tmp_path, file=remote(web, body=other))
    assert not list(tmp_path.iterdir())


def test_a_stale_part_is_not_blamed_on_the_server(web: Web, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"?" * 1000)
    assert bring(web, tmp_path).read_bytes() == BODY
    assert [asked for _, asked in web.asked] == ["bytes=1000-", None]
    (tmp_path / f"{NAME}.part").write_bytes(b"?" * 1000)
    with pytest.raises(DownloadError, match="has the md5"):
        bring(web, tmp_path, file=remote(web, body=b"?" + BODY[1:]))
    assert len(web.asked) == 4  # once again, and no more


@pytest.mark.parametrize("knows_if_range", [True, False])
def test_two_versions_are_not_mixed_where_no_sum_is_published(
    web: Web, tmp_path: Path, knows_if_range: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    file = RemoteFile(f"{web.address}/{NAME}", len(BODY))
    web.tag, web.knows_if_range, web.breaks = '"one"', knows_if_range, [100_000, 0, 0]
    with pytest.raises(DownloadError, match="broke off"):
        bring(web, tmp_path, file=file)
    web.breaks = [50_000]  # the same version is gone on with
    assert bring(web, tmp_path, file=file).read_bytes() == BODY
    assert [asked for _, asked in web.asked][-2:] == ["bytes=100000-", "bytes=150000-"]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    web.breaks = [100_000, 0, 0]
    with pytest.raises(DownloadError, match="broke off"):
        bring(web, tmp_path, file=file)
    web.files[NAME], web.tag = BODY[::-1], '"two"'
    assert bring(web, tmp_path, file=file).read_bytes() == BODY[::-1]


def test_weak_tags_are_no_versions(web: Web, tmp_path: Path) -> None:
    web.tag, web.breaks = 'W/"one"', [100_000]
    assert bring(web, tmp_path, file=RemoteFile(f"{web.address}/{NAME}", len(BODY))).read_bytes() == BODY
    assert web.asked[-1] == (f"/{NAME}", "bytes=100000-")


def test_more_than_the_file_is_thrown_away(web: Web, tmp_path: Path) -> None:
    web.length, web.files[NAME] = "", BODY + b"more"
    with pytest.raises(DownloadError, match="it sent more than 307200 bytes"):
        bring(web, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", ["204 No Content", "200 OK\r\nContent-Length: 0", "200 OK"])
def test_an_empty_answer_is_no_file(web: Web, tmp_path: Path, answer: str) -> None:
    web.raw = f"HTTP/1.0 {answer}\r\n\r\n".encode()
    with pytest.raises(DownloadError, match=r"204 No Content, which is not the file|it sent an empty file"):
        bring(web, tmp_path, file=RemoteFile(f"{web.address}/{NAME}"))
    assert not list(tmp_path.iterdir())


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
    web.files[NAME] = b"<html>please log in</html>"
    with pytest.raises(DownloadError, match="it has 26 bytes there, expected 307200"):
        bring(web, tmp_path)
    assert not (tmp_path / NAME).exists()


def test_addresses_are_tried_in_order(web: Web, tmp_path: Path) -> None:
    damaged = bytes(len(BODY))
    web.files["damaged"] = damaged
    urls = [f"{web.address}/missing", f"{web.address}/damaged", f"{web.address}/mirror/{NAME}", f"{web.address}/never"]
    assert bring(web, tmp_path, *urls).read_bytes() == BODY
    assert [path for path, _ in web.asked] == ["/missing", "/damaged", f"/mirror/{NAME}"]


def test_all_failures_are_told(web: Web, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"/one: 404 .*; .*/two: 404 "):
        bring(web, tmp_path, f"{web.address}/one", f"{web.address}/two")
    with pytest.raises(DownloadError, match=r"nowhere.invalid is not found|Temporary failure|Tunnel"):
        bring(web, tmp_path, "https://nowhere.invalid/file")


def test_redirects_stay_in_the_web(web: Web, tmp_path: Path) -> None:
    web.redirects = {
        "/moved": f"{web.address}/{NAME}",
        "/file": f"file://{tmp_path}/secret",
        "/ftp": "ftp://127.0.0.1/a",
    }
    (tmp_path / "secret").write_bytes(BODY)
    assert bring(web, tmp_path, f"{web.address}/moved").read_bytes() == BODY
    for path in ("file", "ftp"):
        with pytest.raises(DownloadError, match=r"redirect|Redirect"):
            bring(web, tmp_path, f"{web.address}/{path}")
    for url in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/a", "data:,abc"):
        with pytest.raises(DownloadError, match="only http and https"):
            bring(web, tmp_path, url)
    follow = module._WebOnly().redirect_request
    with pytest.raises(module._RefusedError, match=r"redirects to http://a.example"):
        follow(Request("https://a.example"), None, 302, "", {}, "http://a.example")  # type: ignore[arg-type]


def test_an_interruption_keeps_the_part(web: Web, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        assert total == len(BODY)
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(remote(web), tmp_path / NAME, [f"{web.address}/{NAME}"], interrupt)
    there = (tmp_path / f"{NAME}.part").stat().st_size
    assert 100_000 < there < len(BODY)
    assert bring(web, tmp_path).read_bytes() == BODY
    assert web.asked[-1] == (f"/{NAME}", f"bytes={there}-")


def test_a_full_disk_keeps_the_part(web: Web, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        with pytest.raises(OSError, match=r"the disk is full: .*part has 0.1 MiB of 0.3 MiB, which are kept: make sp"):
            bring(web, tmp_path)
        part = tmp_path / f"{NAME}.part"
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
    md5, sha256 = hashlib.md5(BODY).hexdigest(), hashlib.sha256(BODY).hexdigest()
    assert check_file(path, RemoteFile("https://a/b", len(BODY), md5, sha256)) == "md5, sha256"
    assert check_file(path, RemoteFile("https://a/b")) == "nothing to compare it with is published"
    for wrong in (RemoteFile("", 5), RemoteFile("", None, "0" * 32), RemoteFile("", None, md5, "0" * 64)):
        with pytest.raises(ValueError, match=r"data.bin has"):
            check_file(path, wrong)

"""Files from the web: gone on with after an interruption, checked, and never taken for whole too early."""

from __future__ import annotations

import errno
import hashlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from ttac import __version__
from ttac.common.files import to_disk
from ttac.data.array_file import mebibytes
from ttac.data.sets.spec import RemoteFile

TIMEOUT = 30.0
ATTEMPTS = 4  # that bring nothing new
PAUSE = 1.0  # seconds after the first of them, then doubled
CHUNK = 2**20
MAX_LINE = 300  # characters of one failure

Progress = Callable[[int, "int | None"], None]  # bytes so far, of how many


class DownloadError(OSError):
    """No address gave the file; the message says why for each."""


class _BrokenOffError(Exception):
    """Worth another attempt."""


class _RefusedError(Exception):
    """Not worth another attempt at this address."""


def download(file: RemoteFile, target: Path, urls: Sequence[str], progress: Progress) -> None:
    """Bring a file to `target` from the first of `urls` that has it whole; `<target>.part` is gone on with."""
    part = part_of(target)
    failures = []
    for url in urls:
        try:
            with _full_disk_explained(part, file):
                _bring_whole(url, part, file, progress)
        except (_BrokenOffError, _RefusedError) as error:
            failures.append(f"{url}: {_one_line(str(error))}")
            continue
        to_disk(part)
        part.replace(target)
        _tag_of(part).unlink(missing_ok=True)
        to_disk(target.parent)
        return
    raise DownloadError("; ".join(failures))


def _bring_whole(url: str, part: Path, file: RemoteFile, progress: Progress) -> None:
    begun = part.exists()  # by an earlier process, or at another address: not what this one sends
    _bring(url, part, file, progress)
    try:
        check_file(part, file)
    except ValueError as error:
        _throw_away(part)
        if not begun:
            raise _RefusedError(str(error)) from error
        _bring_whole(url, part, file, progress)


def _one_line(message: str) -> str:
    """Keep what a server said from filling, or steering, the terminal."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in message).split())
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


@contextmanager
def _full_disk_explained(part: Path, file: RemoteFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        there = mebibytes(part.stat().st_size) + (f" of {mebibytes(file.size)}" if file.size else "")
        raise OSError(
            f"the disk is full: {part} has {there}, which are kept: make space, and the same command goes on"
        ) from error


def part_of(target: Path) -> Path:
    """Name the file that a download is in while it is not whole."""
    return target.with_name(f"{target.name}.part")


def _tag_of(part: Path) -> Path:
    """Name the file with what the server calls the version that `part` is of."""
    return part.with_name(f"{part.name}.tag")


def _throw_away(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag_of(part).unlink(missing_ok=True)


def check_file(path: Path, file: RemoteFile) -> str:
    """Compare a file's size and sums with those published, and say which there were; raise an error if they differ.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(b"abc")
    ...     check_file(Path(folder, "a"), RemoteFile("https://example.org/a", 3))
    'size'
    """
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise ValueError(f"{path} has {size} bytes, expected {file.size}")
    expected = {kind: value for kind, value in (("md5", file.md5), ("sha256", file.sha256)) if value is not None}
    for kind, found in file_sums(path, tuple(expected)).items():
        if found != expected[kind]:
            raise ValueError(f"{path} has the {kind} {found}, expected {expected[kind]}: it is damaged or another file")
    return ", ".join(expected) or ("size" if file.size is not None else "nothing to compare it with is published")


def file_sums(path: Path, kinds: Sequence[str]) -> dict[str, str]:
    """Compute several checksums of a file in one pass."""
    digests = {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}
    with path.open("rb") as content:
        while digests and (chunk := content.read(CHUNK)):
            for digest in digests.values():
                digest.update(chunk)
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def _bring(url: str, part: Path, file: RemoteFile, progress: Progress) -> None:
    """Try until all is there; only attempts that bring nothing new are counted."""
    furthest, fruitless = 0, 0
    while True:
        try:
            _transfer(url, part, file, progress)
            return
        except _BrokenOffError:
            there = part.stat().st_size if part.exists() else 0
            fruitless = 0 if there > furthest else fruitless + 1
            furthest = max(there, furthest)
            if fruitless == ATTEMPTS:
                raise
            time.sleep(PAUSE * 2 ** max(fruitless - 1, 0))


def _transfer(url: str, part: Path, file: RemoteFile, progress: Progress) -> None:
    size, there = file.size, part.stat().st_size if part.exists() else 0
    if size is not None and there == size:
        return
    if size is not None and there > size:
        _throw_away(part)
        there = 0
    # Where a checksum tells two versions apart, a part may come from several addresses.
    tag = _read_tag(part) if there and file.md5 is None and file.sha256 is None else ""
    with _open(url, there, tag, part) as response:
        if response.status not in (200, 206):
            raise _RefusedError(f"{response.status} {response.reason}, which is not the file")
        if response.status == 206:
            _check_range(response, there, tag, part)
        else:
            there = 0
        total = _total(response, there, size)
        if size is not None and total != size:
            raise _RefusedError(f"it has {total} bytes there, expected {size}")
        if total == 0:
            raise _RefusedError("it sent an empty file")
        with part.open("ab" if there else "wb") as out:
            if not there:
                _tag_of(part).write_text(_version(response))
            while chunk := _read(response):
                there += len(chunk)
                if total is not None and there > total:
                    _throw_away(part)
                    raise _RefusedError(f"it sent more than {total} bytes")
                out.write(chunk)
                progress(there, total)
    if total is not None and there < total:
        raise _BrokenOffError(f"it broke off after {there} of {total} bytes")
    if not there:
        _throw_away(part)
        raise _RefusedError("it sent an empty file")


def _check_range(response: HTTPResponse, there: int, tag: str, part: Path) -> None:
    if not response.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
        _throw_away(part)
        raise _BrokenOffError("the server sent another part than was asked for")
    if tag and _version(response) != tag:  # some servers do not know If-Range
        _throw_away(part)
        raise _BrokenOffError("the file has changed there")


def _total(response: HTTPResponse, there: int, size: int | None) -> int | None:
    """Say how long the whole file is: as its server says, else as is known."""
    of_range = re.search(r"/([0-9]{1,18})$", response.headers.get("Content-Range", ""))
    if response.status == 206 and of_range is not None:
        return int(of_range[1])
    length = response.headers.get("Content-Length", "")
    return there + int(length) if re.fullmatch(r"[0-9]{1,18}", length) else size


def _version(response: HTTPResponse) -> str:
    """Name the version that an answer is of, as If-Range wants it: a weak tag is none."""
    tag: str = response.headers.get("ETag", "")
    name: str = response.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag
    return name if name.isascii() and name.isprintable() else ""


def _read_tag(part: Path) -> str:
    try:
        return _tag_of(part).read_text()
    except FileNotFoundError:
        return ""


def _open(url: str, there: int, tag: str, part: Path) -> HTTPResponse:
    headers = {"User-Agent": f"ttac/{__version__}", "Accept-Encoding": "identity"}
    if there:
        headers["Range"] = f"bytes={there}-"
    if tag:
        headers["If-Range"] = tag
    if urlsplit(url).scheme not in ("http", "https"):
        raise _RefusedError("only http and https are fetched")
    try:
        response: HTTPResponse = _opener().open(Request(url, headers=headers), timeout=TIMEOUT)
        return response
    except HTTPError as error:
        if error.code == 416:  # there is nothing behind what is there, so what is there is something else
            _throw_away(part)
        if error.code in (408, 416, 429) or error.code >= 500:
            raise _BrokenOffError(f"{error.code} {error.reason}") from error
        raise _RefusedError(f"{error.code} {error.reason}") from error
    except URLError as error:
        if isinstance(error.reason, socket.gaierror) and error.reason.errno != socket.EAI_AGAIN:
            raise _RefusedError(f"{urlsplit(url).hostname} is not found: {error.reason.strerror}") from error
        raise _BrokenOffError(str(error.reason)) from error
    except (OSError, HTTPException) as error:
        raise _BrokenOffError(str(error)) from error
    except ValueError as error:
        raise _RefusedError(f"not an address: {error}") from error


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)  # at once what is there, of which nothing is lost if more does not come
    except (OSError, HTTPException) as error:
        raise _BrokenOffError(str(error)) from error


class _WebOnly(HTTPRedirectHandler):
    """Follows redirects within the web, and never from https to http."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme == "http"):
            raise _RefusedError(f"it redirects to {newurl}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> OpenerDirector:
    opener = OpenerDirector()  # the usual one opens files and ftp too
    for handler in (
        ProxyHandler(), UnknownHandler(), HTTPHandler(), HTTPSHandler(), HTTPDefaultErrorHandler(), _WebOnly(),
        HTTPErrorProcessor(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener

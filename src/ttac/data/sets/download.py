"""Files from the web: gone on with after an interruption, checked, and never taken for whole too early."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ttac import __version__
from ttac.common.files import DiskError, to_disk, writing
from ttac.data.array_file import part_of
from ttac.data.sets.spec import RemoteFile

TIMEOUT = 30.0
ATTEMPTS = 4  # that bring nothing new
PAUSE = 1.0  # seconds after the first of them, then doubled
CHUNK = 2**20
MAX_LINE = 300  # characters of one failure

Progress = Callable[[int, "int | None"], None]  # bytes so far, of how many


class DownloadError(OSError):
    """The file is not to be had; the message says why."""


class SafeRedirects(HTTPRedirectHandler):
    """Follows an address to one of the same scheme, or to https."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Ask for the new address, or refuse it."""
        if urlsplit(newurl).scheme not in ("https", req.type):
            raise DownloadError(f"it redirects to {newurl}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(file: RemoteFile, target: Path, urls: Sequence[str], progress: Progress) -> None:
    """Bring a file to `target` from the first of `urls` that has it whole; what was begun is gone on with."""
    part, failures = part_of(target), []
    for url in urls:
        try:
            _bring(url, part, file, progress)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, DiskError):
                raise
            # What a server says must not fill, or steer, the terminal.
            failures.append("".join(filter(str.isprintable, f"{url}: {error}"))[:MAX_LINE])
            continue
        to_disk(part)
        part.replace(target)
        _tag_of(part).unlink(missing_ok=True)
        to_disk(target.parent)
        return
    raise DownloadError("; ".join(failures))


def _bring(url: str, part: Path, file: RemoteFile, progress: Progress) -> None:
    """Try until all is there and right; only attempts that bring nothing new are counted."""
    begun, fruitless = part.exists(), 0
    while True:
        before = _size(part)
        try:
            _transfer(url, part, file, progress)
        except (OSError, HTTPException) as error:
            if isinstance(error, HTTPError) and error.code == 416:  # the file ends before what is there does
                part.unlink()
            fruitless = 0 if _size(part) > before else fruitless + 1
            if fruitless == ATTEMPTS or not _passes(error):
                raise
            time.sleep(PAUSE * 2**fruitless)
            continue
        try:
            check_file(part, file)
            return
        except ValueError:
            part.unlink()
            if not begun:
                raise
            begun = False  # what an earlier process or another address has sent may be to blame


def _passes(error: OSError | HTTPException) -> bool:
    """Tell whether another attempt may do better."""
    if isinstance(error, HTTPError):
        return error.code in (408, 416, 429) or error.code >= 500
    return not isinstance(error, DownloadError | DiskError)


def _transfer(url: str, part: Path, file: RemoteFile, progress: Progress) -> None:
    there, tag = _size(part), _tag_of(part)
    # A checksum would tell two versions apart.
    version = tag.read_text() if file.checksum is None and tag.exists() else ""
    if there == file.size:
        return
    headers = {"User-Agent": f"ttac/{__version__}", "Accept-Encoding": "identity"}
    if 0 < there < (file.size or there + 1):
        headers["Range"] = f"bytes={there}-"
        headers |= {"If-Range": version} if version else {}
    with build_opener(SafeRedirects).open(Request(url, headers=headers), timeout=TIMEOUT) as response:
        sent = response.headers.get("Content-Range", "bytes 0-")  # without one, the file from its beginning
        if not sent.startswith((f"bytes {there}-", "bytes 0-")):
            raise DownloadError("it sent another part than was asked for")
        there = 0 if sent.startswith("bytes 0-") else there
        total = file.size if response.length is None else there + response.length
        if file.size not in (None, total):
            raise DownloadError(f"it has {total} bytes there, expected {file.size}")
        with writing(part), part.open("ab" if there else "wb") as out:
            if not there:
                tag.write_text(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
            while chunk := response.read1(CHUNK):  # at once what is there, of which nothing is lost if no more comes
                out.write(chunk)
                there += len(chunk)
                progress(there, total)
    if there < (total or 1):
        raise OSError(f"it broke off after {there} of {total} bytes")


def _tag_of(part: Path) -> Path:
    """Name the file with what the server calls the version that `part` is of."""
    return part.with_name(f"{part.name}.tag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def check_file(path: Path, file: RemoteFile) -> str:
    """Compare a file's size and checksum with those published, and say which; raise an error if they differ.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(b"abc")
    ...     check_file(Path(folder, "a"), RemoteFile("https://example.org/a", 3))
    'size'
    """
    if file.size not in (None, _size(path)):
        raise ValueError(f"{path} has {_size(path)} bytes, expected {file.size}")
    if file.checksum is None:
        return "nothing to compare it with is published" if file.size is None else "size"
    return check_sum(path, file.checksum)


def check_sum(path: Path, expected: str) -> str:
    """Compare a file with a checksum, `kind:digits`, and give its kind; raise an error if they differ."""
    kind = expected.partition(":")[0]
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    if f"{kind}:{digest.hexdigest()}" != expected:
        raise ValueError(f"{path} has {kind}:{digest.hexdigest()}, expected {expected}: it is damaged or another file")
    return kind

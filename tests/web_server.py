"""A web server on this machine that behaves as well or as badly as a test wants."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """What is served, how, and what was asked for."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    wrong_ranges: bool = False  # answers with the whole, as a part, whatever was asked for
    breaks: list[int] = field(default_factory=list)  # bytes after which one answer each breaks off
    errors: list[int] = field(default_factory=list)  # codes of the next answers
    resets: int | None = None  # bytes after which every answer is reset
    tag: str | None = None  # ETag of all files
    length: str | None = None  # Content-Length, if not the true one; empty: none
    raw: bytes | None = None  # all of the answer
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range


@contextmanager
def serving(**content: bytes) -> Iterator[Web]:
    """Serve files, given by name with `__` for a dot, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Stay silent."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            wanted = self.headers.get("Range")
            web.asked.append((path, wanted))
            name = path.rpartition("/")[2]
            if web.raw is not None:
                self.wfile.write(web.raw)
            elif web.errors:
                self.send_error(web.errors.pop(0))
            elif path in web.redirects:
                self.send_response(302)
                self.send_header("Location", web.redirects[path])
                self.end_headers()
            elif name in web.files:
                self.send(web.files[name], wanted if web.ranges else None)
            else:
                self.send_error(404)

        def send(self, body: bytes, wanted: str | None) -> None:
            if self.headers.get("If-Range", web.tag) != web.tag:
                wanted = None
            match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
            start = 0 if match is None else int(match[1])
            if start >= len(body) > 0:
                self.send_error(416)
                return
            self.send_response(200 if match is None else 206)
            if match is not None:
                start = 0 if web.wrong_ranges else start
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            if web.tag is not None:
                self.send_header("ETag", web.tag)
            length = str(len(body) - start) if web.length is None else web.length
            if length:
                self.send_header("Content-Length", length)
            self.end_headers()
            rest = body[start:]
            if web.resets is not None:
                self.wfile.write(rest[: web.resets])
                time.sleep(0.05)  # a reset takes back what is on its way
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())
                return
            self.wfile.write(rest[: web.breaks.pop(0)] if web.breaks else rest)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web = Web(f"http://127.0.0.1:{server.server_address[1]}")
    web.files |= {name.replace("__", "."): body for name, body in content.items()}
    with answering(server):
        yield web


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[None]:
    """Let a server answer in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

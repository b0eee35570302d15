"""Bounds on connections, which uvicorn leaves to a proxy: size and time of headers, and how many there may be."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ttac.serving.errors import come_again
from ttac.serving.limits import CLOSE, DISCARD_SECONDS
from ttac.serving.middleware import refusal

MOST_HEADER = 2**16  # bytes
TOO_LARGE = (431, f"the header is larger than {MOST_HEADER} bytes")
MOST_CONNECTIONS = 1024
OTHER_FILES = 100  # that the process has open, or may have
# So many over the limit are told to come again; the rest are closed without a word, as a silent one is told nothing.
TOLD = 32
BODY_HEADERS = (b"content-length", b"transfer-encoding")


def allowed_connections() -> int:
    """Let this process open as many files as it needs, or may, and give how many connections that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + TOLD + OTHER_FILES
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == unlimited else max(min(MOST_CONNECTIONS, soft - TOLD - OTHER_FILES), 1)


class Connection(HttpToolsProtocol):
    """A connection that is closed when no whole header comes in time, or when it is too large.

    The time runs from its opening, and from each answer on. Likewise a body that goes on after its request was
    answered, and an answer that is not read, have their time.
    """

    header_seconds = 10.0
    most_connections = MOST_CONNECTIONS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._served = self.app
        self._closing: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._moved = False  # whether what came last brought the parser to a body or to the end of a header
        self._unparsed = 0  # bytes since then
        self._refusal: tuple[int, str] | None = None  # in place of the parser's own

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a header."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # to be told of all that a client does not read
        if len(self.connections) > self.most_connections + TOLD:
            transport.abort()
        else:
            self._close_in(self.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget all timers."""
        self._stop_closing()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and count what the parser has to keep."""
        self._moved = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._unparsed = 0 if self._moved else self._unparsed + len(data)
        if self._unparsed > MOST_HEADER:
            self._refusal = TOO_LARGE
            self.send_400_response("")
        elif self._closing is None and (self.cycle is None or self.cycle.response_complete):
            self._close_in(self.header_seconds)  # a header has begun to come, and uvicorn's own timer has ended

    def on_headers_complete(self) -> None:
        """Go on to the request, or refuse it where there are too many, or its header is too large."""
        self._moved = True
        self._stop_closing()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEADER:
            self._refusal = TOO_LARGE
            raise ValueError  # ends the parser, which ends in send_400_response
        if self.parser.should_upgrade() and any(name in BODY_HEADERS for name, _ in self.headers):
            self._refusal = (400, "upgrades to other protocols are not offered: send it as plain HTTP/1.1")
            raise ValueError  # the parser would take the body for the other protocol, and lose it
        full = max(len(self.connections), len(self.tasks)) > self.most_connections
        self.app = _come_again if full else self._served
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that the body goes on."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the body is whole."""
        self._moved = True
        self._stop_closing()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, and for the rest of a body that nobody reads any more but a moment."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._close_in(DISCARD_SECONDS)

    def pause_writing(self) -> None:
        """Give a client that does not read its answer some time."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.header_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, as the client reads."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in the form of all errors."""
        status, message = self._refusal or (400, msg)
        content = json.dumps({"error": message}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[status] + head + content)
        self.transport.close()

    def _close_in(self, seconds: float) -> None:
        self._stop_closing()
        self._closing = self.loop.call_later(seconds, self.transport.close)

    def _stop_closing(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def bounded(seconds: float, connections: int) -> type[Connection]:
    """Give the class of at most so many connections, each with so much time for a header."""

    class Bounded(Connection):
        header_seconds = seconds
        most_connections = connections

    return Bounded


async def _come_again(scope: Any, receive: Any, send: Any) -> None:
    await refusal(come_again(503, "too many connections: come again", CLOSE))(scope, receive, send)

"""Who may ask, from where, and how much a request may hold."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import anyio
from starlette.types import Receive

from ttac.common.options import Checked, setting
from ttac.serving.errors import RequestError, client_gone, come_again

# Paths that need no token: probes of whatever runs the server, and the page, which has a field for the token.
PROBES = frozenset(("/v2/health/live", "/v2/health/ready"))  # asked by an address that nobody knows before
OPEN_PATHS = PROBES | {"/"}
ADMIN = "/admin/"
# Bodies held at a time, in units of the largest one; more requests are asked to come again.
HELD_BODIES = 4
# Time for which the rest of a body that is too large is still received, and thrown away.
DISCARD_SECONDS = 1.0
CLOSE = {"Connection": "close"}

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True)
class HttpSettings(Checked):
    """Tokens, names and limits of the HTTP side.

    `token` guards everything but health and the page, `admin_token` the calls that change something; it opens the rest
    too. Without an `admin_token` nobody may make them. `hosts` are the names under which the server may be asked beside
    those of this machine, None for any: a page of a foreign name that resolves to this machine must not reach it.
    `max_json` is small beside `max_body`, as nobody else is answered while JSON is read; it must hold an image.
    """

    token: str | None = None
    admin_token: str | None = None
    hosts: tuple[str, ...] | None = ()
    max_body: int = setting(16 * 2**20, above=0)
    max_json: int = setting(2**20, above=0)
    max_pixels: int = setting(2**24, above=0)
    body_seconds: float = setting(10.0, above=0)
    answer_seconds: float = setting(10.0, above=0)

    def check(self) -> None:
        """Bring names into one form, and refuse tokens that are none."""
        if self.token == "" or self.admin_token == "":
            raise ValueError("an empty token guards nothing: give a longer one, or none")
        if self.hosts is not None:
            object.__setattr__(self, "hosts", tuple(_normal(name) for name in self.hosts))


def check_access(path: str, headers: Headers, settings: HttpSettings) -> None:
    """Raise a RequestError where a request comes from the wrong place or without the right token."""
    host = headers.get(b"host")
    if host is not None and path not in PROBES and settings.hosts is not None:
        name, _ = _place(b"http://" + host)
        if name is None or not (_is_this_machine(name) or name in settings.hosts):
            raise RequestError(403, "this server is not asked by that name; start it with the name among its hosts")
    origin = headers.get(b"origin")
    if origin is not None and not _same_place(origin, host):
        raise RequestError(403, "pages of other hosts may not ask this server")
    _check_token(path, headers, settings)


def _same_place(origin: bytes, host: bytes | None) -> bool:
    """Compare the origin of a page with the name that it asks; the scheme may be a proxy's."""
    if host is None:
        return False
    scheme = origin.partition(b"://")[0]
    name, port = _place(origin)
    return name is not None and (name, port) == _place(scheme + b"://" + host)


@lru_cache(maxsize=64)  # most requests name the same place
def _place(url: bytes) -> tuple[str | None, int | None]:
    """Give host name and port of an address, None for what cannot be read."""
    try:
        parts = urlsplit(url.decode("ascii"))
        name = parts.hostname
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None, None
    return (_normal(name) if name else None), port


def _normal(name: str) -> str:
    """Give the one form of a host name, of which all are the same to a resolver.

    >>> _normal("Models.Example.")
    'models.example'
    """
    return name.lower().rstrip(".")


@lru_cache(maxsize=64)
def _is_this_machine(name: str) -> bool:
    """Tell names of the loopback interface.

    >>> _is_this_machine("127.0.0.1"), _is_this_machine("::1"), _is_this_machine("10.0.0.1")
    (True, True, False)
    """
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _check_token(path: str, headers: Headers, settings: HttpSettings) -> None:
    admin = path.startswith(ADMIN)
    if not admin and (settings.token is None or path in OPEN_PATHS):
        return
    if admin and settings.admin_token is None:
        raise RequestError(403, "this server was started without a token, so nobody may change it")
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise RequestError(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
    # Both are compared whatever the first gives, in a time that tells nothing about them.
    is_admin, is_user = _equal(given, settings.admin_token), _equal(given, settings.token)
    if is_admin or (is_user and not admin):
        return
    if is_user:
        challenge = {"WWW-Authenticate": 'Bearer error="insufficient_scope"'}
        raise RequestError(403, "this call needs the token of the administrator", challenge)
    raise RequestError(401, "the token is wrong", {"WWW-Authenticate": 'Bearer error="invalid_token"'})


def _equal(given: bytes, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.strip(), token.encode())


class BodyReader:
    """Reads bodies of at most `limit` bytes within `seconds`, and knows how many bytes are held in all."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self.held = 0

    @asynccontextmanager
    async def body(self, receive: Receive, headers: Headers) -> AsyncIterator[bytes]:
        """Read a body, counting while it comes, and hold it until the block ends."""
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
            raise RequestError(415, "compressed bodies are not taken: send it without Content-Encoding")
        if _length(headers) > self._limit:
            raise await self._too_large(receive, headers)
        parts: list[bytes] = []
        count, more = 0, True
        try:
            with anyio.move_on_after(self._seconds):
                while more and count <= self._limit:
                    part, more = await _part(receive)
                    parts.append(part)
                    count += len(part)
                    self._hold(len(part))
            if count <= self._limit and not more:
                body = b"".join(parts)
                parts.clear()
                yield body
                return
        finally:
            self.held -= count
        if count > self._limit:
            raise await self._too_large(receive, headers, more)
        # The rest may never come, so the connection is of no use any more.
        raise RequestError(408, f"the body did not come within {self._seconds:g} seconds", CLOSE)

    def _hold(self, added: int) -> None:
        self.held += added
        if self.held > HELD_BODIES * self._limit:
            raise come_again(429, "too many large requests at a time: come again")

    async def _too_large(self, receive: Receive, headers: Headers, more: bool = True) -> RequestError:
        """Let the rest go by for a moment: a client that is still sending does not read why it was refused."""
        if b"expect" not in headers:  # such a client waits to be asked for its body
            with anyio.move_on_after(DISCARD_SECONDS):
                while more:
                    _, more = await _part(receive)
        return RequestError(413, f"the body is larger than {self._limit} bytes", CLOSE)


def _length(headers: Headers) -> int:
    """Give the length of a body as the client says it, 0 where it does not."""
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18:
        raise RequestError(400, "Content-Length is not a number")
    return int(length)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Give the next part of a body, and whether more follow."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise client_gone()
    return message.get("body", b""), message.get("more_body", False)

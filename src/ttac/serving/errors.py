"""Requests that are refused, with the status and the sentence that the client gets."""

from __future__ import annotations

from collections.abc import Mapping


class RequestError(Exception):
    """A request is refused; nothing was changed.

    >>> RequestError(413, "the body is too large").status
    413
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def come_again(status: int, message: str, seconds: int = 1) -> RequestError:
    """Refuse for now: the same request may be accepted after `seconds`.

    >>> come_again(429, "too many images wait").headers
    {'Retry-After': '1'}
    """
    return RequestError(status, message, {"Retry-After": str(seconds)})


def client_gone() -> RequestError:
    """Give a request up whose client went away; nobody reads the answer, but the metrics count it.

    >>> client_gone().status
    499
    """
    return RequestError(499, "the client went away")

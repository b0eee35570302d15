"""Requests that are refused, with the status and the sentence that the client gets."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException


class RequestError(HTTPException):
    """A request is refused; nothing was changed.

    >>> RequestError(413, "the body is too large").status_code
    413
    """


def come_again(status: int, message: str, headers: Mapping[str, str] | None = None) -> RequestError:
    """Refuse for now: the same request may be accepted after a second.

    >>> come_again(429, "too many images wait").headers
    {'Retry-After': '1'}
    """
    return RequestError(status, message, {"Retry-After": "1", **(headers or {})})


def client_gone() -> RequestError:
    """Give a request up whose client went away; nobody reads the answer, but the metrics count it.

    >>> client_gone().status_code
    499
    """
    return RequestError(499, "the client went away")

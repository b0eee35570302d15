"""What happens to every request, before and after its route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttac.serving.errors import come_again
from ttac.serving.history import History
from ttac.serving.limits import HttpSettings, check_access
from ttac.serving.metrics import Metrics

UNKNOWN_ROUTE = "other"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Write JSON; what is not finite becomes an error here rather than in whoever reads it."""
    return JSONResponse(value, status, {"Cache-Control": "no-store", **(headers or {})})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Give the form that all errors have."""
    return json_response({"error": message}, status, headers)


def refusal(error: HTTPException) -> Response:
    """Tell why a request is refused."""
    return error_response(error.status_code, str(error.detail), error.headers)


class Gate:
    """Lets in who may come in, and notes what every request came to."""

    def __init__(
        self, app: ASGIApp, *, settings: HttpSettings, metrics: Metrics, history: History, predicting: frozenset[str]
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._history = history
        self._predicting = predicting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0
        without_body = scope["method"] == "HEAD"
        if without_body:  # the server, which has its own scope, sends the headers alone
            scope = {**scope, "method": "GET"}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif without_body:
                message = {**message, "body": b""}
            await send(message)

        try:
            check_access(scope["path"], dict(scope["headers"]), self._settings)
            await self._app(scope, receive, noting)
        except HTTPException as error:
            await refusal(error)(scope, receive, noting)
        except asyncio.CancelledError:
            # A server that shuts down cancels what takes too long, and says nothing of use to the client.
            if status:
                raise
            await refusal(come_again(503, "the server is shutting down"))(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
            if status not in range(1, 400) and route in self._predicting:
                self._history.refuse()
            self._metrics.request(route, status or 500, time.perf_counter() - started)

"""Commands that reach the adapter between two chunks of samples, and their answers."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ttac.serving.channels import MESSAGE_SIZE
from ttac.serving.journal import LOGGER, to_json

Arguments = Mapping[str, Any]
AT_ONCE = 16  # commands that are answered before learning goes on


class Commands:
    """Answers JSON datagrams `{"id", "command", ...}` with `{"id", "ok", "message", "version"}`, whatever they hold.

    A handler gives the message of its success, and raises an error with that of its failure.
    """

    def __init__(
        self, end: socket.socket, handlers: Mapping[str, Callable[[Arguments], str]], version: Callable[[], int]
    ) -> None:
        self._end = end
        self._handlers = handlers
        self._version = version

    def wait(self, seconds: float) -> None:
        """Wait until a command comes, or so long."""
        select.select([self._end], [], [], seconds)

    def answer(self) -> None:
        """Carry out the commands that have come."""
        for _ in range(AT_ONCE):
            try:
                text = self._end.recv(MESSAGE_SIZE)
            except OSError:  # nothing is waiting, or nobody is there
                return
            request = _parsed(text)
            if request is not None:
                self._reply(request)

    def _reply(self, request: dict[str, Any]) -> None:
        name = request.get("command")
        ok = False
        try:
            message = self._carried_out(name, request)
            ok = True
        except Exception as error:  # a command must never end the process
            message = str(error) or type(error).__name__
            LOGGER.warning("command refused: %s", message, extra={"fields": {"event": "command", "command": name}})
        answer = {"id": request.get("id"), "ok": ok, "message": message, "version": self._version()}
        with contextlib.suppress(OSError):  # who does not read answers does not get them
            self._end.send(to_json(answer).encode())

    def _carried_out(self, name: Any, request: dict[str, Any]) -> str:
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            raise ValueError(f"unknown command: {str(name)[:100]!r}; there are {', '.join(sorted(self._handlers))}")
        return handler(request)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        request = json.loads(text)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        LOGGER.warning("a command of %d bytes is no JSON object", len(text), extra={"fields": {"event": "command"}})
        return None
    return request

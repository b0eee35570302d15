"""What an administrator can tell a learner to do, as commands that reach it between two chunks of samples."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ttac.serving.channels import MESSAGE_SIZE
from ttac.serving.journal import LOGGER, to_json

if TYPE_CHECKING:
    from ttac.serving.learner import Learner

AT_ONCE = 16  # commands that are answered before learning goes on


class Admin:
    """Answers JSON datagrams `{"id", "command", ...}` with `{"id", "ok", "message", "version"}`, whatever they hold.

    A command gives the message of its success, and raises an error with that of its failure. What it did is saved: a
    kill must not undo it.
    """

    def __init__(self, learner: Learner, end: socket.socket) -> None:
        self._learner = learner
        self._end = end
        self._commands: dict[str, Callable[[dict[str, Any]], str]] = {
            "pause": lambda _: self._set_paused(True, "pause", "the adapter is paused; the predictor goes on"),
            "resume": lambda _: self._set_paused(False, "resume", "the adapter goes on"),
            "reset": self._reset,
            "rollback": self._roll_back,
            "snapshot": self._snapshot,
        }

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
            reply = {**self._reply(text), "version": self._learner.releases.served}
            if reply["id"] is not None:
                with contextlib.suppress(OSError):  # who does not read answers does not get them
                    self._end.send(to_json(reply).encode())

    def _reply(self, text: bytes) -> dict[str, Any]:
        request: dict[str, Any] = {}
        try:
            request = dict(json.loads(text))
            name = str(request.get("command"))
            if name not in self._commands:
                raise ValueError(f"unknown command: {name[:100]!r}; there are {', '.join(sorted(self._commands))}")
            return {"id": request.get("id"), "ok": True, "message": self._commands[name](request)}
        except Exception as error:  # a command must never end the process
            message = str(error) or type(error).__name__
            fields = {"event": "command", "command": request.get("command")}
            LOGGER.warning("command refused: %s", message, extra={"fields": fields})
            return {"id": request.get("id"), "ok": False, "message": message}

    def _set_paused(self, paused: bool, event: str, message: str) -> str:
        learner = self._learner
        if learner.paused != paused:
            learner.paused = paused
            learner.journal.note(event, message, version=learner.releases.served)
            self._save()
        return message

    def _reset(self, _request: dict[str, Any]) -> str:
        self._learner.releases.reset("the administrator went back to the source model")
        return self._done("the source model is served")

    def _roll_back(self, request: dict[str, Any]) -> str:
        releases, version = self._learner.releases, request.get("version")
        if version is None:
            # That before the served one; if that has the weights of an earlier one, the version before it.
            earlier = [number for number in self._learner.folder.versions() if number < releases.origin]
            if not earlier:
                raise ValueError("there is no earlier version: reset goes back to the source model")
            version = earlier[-1]
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError(f"version must be a whole number, not {version!r}")
        releases.go_back_to(version)
        return self._done(f"weights of version {version} are served")

    def _done(self, message: str) -> str:
        if self._learner.releases.pending:
            self._learner.save()
            raise OSError("done, but the weights could not be written and are not served yet; this is tried again")
        self._save()
        return message

    def _save(self, failed: str = "done, but it could not be saved, and a restart would undo it") -> None:
        problem = self._learner.save()
        if problem is not None:
            raise OSError(f"{failed}: {problem}")

    def _snapshot(self, _request: dict[str, Any]) -> str:
        self._save("the snapshot could not be written")
        return f"snapshot after {self._learner.tally.samples} samples"

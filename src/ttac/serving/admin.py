"""What an administrator can tell a learner to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ttac.serving.commands import Arguments

if TYPE_CHECKING:
    from ttac.serving.learner import Learner


class Admin:
    """Carries out commands between two chunks, and saves what they did: a kill must not undo it."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.handlers: dict[str, Callable[[Arguments], str]] = {
            "pause": self._pause,
            "resume": self._resume,
            "reset": self._reset,
            "rollback": self._roll_back,
            "snapshot": self._snapshot,
        }

    def _pause(self, _arguments: Arguments) -> str:
        return self._set_paused(True, "pause", "the adapter is paused; the predictor goes on")

    def _resume(self, _arguments: Arguments) -> str:
        return self._set_paused(False, "resume", "the adapter goes on")

    def _set_paused(self, paused: bool, event: str, message: str) -> str:
        learner = self._learner
        if learner.paused != paused:
            learner.paused = paused
            learner.journal.note(event, message, version=learner.releases.served)
            self._save()
        return message

    def _reset(self, _arguments: Arguments) -> str:
        self._learner.releases.reset("the administrator went back to the source model")
        return self._done("the source model is served")

    def _roll_back(self, arguments: Arguments) -> str:
        version = arguments.get("version")
        if version is None:
            version = self._version_before()
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError(f"version must be a whole number, not {version!r}")
        self._learner.releases.go_back_to(version)
        return self._done(f"weights of version {version} are served")

    def _version_before(self) -> int:
        """Give the version before the served one; if that has the weights of an earlier one, the version before it."""
        learner = self._learner
        earlier = [version for version in learner.folder.versions() if version < learner.releases.origin]
        if not earlier:
            raise ValueError("there is no earlier version: reset goes back to the source model")
        return earlier[-1]

    def _done(self, message: str) -> str:
        if self._learner.releases.pending:
            self._learner.save()
            raise OSError("done, but the weights could not be written and are not served yet; this is tried again")
        self._save()
        return message

    def _save(self) -> None:
        problem = self._learner.save()
        if problem is not None:
            raise OSError(f"done, but it could not be saved, and a restart would undo it: {problem}")

    def _snapshot(self, _arguments: Arguments) -> str:
        problem = self._learner.save()
        if problem is not None:
            raise OSError(f"the snapshot could not be written: {problem}")
        return f"snapshot after {self._learner.tally.samples} samples"

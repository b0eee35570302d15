"""What becomes of what was learned: it is published, or undone."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ttac.methods.base import Adapter
from ttac.serving.guard import Guard, GuardReport
from ttac.serving.journal import Faults, Journal
from ttac.serving.publisher import Publisher
from ttac.serving.snapshot import RETRY, Tally
from ttac.serving.state_folder import StateFolder

NUMBER = re.compile(r"[\d.]+(e[+-]?\d+)?")


class Releases:
    """Settles each update: the guard looks at the adapter, whose weights are then served, or become the served ones.

    Weights that cannot be written are not served, as their number could come again for others; they are tried again.
    """

    def __init__(
        self,
        adapter: Adapter,
        guard: Guard | None,
        publisher: Publisher,
        folder: StateFolder,
        journal: Journal,
        faults: Faults,
        tally: Tally,
        every: float,
    ) -> None:
        self._adapter, self._guard, self._publisher, self._folder = adapter, guard, publisher, folder
        self._journal, self._faults, self._tally = journal, faults, tally
        self._every = every
        self._due = 0.0  # of the monotonic clock
        self._good: dict[str, Any] | None = None  # a state of the adapter that can be gone back to
        self._unserved = False  # whether that is one that could not be written yet
        self._repeated = Faults(journal)  # what may be the same again until something is published
        self.pending = False  # whether the adapter has weights that were neither published nor undone
        self.origin = 0  # version that the served weights were first published as
        self.report: GuardReport | None = None  # of the last look

    @property
    def served(self) -> int:
        """The version that the predictor has or gets next, 0 for none."""
        return self._publisher.served

    @property
    def is_due(self) -> bool:
        """Whether there is something to settle, and time for it."""
        return self.pending and time.monotonic() >= self._due

    def begin(self, has: int, origin: int, pending: bool) -> None:
        """Begin with an adapter that has the weights of version `has`, or later ones if they are `pending`."""
        self._publisher.begin(has)
        self.pending = pending
        self.origin = origin if has == self.served else self.served
        if self.served == 0:
            if not pending:
                self.publish("the model of the snapshot" if has else "source model", is_source=not has)
        elif has == self.served and not pending:
            self._good = self._adapter.state_dict()

    def tell_guard(self) -> None:
        """Tell the guard of the version that is served, which a snapshot of before does not have."""
        if self._guard is None:
            return
        try:
            self._guard.published(self._folder.load_version(self.served))
        except (OSError, ValueError):  # then `undo` goes to the source model
            self._guard.published(None)

    def settle(self) -> None:
        """Publish what was learned if the guard lets it, and undo it if not."""
        self.pending = False
        self._due = time.monotonic() + self._every
        report = self.report = self._judged()
        if report is None or report.action == "publish":
            self.publish(f"after {self._tally.samples} samples")
            return
        if report.action == "wait":
            self.pending = True
            return
        self._tally.guard_refusals += 1
        self._note_refusal(report)
        # The measures tell what was wrong; the distances are shown as those of what is served.
        self.report = dataclasses.replace(report, distances={})
        if report.action == "rollback":
            self.undo()
        else:
            self._start_over("the guard went back to the source model")

    def _note_refusal(self, report: GuardReport) -> None:
        kind, message = NUMBER.sub("", report.reasons[0]), f"not published: {'; '.join(report.reasons)}"
        self._repeated.note(kind, message, "guard", version=self.served, measures=report.measures)

    def _judged(self) -> GuardReport | None:
        try:
            return None if self._guard is None else self._guard.check(self._adapter.adapted())
        except Exception as error:  # a model that cannot be judged is not published
            return GuardReport("rollback", (f"the guard failed: {error}",), {}, {})

    def publish(
        self,
        message: str,
        weights: Mapping[str, Tensor] | None = None,
        origin: int | None = None,
        *,
        is_source: bool = False,
    ) -> None:
        """Publish the adapter's weights, given where they were read, unless they are served already."""
        before = self.served
        try:
            weights = self._adapter.adapted().model.state_dict() if weights is None else weights
            version = self._publisher.publish(weights, message, samples=self._tally.samples)
        except OSError as error:
            self.pending, self._due = True, time.monotonic() + RETRY
            self._faults.note("publish", f"a version could not be written, and is tried again: {error}")
            return
        self.pending = self._unserved = False
        self._good = self._adapter.state_dict()
        if self._guard is not None:
            self._guard.published(None if is_source else weights)
        if version != before:
            self._repeated = Faults(self._journal)
            self._tally.publishes += 1
            self.origin = origin or version

    def undo(self) -> None:
        """Let the adapter go back to the weights that are served, or are to be since a reset or rollback."""
        self.pending = self._unserved
        try:
            if self._good is not None:
                self._adapter.load_state_dict(self._good)
            else:
                self._adapter.restart_from(self._folder.load_version(self.served))
        except (OSError, ValueError) as error:
            self._start_over(f"version {self.served} cannot be gone back to ({error}), but the source model can")
            return
        self._tally.rollbacks += 1
        there = "the weights that are published next" if self._unserved else f"version {self.served}"
        self._repeated.note("rollback", f"the adapter went back to {there}", "rollback", version=self.served)

    def reset(self, message: str) -> None:
        """Let the adapter go back to the source model as the administrator wants it, and publish it."""
        self._repeated, self.report = Faults(self._journal), None
        self._start_over(message)

    def _start_over(self, message: str) -> None:
        self._adapter.reset()
        self._tally.resets += 1
        self._repeated.note("reset", message, "reset", version=self.served)
        self._go_on_from_here()
        self.publish("source model", is_source=True)

    def _go_on_from_here(self) -> None:
        """Let what comes be undone to this state, also where it cannot be written: not to what was left for it."""
        self._good, self._unserved = self._adapter.state_dict(), True

    def go_back_to(self, version: int) -> None:
        """Go on from a version with a memory that is new, and publish its weights as a new version."""
        weights = self._folder.load_version(version)
        self._adapter.restart_from(weights)
        self.report = None
        self._tally.rollbacks += 1
        self._journal.note("rollback", f"the administrator went back to version {version}", version=version)
        self._go_on_from_here()
        self.publish(f"weights of version {version}", weights, version)

"""What becomes of what was learned: it is published under a number that names it once and for all, or undone."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.guard import Guard, GuardReport
from ttac.serving.journal import Faults, Journal
from ttac.serving.shared import Slots
from ttac.serving.snapshot import RETRY, Tally
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout

Weights = Mapping[str, Tensor]
NUMBER = re.compile(r"[\d.]+(e[+-]?\d+)?")


class Releases:
    """Settles each update: the guard looks at the adapter, whose weights are then served, or become the served ones.

    Weights are published under the next number: on disk first, then to the predictor. A process that is killed between
    the two leaves a version that nobody has seen; its successor publishes it as it is. So whatever was answered under a
    number is on disk under it, and no number is given twice. Weights that cannot be written are not served, and are
    tried again.
    """

    def __init__(
        self, adapter: Adapter, guard: Guard | None, slots: Slots, folder: StateFolder, every: float, keep: int
    ) -> None:
        self._adapter, self._guard, self._slots, self._folder = adapter, guard, slots, folder
        self._every, self._keep = every, keep
        self.journal, self.tally = Journal(folder.events), Tally()
        self._layout = WeightsLayout.of(adapter.classifier.model)
        self._last = 0  # number that was given last
        self._due = 0.0  # of the monotonic clock
        self._good: dict[str, Any] | None = None  # a state of the adapter that can be gone back to
        self._unserved = False  # whether that is one that could not be written yet
        self._repeated = Faults(self.journal)  # what may be the same again until something is published
        self.pending = False  # whether the adapter has weights that were neither published nor undone
        self.origin = 0  # version that the served weights were first published as
        self.report: GuardReport | None = None  # of the last look

    @property
    def served(self) -> int:
        """The version that the predictor has or gets next, 0 for none."""
        return self._slots.version

    @property
    def is_due(self) -> bool:
        """Whether there is something to settle, and time for it."""
        return self.pending and time.monotonic() >= self._due

    def begin(self, has: int, origin: int, pending: bool) -> None:
        """Begin with an adapter that has the weights of version `has`, or later ones if they are `pending`."""
        # Whatever number was ever given, or is found.
        self._last = max(self._folder.last_number(), self.served, has)
        found = self.newest() if self._folder.newest() > self.served else None
        if found is not None and found[0] > self.served:
            version, weights = found
            self._slots.publish(version, self._layout.pack(weights))
            self.journal.note("publish", f"version {version} of the state folder, again", version=version)
        self.pending = pending
        self.origin = origin if has == self.served else self.served
        if self.served == 0:
            if not pending:
                self.publish("the model of the snapshot" if has else "source model", is_source=not has)
        elif has == self.served and not pending:
            self._good = self._adapter.state_dict()

    def newest(self) -> tuple[int, dict[str, Tensor]] | None:
        """Give the newest version that can be read, and put damaged ones aside."""
        for version in reversed(self._folder.versions()):
            try:
                weights = self._folder.load_version(version)
                self._layout.pack(weights)
            except ValueError as error:
                self._folder.set_version_aside(version)
                self.journal.note("fault", f"version {version} was put aside: {error}", version=version)
            except OSError as error:
                self.journal.note("fault", f"version {version} cannot be read: {error}", version=version)
            else:
                return version, weights
        return None

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
        try:
            report = None if self._guard is None else self._guard.check(self._adapter.adapted())
        except Exception as error:  # a model that cannot be judged is not published
            report = GuardReport("rollback", (f"the guard failed: {error}",), {}, {})
        self.report = report
        if report is None or report.action == "publish":
            self.publish(f"after {self.tally.samples} samples")
            return
        if report.action == "wait":
            self.pending = True
            return
        self.tally.guard_refusals += 1
        kind, message = NUMBER.sub("", report.reasons[0]), f"not published: {'; '.join(report.reasons)}"
        self._repeated.note(kind, message, "guard", version=self.served, measures=report.measures)
        # The measures tell what was wrong; the distances are shown as those of what is served.
        self.report = dataclasses.replace(report, distances={})
        if report.action == "rollback":
            self.undo()
        else:
            self._start_over("the guard went back to the source model")

    def publish(
        self, message: str, weights: Weights | None = None, origin: int | None = None, *, is_source: bool = False
    ) -> None:
        """Publish the adapter's weights, given where they were read, unless they are served already."""
        before = self.served
        try:
            weights = self._adapter.adapted().model.state_dict() if weights is None else weights
            version = self._numbered(weights, message)
        except OSError as error:
            self.pending, self._due = True, time.monotonic() + RETRY
            self.journal.faults.note("publish", f"a version could not be written, and is tried again: {error}")
            return
        self.pending = self._unserved = False
        self._good = self._adapter.state_dict()
        if self._guard is not None:
            self._guard.published(None if is_source else weights)
        if version != before:
            self._repeated = Faults(self.journal)
            self.tally.publishes += 1
            self.origin = origin or version

    def _numbered(self, weights: Weights, message: str) -> int:
        """Publish weights as a new version and give it, or the served version if it has these very weights."""
        content = self._layout.pack(weights)
        there = self._slots.read()
        if there is not None and there[1] == content:
            return there[0]
        # A number counts as given even if the rest fails: its file may be there.
        self._last = version = self._last + 1
        self._folder.save_version(version, weights)
        self._slots.publish(version, content)
        message = f"version {version}: {message}"
        self.journal.note("publish", message, version=version, samples=self.tally.samples)
        try:
            self._folder.prune(self._keep, {version})
        except OSError as error:
            self.journal.faults.note("versions", f"old versions cannot be deleted: {error}")
        return version

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
        self.tally.rollbacks += 1
        there = "the weights that are published next" if self._unserved else f"version {self.served}"
        self._repeated.note("rollback", f"the adapter went back to {there}", "rollback", version=self.served)

    def reset(self, message: str) -> None:
        """Let the adapter go back to the source model as the administrator wants it, and publish it."""
        self._repeated, self.report = Faults(self.journal), None
        self._start_over(message)

    def _start_over(self, message: str) -> None:
        self._adapter.reset()
        self.tally.resets += 1
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
        self.tally.rollbacks += 1
        self.journal.note("rollback", f"the administrator went back to version {version}", version=version)
        self._go_on_from_here()
        self.publish(f"weights of version {version}", weights, version)

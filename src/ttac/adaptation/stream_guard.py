"""The guard of a stream within one process: it judges every update, and knows the last state that it let pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ttac.adaptation.guard import Guard, GuardOptions, GuardReport
from ttac.common.state import Stateful, cloned
from ttac.model.classifier import Classifier
from ttac.source.statistics import SourceStatistics

EVENTS = 64  # that are told, the newest ones; all of them are counted


class StreamGuard(Stateful):
    """Keeps samples away and judges updates for an adapter, counts what it did, and holds one state to go back to."""

    guard: Guard
    good: dict[str, Any] | None
    counts: dict[str, int]
    events: list[dict[str, Any]]

    def __init__(self, source: Classifier, stats: SourceStatistics | None, options: GuardOptions) -> None:
        guard = Guard(source, stats, options)
        self.options = options
        self.declare(
            guard=lambda: guard,
            good=lambda: None,  # of the adapter when an update was let pass last; None: the source model
            counts=lambda: dict.fromkeys(("refused_samples", "guard_refusals", "rollbacks", "resets"), 0),
            events=list,
        )

    def admit(self, images: Tensor, seen: int) -> Tensor:
        """Give the images `[n, C, H, W]` that may be learned from, `seen` samples into the stream."""
        before = self.guard.refused
        admitted = self.guard.admit(images)
        self.counts["refused_samples"] += len(images) - len(admitted)
        if self.guard.refused and not before:
            self._note(seen, "stop", self.guard.refused)
        elif before and not self.guard.refused:
            self._note(seen, "go on", "the images are various again")
        return admitted

    def judge(self, candidate: Classifier, seen: int) -> GuardReport:
        """Say what is to become of the update that has made `candidate`."""
        report = self.guard.check(candidate)
        if report.action in ("rollback", "reset"):
            self.counts["guard_refusals"] += 1
            self.counts[f"{report.action}s"] += 1
            self._note(seen, report.action, *report.reasons, measures=report.measures)
        return report

    def let_pass(self, weights: Mapping[str, Tensor] | None, state: dict[str, Any] | None) -> None:
        """Note what the adapter predicts with, and the state that it goes back to; None: those of the source model."""
        self.guard.published(weights)
        self.good = cloned(state)

    def _note(self, seen: int, event: str, *reasons: str, measures: Mapping[str, Any] | None = None) -> None:
        told = {
            name: {key: value if value is not None and math.isfinite(value) else None for key, value in pair.items()}
            for name, pair in (measures or {}).items()
        }
        entry = {"samples": seen, "event": event, "reasons": list(reasons), "measures": told}
        self.events = [*self.events, entry][-EVENTS:]

    def summary(self) -> dict[str, Any]:
        """Tell what a record has of it, as plain values."""
        return {"options": dataclasses.asdict(self.options), **self.counts, "events": cloned(self.events)}

    def __str__(self) -> str:
        """Tell in words what it did.

        >>> import torch
        >>> from ttac.model.classifier import Classifier
        >>> clf = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), mean=0, std=1)
        >>> str(StreamGuard(clf, None, GuardOptions()))
        'the guard let everything pass'
        """
        if not self.events:
            kept_away = self.counts["refused_samples"]  # images of one colour, which are no event
            return f"the guard kept {kept_away} images from learning" if kept_away else "the guard let everything pass"
        last = self.events[-1]
        return (
            f"the guard undid {self.counts['guard_refusals']} updates and kept {self.counts['refused_samples']} images "
            f"from learning (after {last['samples']} images, {last['event']}: {'; '.join(last['reasons'])})"
        )

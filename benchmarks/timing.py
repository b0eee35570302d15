"""What the benchmarks share: rows of the table, and sides of a comparison that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Bound = tuple[Literal["at least", "at most"], float]


@dataclass(frozen=True)
class Row:
    """One measured figure and what it must be."""

    name: str
    value: float
    # x: a ratio of times in one run
    unit: Literal["x", "%", "s", "ms", "/s", "MiB", "cosine", "relative", "requests", "restarts", "versions"]
    bound: Bound | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bound is kept, None where there is none."""
        if self.bound is None:
            return None
        kind, limit = self.bound
        return self.value >= limit if kind == "at least" else self.value <= limit


def median_seconds(*jobs: Callable[[], object], rounds: int) -> list[float]:
    """Run all jobs in turns, so that a busy machine slows them alike, and give the median time of each."""
    return [statistics.median(taken) for taken in _times(jobs, rounds)]


def least_seconds(*jobs: Callable[[], object], rounds: int) -> list[float]:
    """Do the same and give the shortest time of each, which other processes touch least: for a few percent."""
    return [min(taken) for taken in _times(jobs, rounds)]


def _times(jobs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        for job, taken in zip(jobs, times, strict=True):
            started = time.perf_counter()
            job()
            if number:  # the first round warms up
                taken.append(time.perf_counter() - started)
    return times

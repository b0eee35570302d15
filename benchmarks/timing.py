"""What the benchmarks share: sides of a comparison take turns, so that a busy machine slows them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(*jobs: Callable[[], object], rounds: int) -> list[float]:
    """Run all jobs in turns and give the median time of each."""
    times: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        for job, taken in zip(jobs, times, strict=True):
            started = time.perf_counter()
            job()
            if number:  # the first round warms up
                taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]

"""What a bench shows while it runs: runs done, the error so far of each one under way, and the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ttac.benchmark.execute import Task
from ttac.benchmark.pool import Event


class Display:
    """A bar of all runs and a line for each process; finished runs are printed above."""

    def __init__(self, console: Console, estimates: Mapping[str, float | None], jobs: int) -> None:
        """Take the estimated seconds of the runs by name, None where nobody knows."""
        known = [seconds for seconds in estimates.values() if seconds]
        usual = sum(known) / len(known) if known else 1.0
        self._weights = {name: seconds or usual for name, seconds in estimates.items()}
        self._done_weight, self._started = 0.0, time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), console=console,
        )  # fmt: skip
        note = _left(sum(self._weights.values()) / jobs) if known else ""
        self._all = self._progress.add_task("runs", total=len(estimates), note=note)
        self._lines: dict[int, TaskID] = {}
        self._failed = 0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event[Task]) -> None:
        """Bring the display up to an event."""
        run = event.task.run
        if event.kind == "started":
            if event.worker in self._lines:
                self._progress.remove_task(self._lines[event.worker])
            self._lines[event.worker] = self._progress.add_task(run.name, total=run.samples, note="")
        elif event.kind == "progress":
            samples, error = event.value
            self._progress.update(self._lines[event.worker], completed=samples, note=_percent(error))
        else:
            self._finish(event)

    def _finish(self, event: Event[Task]) -> None:
        name = event.task.run.name
        if event.kind == "done":
            error, seconds = event.value
            self._progress.console.print(f"{name}: {_percent(error)} in {seconds:.1f} s", markup=False, highlight=False)
        else:
            self._failed += 1
            self._progress.console.print(f"{name} failed: {event.value[0]}", markup=False, highlight=False)
        self._done_weight += self._weights[name]
        self._progress.update(self._all, advance=1, note=self._note())

    def _note(self) -> str:
        spent = time.monotonic() - self._started
        left = (sum(self._weights.values()) - self._done_weight) * spent / self._done_weight
        return _left(left) + (f", {self._failed} failed" if self._failed else "")


def _left(seconds: float) -> str:
    return f"about {duration(seconds)} left"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.2f} % error"


def duration(seconds: float) -> str:
    """Write seconds for people.

    >>> duration(5), duration(600), duration(7260)
    ('5 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

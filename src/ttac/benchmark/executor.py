"""The interface behind `ttac bench`: tasks go in, and what becomes of them comes out, their records among it.

`processes.py` is the one executor that there is. Another one, such as one of many machines, is a class with `run`:
`execute` does a task, and whoever asked for it writes the files.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ttac.benchmark.experiment import TargetSpec
from ttac.benchmark.prerequisites import RunFiles
from ttac.benchmark.runs import PlannedRun
from ttac.evaluation.records import Record


@dataclass(frozen=True)
class Task:
    """A run with all that is needed to do it."""

    run: PlannedRun
    target: TargetSpec
    files: RunFiles
    settings: dict[str, Any]  # all that the record depends on, but for the weights
    device: str = "cpu"
    log: tuple[str, ...] = ()  # see `open_loggers`


@dataclass(frozen=True)
class Event:
    """What an executor tells of a task."""

    task: Task


@dataclass(frozen=True)
class Started(Event):
    """A worker has begun."""


@dataclass(frozen=True)
class Progress(Event):
    """How far the task is, and its error so far in percent, None without labels."""

    samples: int
    error: float | None


@dataclass(frozen=True)
class Done(Event):
    """The task has its record, and its features in the plane where the run asks for them."""

    record: Record
    points: dict[str, Any] | None = None


@dataclass(frozen=True)
class Failed(Event):
    """The task ended in an error, or its worker died."""

    error: str
    traceback: str = ""


class Executor(Protocol):
    """Carries out tasks, in whatever order and wherever it likes."""

    def run(self, tasks: Iterable[Task]) -> Generator[Event, None, None]:
        """Do all tasks, each taken when a worker is free, and yield what happens; closing the generator ends the rest.

        A task that fails is told as `Failed`, and stops no other.
        """


def described(error: Exception) -> str:
    """Say in a line what an error is.

    >>> described(ValueError("no images"))
    'ValueError: no images'
    """
    return f"{type(error).__name__}: {error}"

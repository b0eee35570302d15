"""Processes that do runs: one that dies takes its own run with it, and no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

Task = TypeVar("Task")
Report = Callable[[Any], None]  # sends how far a task is to the process that shows it


@dataclass(frozen=True)
class Event(Generic[Task]):
    """What a worker has to say of its task."""

    worker: int
    task: Task
    kind: str  # started, progress, done, failed
    value: Any = None  # progress, result, or (error, traceback)


class Pool(Generic[Task]):
    """Up to `jobs` worker processes that take one task after another and report what becomes of it."""

    def __init__(self, work: Callable[[Task, Report], Any], jobs: int, threads: int) -> None:
        self._work, self._jobs, self._threads = work, jobs, threads
        self._context = multiprocessing.get_context("spawn")  # a copy of a process with torch's threads may hang

    def run(self, tasks: Sequence[Task]) -> Generator[Event[Task], None, None]:
        """Do all tasks and yield what happens; workers end when the iterator is closed."""
        waiting, workers = list(reversed(tasks)), {}
        try:
            for number in range(min(self._jobs, len(tasks))):
                workers[number] = _Worker(self, self._context)
            busy: dict[int, Task] = {}
            while waiting or busy:
                for number in [number for number in workers if number not in busy and waiting]:
                    if not workers[number].process.is_alive():
                        workers[number] = _Worker(self, self._context)
                    busy[number] = waiting.pop()
                    with suppress(BrokenPipeError):  # a process that has just died; its pipe says so
                        workers[number].give(busy[number])
                    yield Event(number, busy[number], "started")
                ready = wait([workers[number].pipe for number in busy])
                for number in [number for number in busy if workers[number].pipe in ready]:
                    kind, value = workers[number].receive()
                    yield Event(number, busy[number], kind, value)
                    if kind in ("done", "failed"):
                        del busy[number]
        finally:
            for worker in workers.values():
                worker.stop()

    @property
    def job(self) -> tuple[Callable[[Task, Report], Any], int]:
        """What a worker does, and with how many threads."""
        return self._work, self._threads


class _Worker:
    def __init__(self, pool: Pool[Any], context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *pool.job), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def give(self, task: Any) -> None:
        self.pipe.send(task)

    def receive(self) -> tuple[str, Any]:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):  # at the end, or in the middle of what it was saying
            self.process.join()
            return "failed", (_death(self.process.exitcode), "")

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def described(error: Exception) -> str:
    """Say in a line what an error is.

    >>> described(ValueError("no images"))
    'ValueError: no images'
    """
    return f"{type(error).__name__}: {error}"


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}, perhaps for want of memory"
    return f"the process ended with the code {code}"


def _serve(pipe: Connection, work: Callable[[Any, Report], Any], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and ends this process
    torch.set_num_threads(threads)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            outcome = ("done", work(task, lambda value: pipe.send(("progress", value))))
        except BrokenPipeError:  # the parent is gone
            os._exit(1)
        except Exception as error:
            outcome = ("failed", (described(error), traceback.format_exc()))
        pipe.send(outcome)

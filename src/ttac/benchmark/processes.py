"""Processes of this machine that do runs: one that dies takes its own run with it, and no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ttac.benchmark.execute import Report, execute
from ttac.benchmark.executor import Done, Event, Failed, Progress, Started, Task, described

Message = tuple[Callable[..., Event], tuple[Any, ...]]  # which event, and what it tells of the task
Work = Callable[[Task, Report], tuple[Any, ...]]  # gives what `Done` tells of a task


class LocalProcesses:
    """The executor of one machine: each of `count` processes does one task after another."""

    def __init__(self, count: int, threads: int | None = None, work: Work = execute) -> None:
        """Give each process as many threads; None: those of this machine, divided."""
        # As many as torch would use here, which goes by the processors that are allowed and by OMP_NUM_THREADS.
        self.count, self.threads = count, threads or max(1, torch.get_num_threads() // count)
        self._work = work

    def run(self, tasks: Iterable[Task]) -> Generator[Event, None, None]:
        """Do all tasks and yield what happens; the processes end when the generator is closed."""
        waiting = iter(tasks)
        workers = [_Worker(self._work, self.threads) for _ in range(self.count)]
        idle, busy = list(workers), dict[_Worker, Task]()
        try:
            while True:
                for task in islice(waiting, len(idle)):
                    worker = idle.pop()
                    busy[worker] = task
                    worker.give(task)
                    yield Started(task)
                if not busy:
                    return
                ready = wait([worker.pipe for worker in busy])
                for worker in [worker for worker in busy if worker.pipe in ready]:
                    kind, told = worker.receive()
                    yield kind(busy[worker], *told)
                    if kind is not Progress:
                        del busy[worker]
                        idle.append(worker)
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """A process that is given tasks; one that has died is replaced when the next task comes."""

    def __init__(self, work: Work, threads: int) -> None:
        self._job = (work, threads)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a copy of a process with torch's threads may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self._job), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def give(self, task: Task) -> None:
        if not self.process.is_alive():
            self.pipe.close()
            self._start()
        with suppress(BrokenPipeError):  # a process that has just died; its pipe says so
            self.pipe.send(task)

    def receive(self) -> Message:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):  # at the end, or in the middle of what it was saying
            self.process.join()
            return Failed, (_death(self.process.exitcode),)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}, perhaps for want of memory"
    return f"the process ended with the code {code}"


def _serve(pipe: Connection, work: Work, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and ends this process
    torch.set_num_threads(threads)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            outcome: Message = (Done, work(task, lambda *news: pipe.send((Progress, news))))
        except BrokenPipeError:  # the parent is gone
            os._exit(1)
        except Exception as error:
            outcome = (Failed, (described(error), traceback.format_exc()))
        pipe.send(outcome)

"""What the tests of shared memory have in common: other processes, and ways to end or to halt one."""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
from waiting import until

from ttac.serving import shared


def shared_memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in another process, which is killed at the end of the block if it has not ended."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def killed(work: Callable[[], None]) -> None:
    """Run `work` in another process, which has to be killed in the midst of it."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


class Deadly:
    """Memory whose writer is killed when it has stored a share of what it stores, at once or the next time."""

    def __init__(self, memory: np.ndarray, share: float, spared: int = 0) -> None:
        self.memory, self.share, self.spared = memory, share, spared

    def __setitem__(self, part: slice, values: np.ndarray) -> None:
        if self.spared:
            self.spared -= 1
            self.memory[part] = values
            return
        stored = round(self.share * len(values))
        self.memory[part][:stored] = values[:stored]
        os.kill(os.getpid(), signal.SIGKILL)


class Halting:
    """Memory whose reader mostly halts in the middle of a copy, until its writer has come on by up to `most`.

    How far a writer comes in a given time is a matter of the machine, and of what else it does.
    """

    def __init__(self, memory: np.ndarray, written: Callable[[], int], most: int) -> None:
        self.memory, self.written, self.most, self.rng = memory, written, most, random.Random(0)

    def __getitem__(self, part: slice | np.ndarray) -> np.ndarray:
        if isinstance(part, slice):
            halves: Any = slice(part.stop // 2), slice(part.stop // 2, part.stop)
        else:
            halves = np.array_split(part, 2)
        first = self.memory[halves[0]].copy()
        if self.rng.random() < 0.8:
            end = self.written() + self.rng.randint(0, self.most)
            until(lambda: self.written() >= end)
        return np.concatenate([first, self.memory[halves[1]]])


class _EndedError(Exception):
    """Stands for the end of a process, in the midst of a call."""


def ends_before(line: int, work: Callable[[], object]) -> bool:
    """Run `work` up to the given one of the lines that it runs in `shared`; tell whether it was ended there."""
    left = line

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != shared.__file__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise _EndedError
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except _EndedError:
        return True
    finally:
        sys.settrace(previous)
    return False


def best_seconds(work: Callable[[int], object]) -> float:
    """Measure the quickest of many calls, near the cost itself on a busy machine too."""
    seconds = []
    for number in range(1, 200):
        started = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - started)
    return min(seconds)

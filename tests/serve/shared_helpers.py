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

from ttac.serve import shared


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


class Halting:
    """Memory whose reader mostly halts in the middle of a copy, for as long as some writes take, or many."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.rng = memory, random.Random(0)

    def __getitem__(self, part: slice | np.ndarray) -> np.ndarray:
        if isinstance(part, slice):
            halves: Any = slice(part.stop // 2), slice(part.stop // 2, part.stop)
        else:
            halves = np.array_split(part, 2)
        first = self.memory[halves[0]].copy()
        if self.rng.random() < 0.8:
            time.sleep(self.rng.random() * 0.002)
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

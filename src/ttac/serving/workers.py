"""Threads for work that may take long, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ttac.serving.batcher import BusyError

Result = TypeVar("Result")
_Task = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Workers:
    """Runs functions for one event loop, `threads` at a time and in the order they came; `most_waiting` may wait.

    A function that waits is forgotten when its future is cancelled. One that runs cannot be stopped: it keeps its
    thread until it ends, so that there are never more than `threads` of them, whoever gave up on it.

    >>> async def ask():
    ...     return await Workers(1, 4).submit(lambda: 6 * 7)
    >>> asyncio.run(ask())
    42
    """

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._threads = threads
        self._most_waiting = most_waiting
        self._running = 0
        self._waiting: deque[_Task] = deque()
        # What waits stays in the queue above: the one of the pool would hold on to what was cancelled.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ttac-decoder")

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue a function from within the event loop; BusyError where too many wait."""
        if self._running >= self._threads and len(self._waiting) >= self._most_waiting:
            raise BusyError(f"{len(self._waiting)} requests wait to be decoded already: come again")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        task = (work, future)
        self._waiting.append(task)
        self._start()
        future.add_done_callback(lambda _: self._forget(task) if future.cancelled() else None)
        return future

    def _start(self) -> None:
        while self._waiting and self._running < self._threads:
            work, future = self._waiting.popleft()
            if not future.cancelled():
                self._running += 1
                self._pool.submit(self._run, work, future)

    def _run(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            future.get_loop().call_soon_threadsafe(self._end, future, result, error)

    def _end(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._running -= 1
        self._start()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _forget(self, task: _Task) -> None:
        if task in self._waiting:
            self._waiting.remove(task)

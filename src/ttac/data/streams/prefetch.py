"""Reading ahead, no further than told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(read: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[Result]:
    """Yield `read(item)` of every item in order, while a background thread reads up to `ahead` items more.

    With `ahead=0` each is read when it is asked for. What a read raises comes out at its place in the order. The thread
    ends with the iterator: after the last item, at an error, and when the iterator is closed or forgotten.

    >>> list(prefetched(str.upper, "abc", ahead=2))
    ['A', 'B', 'C']
    """
    if ahead == 0:
        yield from map(read, items)
        return
    remaining = iter(items)
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        waiting: deque[Future[Result]] = deque(pool.submit(read, item) for item in islice(remaining, ahead))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(read, item) for item in islice(remaining, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)

"""The last minutes of a service, second by second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHOWN_CLASSES = 12
# Latencies kept of a second, and of all of late; more would only cost memory.
LATENCIES = 4096
RECENT_SECONDS = 10


@dataclass
class _Second:
    """What happened in one second."""

    start: int
    version: int
    distance: float | None
    by_class: NDArray[np.uint32]  # [K]
    requests: int = 0
    images: int = 0
    refused: int = 0
    confidence: float = 0.0  # sum over images
    latencies: list[float] = field(default_factory=list)
    p50_ms: float | None = None  # known when it is over
    p99_ms: float | None = None


class History:
    """One row a second of requests, latency, confidence, predicted classes, version and distance.

    `points` rows are kept, so memory is bounded. One thread may record while another reads.

    >>> history = History(["cat", "dog"])
    >>> history.record(0.002, np.array([1]), 0.9, version=3)
    >>> history.summary()["images"], history.json()["classes"]["names"]
    (1, ['cat', 'dog'])
    """

    def __init__(
        self, classes: Sequence[str], *, points: int = 900, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = tuple(classes)
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque(maxlen=LATENCIES)
        self._totals = {"requests": 0, "images": 0, "refused": 0}
        self._lock = threading.Lock()
        self._seconds: deque[_Second] = deque(maxlen=points + 1)  # the last one is being filled
        self._begin(int(clock()), 0, None)

    def record(self, seconds: float, labels: NDArray[np.int64], confidence: float, version: int) -> None:
        """Note an answer: its latency, the predicted classes `[n]`, and the sum of their probabilities."""
        with self._lock:
            now = self._advance()
            now.requests += 1
            now.images += len(labels)
            now.confidence += confidence
            now.version = version
            np.add.at(now.by_class, labels, 1)
            self._totals["requests"] += 1
            self._totals["images"] += len(labels)
            self._recent.append((self._clock(), seconds))
            if len(now.latencies) < LATENCIES:
                now.latencies.append(seconds)

    def refuse(self) -> None:
        """Note a request that got no prediction."""
        with self._lock:
            self._advance().refused += 1
            self._totals["refused"] += 1

    def note(self, version: int, distance: float | None) -> None:
        """Note the version that is served and the distance of the target from the source, from now on."""
        with self._lock:
            now = self._advance()
            now.version, now.distance = version, None if distance is None else round(distance, 4)

    def summary(self) -> dict[str, Any]:
        """Give counts since the start, and images a second and latency of the last seconds."""
        with self._lock:
            self._advance()
            now = self._clock()
            latencies = [seconds for at, seconds in self._recent if now - at <= RECENT_SECONDS]
            images = [second.images for second in list(self._seconds)[-RECENT_SECONDS - 1 : -1]]
            totals = dict(self._totals)
        p50, p99 = _percentiles(latencies)
        return {**totals, "per_second": float(np.mean(images or [0])), "p50_ms": p50, "p99_ms": p99}

    def json(self) -> dict[str, Any]:
        """Give all whole seconds, the classes folded to the most frequent ones and the others together."""
        with self._lock:
            self._advance()
            seconds = list(self._seconds)[:-1]  # which do not change any more
        past = round(time.time() - self._clock(), 3)
        names = ("requests", "images", "refused", "version", "p50_ms", "p99_ms", "distance")
        means = [round(second.confidence / second.images, 4) if second.images else None for second in seconds]
        return {
            "interval": 1.0,
            "times": [second.start + past for second in seconds],
            **{name: [getattr(second, name) for second in seconds] for name in names},
            "confidence": means,
            "classes": self._folded(np.array([second.by_class for second in seconds], np.int64)),
        }

    def _folded(self, by_class: NDArray[np.int64]) -> dict[str, Any]:
        if len(self._names) <= SHOWN_CLASSES or not len(by_class):
            return {"names": list(self._names), "counts": by_class.tolist()}
        # Among equals the first classes; in the order of the classes, so that a class keeps its place.
        shown = np.sort(np.argsort(-by_class.sum(0), kind="stable")[:SHOWN_CLASSES])
        counts = by_class[:, shown]
        others = by_class.sum(1) - counts.sum(1)
        return {
            "names": [self._names[number] for number in shown] + ["others"],
            "counts": np.column_stack([counts, others]).tolist(),
        }

    def _advance(self) -> _Second:
        """Close the seconds that are over and give the present one."""
        now, last = int(self._clock()), self._seconds[-1]
        if now > last.start:
            last.p50_ms, last.p99_ms = _percentiles(last.latencies)
            last.latencies.clear()
            assert self._seconds.maxlen is not None
            # What lies further back than all that is kept would be pushed out anyway.
            for start in range(max(last.start + 1, now - self._seconds.maxlen + 1), now + 1):
                self._begin(start, last.version, last.distance)
        return self._seconds[-1]

    def _begin(self, start: int, version: int, distance: float | None) -> None:
        self._seconds.append(_Second(start, version, distance, np.zeros(len(self._names), np.uint32)))


def _percentiles(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Give the median and the 99th percentile in milliseconds, None where there is nothing."""
    if not seconds:
        return None, None
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99]).round(4).tolist()
    return p50, p99

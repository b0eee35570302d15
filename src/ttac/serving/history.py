"""The last minutes of a service, second by second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHOWN_CLASSES = 12
# Latencies kept of a second, and of all of late; more would only cost memory.
LATENCIES = 4096
RECENT_SECONDS = 10

_ROW = np.dtype(
    [
        ("requests", "i8"),
        ("images", "i8"),
        ("refused", "i8"),
        ("confidence", "f8"),
        ("version", "i8"),
        ("distance", "f8"),
        ("p50_ms", "f8"),
        ("p99_ms", "f8"),
    ]
)


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
        self._points = points
        self._first = self._second = int(clock())
        self._rows = np.zeros(points + 1, _ROW)  # one more: the second that is being filled
        self._by_class = np.zeros((points + 1, len(self._names)), np.uint32)
        self._latencies: list[float] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=LATENCIES)
        self._requests = self._images = self._refused = 0
        self._version = 0
        self._distance = float("nan")
        self._lock = threading.Lock()
        self._begin()

    def record(self, seconds: float, labels: NDArray[np.int64], confidence: float, version: int) -> None:
        """Note an answer: its latency, the predicted classes `[n]`, and the sum of their probabilities."""
        with self._lock:
            row = self._advance()
            row["requests"] += 1
            row["images"] += len(labels)
            row["confidence"] += confidence
            row["version"] = self._version = version
            np.add.at(self._by_class[self._place(self._second)], labels, 1)
            self._requests += 1
            self._images += len(labels)
            self._recent.append((self._clock(), seconds))
            if len(self._latencies) < LATENCIES:
                self._latencies.append(seconds)

    def refuse(self) -> None:
        """Note a request that got no prediction."""
        with self._lock:
            self._advance()["refused"] += 1
            self._refused += 1

    def note(self, version: int, distance: float | None) -> None:
        """Note the version that is served and the distance of the target from the source, from now on."""
        with self._lock:
            row = self._advance()
            row["version"] = self._version = version
            row["distance"] = self._distance = float("nan") if distance is None else distance

    def summary(self) -> dict[str, Any]:
        """Give counts since the start, and images a second and latency of the last seconds."""
        with self._lock:
            self._advance()
            now = self._clock()
            latencies = [seconds for at, seconds in self._recent if now - at <= RECENT_SECONDS]
            seconds = min(RECENT_SECONDS, self._second - self._first)
            rows = self._rows[[self._place(self._second - back) for back in range(1, seconds + 1)]]
            totals = {"requests": self._requests, "images": self._images, "refused": self._refused}
        p50, p99 = _percentiles(latencies)
        per_second = float(rows["images"].mean()) if seconds else 0.0
        return {**totals, "per_second": per_second, "p50_ms": _or_none(p50), "p99_ms": _or_none(p99)}

    def json(self) -> dict[str, Any]:
        """Give all whole seconds, the classes folded to the most frequent ones and the others together."""
        with self._lock:
            self._advance()
            seconds = np.arange(max(self._first, self._second - self._points), self._second)
            rows = self._rows[seconds % len(self._rows)]
            by_class = self._by_class[seconds % len(self._rows)]
        with np.errstate(invalid="ignore"):
            confidence = rows["confidence"] / rows["images"]
        return {
            "interval": 1.0,
            "times": (seconds + round(time.time() - self._clock(), 3)).tolist(),
            **{name: rows[name].tolist() for name in ("requests", "images", "refused", "version")},
            **{name: [_or_none(value) for value in rows[name].tolist()] for name in ("p50_ms", "p99_ms", "distance")},
            "confidence": [_or_none(value) for value in confidence.tolist()],
            "classes": self._folded(by_class),
        }

    def _folded(self, by_class: NDArray[np.uint32]) -> dict[str, Any]:
        if len(self._names) <= SHOWN_CLASSES:
            return {"names": list(self._names), "counts": by_class.tolist()}
        # Among equals the first classes; in the order of the classes, so that a class keeps its place.
        shown = np.sort(np.argsort(-by_class.sum(0, dtype=np.int64), kind="stable")[:SHOWN_CLASSES])
        counts = by_class[:, shown].astype(np.int64)
        others = by_class.sum(1, dtype=np.int64) - counts.sum(1)
        return {
            "names": [self._names[number] for number in shown] + ["others"],
            "counts": np.column_stack([counts, others]).tolist(),
        }

    def _place(self, second: int) -> int:
        return second % len(self._rows)

    def _advance(self) -> Any:
        """Close the seconds that are over and give the row of the present one."""
        now = int(self._clock())
        if now > self._second:
            self._close()
            # What lies further back than all rows is overwritten anyway.
            self._second = max(self._second, now - len(self._rows))
            while self._second < now:
                self._second += 1
                self._begin()
        return self._rows[self._place(self._second)]

    def _begin(self) -> None:
        place = self._place(self._second)
        unknown = float("nan")
        self._rows[place] = (0, 0, 0, 0.0, self._version, self._distance, unknown, unknown)
        self._by_class[place] = 0

    def _close(self) -> None:
        row = self._rows[self._place(self._second)]
        row["p50_ms"], row["p99_ms"] = _percentiles(self._latencies)
        self._latencies.clear()


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Give the median and the 99th percentile in milliseconds, NaN where there is nothing."""
    if not seconds:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99]).tolist()
    return p50, p99


def _or_none(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None

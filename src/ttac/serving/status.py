"""What the adapter says of itself, every second, also in the middle of an update."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ttac.serving.channels import STATUS_SIZE, Channels
from ttac.serving.journal import LOGGER, to_json

INTERVAL = 0.5  # seconds


class StatusBoard:
    """Holds plain values, and publishes them from a thread of its own.

    >>> channels = Channels((3, 8, 8), weights_size=100, buffer=4)
    >>> board = StatusBoard(channels)
    >>> board.set(state="paused")
    >>> board.publish()
    >>> b'"state": "paused"' in channels.status.read()[1]
    True
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def set(self, **values: Any) -> None:
        """Replace some values; what is given is not changed afterwards."""
        with self._lock:
            self._values.update(values)

    def publish(self) -> None:
        """Publish the values with those of this moment."""
        with self._lock:
            slots, ring = self._channels.status, self._channels.ring
            clocks = {"time": time.time(), "monotonic": time.monotonic()}
            now = {"pid": os.getpid(), **clocks, "lag": ring.waiting, "dropped": ring.dropped}
            content = to_json({**self._values, **now}).encode()
            if len(content) > STATUS_SIZE:  # of tens of thousands of classes
                content = to_json({**self._values, **now, "distances": {}}).encode()
            slots.publish(slots.version + 1, content)

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish again and again during the block."""
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(INTERVAL):
                try:
                    self.publish()
                except Exception:  # the next one may come through
                    LOGGER.exception("the status could not be published", extra={"fields": {"event": "fault"}})

        thread = threading.Thread(target=repeat, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

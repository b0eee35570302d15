"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds after which a test that would hang fails; no test proves anything by them


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, however busy the machine is."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.0001)

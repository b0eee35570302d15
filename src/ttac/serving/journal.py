"""The journal: what happened to a served model, one JSON object a line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("ttac.serving")
LIMIT = 4 * 2**20  # bytes of a file, before the next one is begun
LONGEST_MESSAGE = 2000  # characters
SERIOUS = frozenset({"guard", "rollback", "reset", "fault", "exit", "restart"})


def to_json(value: Any) -> str:
    """Write plain values as JSON that every browser reads: numbers that are not finite become null.

    >>> to_json({"distance": float("nan"), "limits": (1.5, float("inf"))})
    '{"distance": null, "limits": [1.5, null]}'
    """
    return json.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Journal:
    """Appends events to a file, for several processes at once; what cannot be written is logged and forgotten.

    A line is one write, so a process that is killed leaves at most one torn line, which readers skip. A file that has
    grown to `limit` bytes is kept as `events.1.jsonl`, in the place of the one before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder) / "events.jsonl")
    ...     journal.note("publish", "version 3", version=3)
    ...     journal.tail(1)[0]["version"]
    3
    """

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path = path
        self.older = path.with_name(f"{path.stem}.1{path.suffix}")
        self._limit = limit
        self.faults = Faults(self)

    def note(self, event: str, message: str, **fields: Any) -> None:
        """Append an event, and log it; `fields` are plain values."""
        message = message[:LONGEST_MESSAGE]
        level = logging.WARNING if event in SERIOUS else logging.INFO
        LOGGER.log(level, "%s", message, extra={"fields": {"event": event, **fields}})
        try:
            entry = {"time": time.time(), "event": event, "message": message, **fields}
            self._append(to_json(entry).encode() + b"\n")
        except OSError as error:
            LOGGER.warning("the journal cannot be written: %s", error, extra={"fields": {"event": "fault"}})

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" + line if torn else line)
            if size + len(line) >= self._limit:
                self._rotate(descriptor)
        finally:
            os.close(descriptor)

    def _rotate(self, descriptor: int) -> None:
        """Put the file that is open aside, unless another process does or did."""
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.stat().st_ino == os.fstat(descriptor).st_ino:
                self.path.replace(self.older)

    def tail(self, count: int) -> list[dict[str, Any]]:
        """Give the newest `count` events, oldest first; lines that are not whole are skipped."""
        newest_first: list[dict[str, Any]] = []
        for path in (self.path, self.older):
            lines: list[bytes] = []
            with contextlib.suppress(OSError):
                lines = path.read_bytes().split(b"\n")
            for line in reversed(lines):
                if len(newest_first) >= count:
                    break
                with contextlib.suppress(ValueError, RecursionError):
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        newest_first.append(entry)
        return newest_first[::-1]


class Faults:
    """Journals what goes wrong and is gone on from, each kind at most once a minute.

    So a fault that comes again and again does not push all that was before it out of the journal.
    """

    def __init__(self, journal: Journal, interval: float = 60.0) -> None:
        self._journal = journal
        self._interval = interval
        self._noted: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def note(self, kind: str, message: str, event: str = "fault", **fields: Any) -> None:
        """Journal a fault, or count it where one of its kind was journalled just now."""
        now = time.monotonic()
        if now - self._noted.get(kind, -math.inf) < self._interval:
            self._silent[kind] = self._silent.get(kind, 0) + 1
            return
        self._noted[kind] = now
        self._journal.note(event, message, kind=kind, unsaid=self._silent.pop(kind, 0), **fields)

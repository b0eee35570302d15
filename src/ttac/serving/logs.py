"""Logs of one JSON object a line, as collectors of logs expect them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone


class JsonFormatter(logging.Formatter):
    """Writes time, level, process and message, and what the record has in `fields`.

    >>> record = logging.LogRecord("ttac.serving", logging.INFO, "", 0, "published", None, None)
    >>> record.fields = {"version": 3}
    >>> json.loads(JsonFormatter("adapter").format(record))["version"]
    3
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Make the line."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            **getattr(record, "fields", {}),
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_logs(process: str) -> None:
    """Send the logs of this process, which has that name, to the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    for name in ("ttac.serving", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").handlers = [handler]

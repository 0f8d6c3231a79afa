"""How a record looks: one JSON object a line for machines, one line for people."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

BASE = "log"
"""The event of a record that names none, as those of libraries."""


class JsonFormatter(logging.Formatter):
    """A JSON object a line: ``ts`` (UTC), ``level``, ``event``, ``logger``, ``message``, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "ts": timestamp(record),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", BASE),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; a traceback follows on lines of its own.

    What others chose (names of engines and models) cannot forge lines: it is shown escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line or lines, without the end."""
        message = record.getMessage()
        if not message.isprintable():
            message = message.encode("unicode_escape").decode()
        line = f"{timestamp(record)} {record.levelname} {record.name}: {message}"
        if left_out := getattr(record, "left_out", 0):
            line += f" ({left_out} more of these were left out)"
        if stack := getattr(record, "fields", {}).get("stack"):
            line += f"\n{stack}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


def timestamp(record: logging.LogRecord) -> str:
    """Return a record's time in UTC, with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"

"""Where log lines go: a bounded queue and a thread, so that a log that nobody reads never holds up a turn."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any, TextIO

from kvtierd.logs.events import event
from kvtierd.logs.formats import JsonFormatter, TextFormatter
from kvtierd.logs.limiter import Limiter

QUEUE_LINES = 10_000
CLOSE_SECONDS = 2.0
LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger(__name__)


class _Output(logging.Handler):
    """Formats in the caller's thread, writes in one of its own; drops when the queue is full."""

    def __init__(self, stream: TextIO, lines: int) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(lines)
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1
        except Exception:  # what logging asks of a handler: a bad record must not hurt who logs
            self.handleError(record)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads any more
                self.dropped += 1

    def close(self) -> None:
        """Write what is queued, unless that takes too long."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                return
            self._thread.join(CLOSE_SECONDS)
        super().close()


class Logs:
    """The process's log; one at a time. ``style``: ``json``, ``text`` or ``auto`` (text for a terminal)."""

    def __init__(self, stream: TextIO, level: str, style: str, *, lines: int = QUEUE_LINES) -> None:
        self.limiter = Limiter()
        self._output = _Output(stream, lines)
        self.choose_style(style, stream)
        self._output.addFilter(self.limiter)
        self._root = logging.getLogger()
        self._root.addHandler(self._output)
        self._root.setLevel(level.upper())

    def choose_style(self, style: str, stream: TextIO) -> None:
        """Choose how lines look."""
        text = style == "text" or (style == "auto" and stream.isatty())
        self._output.setFormatter(TextFormatter() if text else JsonFormatter())

    def close(self) -> None:
        """Write what is queued and log no more."""
        self.limiter.tell()
        self._root.removeHandler(self._output)
        self._output.close()

    def statistics(self) -> dict[str, Any]:
        """Return plain values: records at warning or worse by level, those left out, and lines dropped."""
        return {
            "level": level(),
            "records": {name: self.limiter.counts[name] for name in ("warning", "error", "critical")},
            "left_out": self.limiter.left_out,
            "dropped": self._output.dropped,
        }


def level() -> str:
    """Return the level in force."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_level(name: str) -> str:
    """Change the level of the whole process at run time; return the one before.

    Raises:
        ValueError: it is none of :data:`LEVELS`.
    """
    if name not in LEVELS:
        raise ValueError(f"{name!r} is no level; there are {', '.join(LEVELS)}")
    before = level()
    logging.getLogger().setLevel(name.upper())
    log.warning(
        "the log's level is %s now, it was %s",
        name,
        before,
        extra=event("log_level", now=name, before=before),
    )
    return before

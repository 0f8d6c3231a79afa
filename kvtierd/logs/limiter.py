"""A fault that repeats is logged a few times and then counted: a broken disk must not fill another one."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvtierd.logs.events import event

BURST = 5
PERIOD = 30.0
"""Seconds in which at most ``BURST`` records of one kind are written."""
MAX_KINDS = 1024
LIMITED_ELSEWHERE = frozenset({"connection_closed", "connection_refused", "lines_left_out"})
"""What strangers do is bounded by the socket that they do it to; what tells of repeats is no repeat."""
WHOSE = ("tier", "audience", "engine")
"""Fields that make two faults of one event different."""

Kind = tuple[str, str, str]


@dataclass(slots=True)
class _Seen:
    since: float
    written: int = 0
    left_out: int = 0


class Limiter(logging.Filter):
    """Lets at most ``BURST`` warnings or worse of one kind through in ``PERIOD`` seconds.

    A kind is an event of one level and of one tier, audience or engine. How many were left out is told with
    the next one, or by :meth:`tell` when there is none. ``critical`` is never left out, nor is anything below
    a warning. ``counts``: warnings and worse by level.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[Kind, _Seen] = {}
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is written; it learns how many before it were not."""
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            self.counts[record.levelname.lower()] += 1
            if record.levelno >= logging.CRITICAL or getattr(record, "event", "") in LIMITED_ELSEWHERE:
                return True
            seen = self._look_up(_kind(record))
            if seen.written >= BURST:
                seen.left_out += 1
                self.left_out += 1
                return False
            seen.written += 1
            record.left_out, seen.left_out = seen.left_out, 0
            return True

    def tell(self) -> None:
        """Log what was left out of kinds whose period is over; to be called now and then."""
        now = self._clock()
        with self._lock:
            over = {kind: seen for kind, seen in self._seen.items() if now - seen.since >= PERIOD}
            for kind in over:
                del self._seen[kind]
        for (name, level, whose), seen in over.items():
            if seen.left_out:
                logging.getLogger(__name__).warning(
                    "%s%s: %d more of these were left out",
                    name,
                    f" ({whose})" if whose else "",
                    seen.left_out,
                    extra=event("lines_left_out", of=name, of_level=level, whose=whose, count=seen.left_out),
                )

    def _look_up(self, kind: Kind) -> _Seen:
        now = self._clock()
        seen = self._seen.get(kind)
        if seen is None:
            while len(self._seen) >= MAX_KINDS:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[kind] = _Seen(now)
        elif now - seen.since >= PERIOD:
            seen.since, seen.written = now, 0
        return seen


def _kind(record: logging.LogRecord) -> Kind:
    fields = getattr(record, "fields", {})
    whose = next((str(fields[name]) for name in WHOSE if name in fields), "")
    return getattr(record, "event", None) or str(record.msg), record.levelname.lower(), whose

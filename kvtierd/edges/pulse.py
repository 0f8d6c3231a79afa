"""How the daemon beats: what its turns took, when the last one ended, and how late the loop's timers come."""

from __future__ import annotations

import time

from kvtierd.edges.histogram import Histogram


class Pulse:
    """Figures of the event loop, owned by its thread. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.started = self.turned_at = time.monotonic()
        self.turns = Histogram()
        self.lag = Histogram()
        self._due: float | None = None

    @property
    def turn_age(self) -> float:
        """Seconds since the last turn ended, or since the start."""
        return time.monotonic() - self.turned_at

    def turned(self, began: float) -> None:
        """Note a turn that began then and ends now."""
        self.turned_at = time.monotonic()
        self.turns.note(self.turned_at - began)

    def ticked(self, period: float) -> None:
        """Note a tick of a timer that is to come again after ``period`` seconds."""
        now = time.monotonic()
        if self._due is not None:
            self.lag.note(now - self._due)
        self._due = now + period

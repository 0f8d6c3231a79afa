"""How long a tier's reads take, so that a hit which costs more than its bound can be declined as a miss."""

from __future__ import annotations

import math
from dataclasses import dataclass

KEPT = 0.7
"""What earlier reads weigh after one more."""
DECLINED_SECONDS = 10.0
"""A tier that was not read for this long may have become faster: one block is tried."""


@dataclass(slots=True)
class ReadPace:
    """The bytes per second that a tier gave lately, all its readers together, as those who wait see it.

    ``bound``: how many seconds a hit may take (``None``: any number). ``reading``: bytes asked for and not
    there yet.
    """

    bound: float | None = None
    reading: int = 0
    _bytes: float = 0.0
    _seconds: float = 0.0
    _since: float = 0.0
    """When the last read ended, or the first began after a pause."""
    _trying: bool = False

    @property
    def rate(self) -> float:
        """Bytes per second; 0 while unknown."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def room(self, now: float) -> float:
        """Return how many more bytes would come within the bound."""
        if self.bound is None:
            return math.inf
        if self._bytes and not self.reading and now - self._since > DECLINED_SECONDS:
            self._bytes = self._seconds = 0.0
            self._trying = True
        if self._seconds <= 0:
            return 0.0 if self._trying and self.reading else math.inf
        return self.bound * self.rate - self.reading

    def started(self, size: int, now: float) -> None:
        """Note that a block is asked for."""
        if not self.reading:
            self._since = now
        self.reading += size

    def ended(self, asked: int, came: int, now: float) -> None:
        """Note that a read of ``asked`` bytes ended, and ``came`` of them are there."""
        self.reading -= asked
        if came:
            self._trying = False
            self._bytes = KEPT * self._bytes + came
            self._seconds = KEPT * self._seconds + max(0.0, now - self._since)
            self._since = now

"""Durations counted in buckets: cheap to note, read only when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Upper bounds of the buckets; one more takes the rest."""


class Histogram:
    """How many values fell into each bucket, and their sum; owned by one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def note(self, value: float) -> None:
        """Count one value; a negative one (a clock that was set back) counts as 0."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (upper bound as text, values up to it) for each bucket, the last one's bound ``+Inf``."""
        total = 0
        rows = []
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows

"""The last minutes of a few counters, sampled now and then: enough for a small chart and for advice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

PERIOD = 5.0
SAMPLES = 121
"""Ten minutes."""

Sample = Callable[[], Mapping[str, float]]


class History:
    """Keeps the latest samples; :meth:`tick` asks ``sample`` every ``PERIOD`` seconds.

    Times are of the caller's clock.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._rows: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=SAMPLES)

    def tick(self, now: float) -> None:
        """Take a sample if one is due."""
        if not self._rows or now - self._rows[-1][0] >= PERIOD:
            self._rows.append((now, self._sample()))

    def grown(self) -> dict[str, float]:
        """Return by how much each figure has grown since the oldest sample."""
        if not self._rows:
            return {}
        first, latest = self._rows[0][1], self._sample()
        return {name: value - first.get(name, 0.0) for name, value in latest.items()}

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return the growth between samples, oldest first; ``age``: seconds since the later one was taken."""
        rows = list(self._rows)
        return [
            {
                "age": now - later[0],
                "seconds": later[0] - earlier[0],
                "grown": {name: value - earlier[1].get(name, 0.0) for name, value in later[1].items()},
            }
            for earlier, later in pairwise(rows)
        ]

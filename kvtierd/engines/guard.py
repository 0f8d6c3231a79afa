"""The rule of the glue: trouble with the daemon is counted and logged, never raised into the engine."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LOG_EVERY = 10.0


class Guard:
    """Runs calls on a client session and turns their exceptions into an answer that means "not there".

    ``failures`` counts them per verb; each verb logs at most once in ``LOG_EVERY`` seconds, so that a broken
    daemon cannot flood the engine's log.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[str] = Counter()
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, float] = {}

    def call(self, verb: str, do: Callable[[], T], otherwise: T) -> T:
        """Return ``do()``, or ``otherwise`` when it raised."""
        try:
            return do()
        except Exception as error:  # a cache must not take the engine down, whatever is wrong with it
            self.report(verb, error)
            return otherwise

    def report(self, verb: str, error: object) -> None:
        """Count one failure of ``verb`` and log it unless that verb was logged just now."""
        self.failures[verb] += 1
        now = self._clock()
        if now - self._logged.get(verb, -LOG_EVERY) >= LOG_EVERY:
            self._logged[verb] = now
            self._logger.warning("kvtierd: %s failed (%d so far): %s", verb, self.failures[verb], error)

"""Tries of one request: capped exponential backoff with jitter, all within the deadline of a call.

obstore would retry by itself, but neither ends at a call's deadline nor stops when the tier is closed; it is
told to try once. A try can take the request's timeout, so none begins later than that before the deadline.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvtierd.edges.backends.object_errors import Fault, Meaning, StoreFailed, explain
from kvtierd.errors import KvtierdError

T = TypeVar("T")

FIRST_BACKOFF = 0.1
MAX_BACKOFF = 2.0
LEAST_SPARE = 0.05
LATE = Fault(Meaning.UNKNOWN, "no time left before the tier's deadline")
CLOSING = Fault(Meaning.UNKNOWN, "closing")


def backoff(attempt: int, uniform: Callable[[float, float], float]) -> float:
    """Return the seconds to wait after try number ``attempt`` (from 0): half fixed, half drawn by chance."""
    ceiling = min(MAX_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempt, 16))
    return ceiling / 2 + uniform(0.0, ceiling / 2)


@dataclass(slots=True)
class Budget:
    """One call's time: no try begins after ``last_start`` on the clock, so the call ends by its deadline.

    ``fault`` is what used the time up, for the blocks that then get none.
    """

    last_start: float
    fault: Fault = LATE


class Patience:
    """Decides when a failed request is tried again; shared by all threads of a tier.

    ``count`` is called with the name of what happened. Times are seconds.
    """

    def __init__(
        self,
        *,
        deadline: float,
        request_timeout: float,
        retries: int,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
        closing: threading.Event | None = None,
    ) -> None:
        self._spare = max(LEAST_SPARE, deadline - request_timeout)
        self._retries = retries
        self._count = count
        self._clock = clock
        self._uniform = uniform
        self._closing = closing or threading.Event()

    def begin(self) -> Budget:
        """Start the time of one call; its first try may always be made at once."""
        return Budget(self._clock() + self._spare)

    def stop(self) -> None:
        """Make no more tries, and end all waits for one."""
        self._closing.set()

    def request(self, call: Callable[[], T], budget: Budget) -> T:
        """Return ``call()``, tried again while that can help.

        Raises:
            StoreFailed: the last try's fault.
            KvtierdError: what ``call`` itself found wrong with an answer.
        """
        attempt = 0
        if self._clock() > budget.last_start:
            raise StoreFailed(budget.fault)
        while True:
            if self._closing.is_set():
                raise StoreFailed(CLOSING)
            try:
                self._count("requests")
                return call()
            except KvtierdError:
                raise
            except Exception as error:  # obstore's classes have no common root of the standard library
                fault = explain(error)
            delay = backoff(attempt, self._uniform)
            late = self._clock() + delay > budget.last_start
            if not fault.transient or attempt >= self._retries or late:
                if fault.transient:
                    budget.fault = fault
                    self._count("gave_up")
                raise StoreFailed(fault)
            self._count("retries")
            attempt += 1
            if self._closing.wait(delay):
                raise StoreFailed(CLOSING)

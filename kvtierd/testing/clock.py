"""Time for tests: a clock that only moves when told, and waiting for a condition with a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ManualClock:
    """A monotonic clock in seconds that stands still until told to move."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """Return the time, as :func:`time.monotonic` does."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time.

        Raises:
            ValueError: ``seconds`` is negative; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
        return self._now


def wait_for(condition: Callable[[], T], what: str, *, timeout: float = 10.0, poll: float = 0.02) -> T:
    """Call ``condition`` until its value is true and return that value.

    ``condition`` is called at once, then every ``poll`` seconds, and one last time at the deadline.

    Raises:
        TimeoutError: it never was; names ``what`` and the last value seen.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        late = time.monotonic() >= deadline
        value = condition()
        if value:
            return value
        if late:
            raise TimeoutError(f"waited {timeout:g} s for {what}; last seen: {value!r}")
        pause.wait(poll)


async def until(condition: Callable[[], T], what: str = "a condition", *, timeout: float = 10.0) -> T:  # noqa: ASYNC109
    """Be :func:`wait_for` in an event loop: others run between two looks, soon at first, then every 2 ms.

    Raises:
        TimeoutError: it never was true; names ``what`` and the last value seen.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + timeout, 0.0
    while True:
        late = loop.time() >= deadline
        value = condition()
        if value:
            return value
        if late:
            raise TimeoutError(f"waited {timeout:g} s for {what}; last seen: {value!r}")
        await asyncio.sleep(pause)
        pause = min(0.002, pause + 0.0002)

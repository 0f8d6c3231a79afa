"""Knows within a second when something hangs: the event loop, a tier's threads, the stream.

What hangs beside the loop is found by asking (:meth:`Watch.report`). A loop that hangs cannot be asked, so a
thread looks at the time of its last beat; while it does not beat, the thread answers the probes in its place
(:mod:`kvtierd.edges.stand_in`). Code that also keeps the interpreter's lock stops that thread too: then a
probe runs into its time limit, which says the same.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from kvtierd.edges.stand_in import StandIn
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.1
"""The loop beats this often."""
HANGS_AFTER = 1.0
"""Seconds without progress after which something is said to hang."""
DEAD_AFTER = 10.0
"""Seconds without a beat after which a restart is the better choice: ``/livez`` fails."""
LOOK_SECONDS = 0.25
STACK_EVERY = 60.0
STACK_LINES = 12

Ages = Callable[[], Mapping[str, float]]


class Watch:
    """One daemon's watch. ``ages`` tells, in the loop's thread, what is under way and since how many seconds.

    All but :meth:`start` and :meth:`stop` is cheap. ``clock`` is in seconds and never falls.
    """

    def __init__(self, ages: Ages, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ages = ages
        self._clock = clock
        self._beat_at = clock()
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._stand_in: StandIn | None = None
        self._stalls = 0
        self._longest = 0.0
        self._last = ""
        self._stack_at: float | None = None

    def start(self, listener: int | None = None) -> None:
        """Begin to look at the loop, in whose thread this is called; ``listener``: the probes' socket."""
        self._loop_thread = threading.get_ident()
        self._stand_in = None if listener is None else StandIn(listener, self._answer)
        self.beat()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; the thread ends by itself."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(2 * LOOK_SECONDS)

    def beat(self) -> None:
        """The loop went round."""
        self._beat_at = self._clock()

    @property
    def loop_age(self) -> float:
        """Seconds since the loop's last beat."""
        return self._clock() - self._beat_at

    def hanging(self) -> dict[str, float]:
        """Return what has made no progress for longer than ``HANGS_AFTER`` seconds, and for how long."""
        return {name: age for name, age in self._ages().items() if age > HANGS_AFTER}

    def report(self) -> dict[str, Any]:
        """Return plain values for the status."""
        return {
            "loop_stalls": self._stalls,
            "loop_longest_stall_seconds": self._longest,
            "loop_last_stall": self._last,
        }

    # -- in the thread ------------------------------------------------------------------------------

    def _look_on(self) -> None:
        looked = self._clock()
        while not self._stopped.wait(LOOK_SECONDS):
            late, looked = self._clock() - looked - LOOK_SECONDS, self._clock()
            if late < HANGS_AFTER and self.loop_age > HANGS_AFTER:  # else all of us were paused
                self._see_through()
                looked = self._clock()
        if self._stand_in is not None:
            self._stand_in.close()

    def _see_through(self) -> None:
        """The loop hangs: say so, and answer in its place until it goes on."""
        beat = self._beat_at
        self._stalls += 1
        log.warning(
            "the loop has not gone round for %.1f s",
            self.loop_age,
            extra=event("loop_stalled", seconds=self.loop_age, stack=self._where()),
        )
        while self._beat_at == beat and not self._stopped.is_set():
            self._longest = max(self._longest, self.loop_age)
            if self._stand_in is not None:
                self._stand_in.serve(LOOK_SECONDS)
            else:
                self._stopped.wait(LOOK_SECONDS)
        length = self._beat_at - beat
        self._longest = max(self._longest, length)
        self._last = f"{length:.1f} s"
        log.warning("the loop goes on after %.1f s", length, extra=event("loop_goes_on", seconds=length))

    def _where(self) -> str:
        """Return where the loop's thread is, now and then."""
        now = self._clock()
        if self._stack_at is not None and now - self._stack_at < STACK_EVERY:
            return ""
        self._stack_at = now
        frame = sys._current_frames().get(self._loop_thread)
        lines = traceback.format_stack(frame)[-STACK_LINES:] if frame is not None else []
        return "".join(lines).rstrip()

    def _answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Answer a probe while the loop hangs."""
        age = self.loop_age
        health = {"state": "stalled", "loop_age_seconds": age}
        return (200 if path == "/livez" and age < DEAD_AFTER else 503), health

"""Makes the storage of the secondaries usable, each in a thread of its own, however long that takes.

A start waits for a moment only: a tier whose mount hangs or cannot be used is *degraded* or *stalled*, tried
again and again, and read when it could be opened. Only what waiting does not mend (:class:`TierRefused`) ends
a start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

from kvtierd.edges import aside
from kvtierd.edges.backends.base import Backend
from kvtierd.errors import TierError, TierRefused, TierTaken
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

PATIENCE = 0.5
"""Seconds that a start waits for storage that says nothing; engines are served without it then."""
TAKEN_PATIENCE = 2.0
"""Seconds for another daemon to end, or to get its own start done."""
TAKEN_RETRY = 0.02
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
CLOSE_SECONDS = 1.0

Changed = Callable[[str, bool], None]
"""Told why the tier cannot be used (empty: it can), and whether that is because a call does not return."""


class Opening:
    """One tier's way to usable storage. All but :meth:`_work` is for the loop's thread.

    ``look`` says whether there was an earlier run; it is called before anything is made. ``deadline``: an
    attempt that takes longer is called stalled.
    """

    def __init__(
        self,
        tier: str,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        look: Callable[[], bool],
        deadline: float,
        *,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.tier = tier
        self.backend = backend
        self.opened = False
        self.refused: TierRefused | None = None
        self.reason = ""
        self.stalled = False
        self.settled = asyncio.Event()
        """Set when the first attempt ended, but for one that found a daemon that may be ending."""
        self.may_hold_blocks = True
        """Whether there may have been an earlier run; true until the storage was seen."""
        self.contended = False
        """Whether another daemon is waited for."""
        self._loop, self._look, self._deadline = loop, look, deadline
        self._pause = first_pause
        self._changed: Changed | None = None
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._began = time.monotonic()

    def start(self) -> None:
        """Begin to try."""
        self._watch()
        threading.Thread(target=self._work, name=f"{self.tier}-open", daemon=True).start()

    async def wait(self) -> None:
        """Wait until it is usable or says why not, but not for long if it says nothing."""
        for seconds in (PATIENCE, TAKEN_PATIENCE + PATIENCE):
            left = self._began + seconds - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.settled.wait(), max(0.0, left))
            if self.settled.is_set() or not self.contended:
                break
        if not self.settled.is_set():
            self._tell("its storage does not answer", stalled=True)

    def follow(self, changed: Changed) -> None:
        """Tell from now on what becomes of it, the present state first."""
        self._changed = changed
        if self.opened or self.reason:
            changed(self.reason, self.stalled)

    def stop(self) -> None:
        """Try no more; an attempt under way is left alone."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    # -- in the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        held = self._look()
        self._post(lambda: setattr(self, "may_hold_blocks", held))
        while not self._stopped.is_set():
            error = self._attempt()
            if isinstance(error, TierTaken) and time.monotonic() - self._began < TAKEN_PATIENCE:
                self.contended = True
                self._stopped.wait(TAKEN_RETRY)
                continue
            self._post(lambda error=error: self._attempted(error))  # type: ignore[misc]
            if error is None:
                return
            self._stopped.wait(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._post(self._watch)

    def _attempt(self) -> Exception | None:
        try:
            self.backend.open()
        except Exception as error:
            return error
        return None

    def _post(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call)

    # -- in the loop --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Call the attempt stalled if it does not end in time."""
        if not self._stopped.is_set():
            self._timer = self._loop.call_later(self._deadline, self._overdue)

    def _overdue(self) -> None:
        self._tell(f"making its storage usable takes longer than {self._deadline:g} s", stalled=True)

    def _attempted(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.opened = error is None
        self.refused = error if isinstance(error, TierRefused) else None
        self.settled.set()
        if error is None:
            if self.reason:
                log.info("tier %s: can be used now", self.tier, extra=event("storage_usable", tier=self.tier))
            self._tell("", stalled=False)
        else:
            if not isinstance(error, TierError):
                log.error(
                    "tier %s: opening it raised",
                    self.tier,
                    exc_info=error,
                    extra=event("tier_exception", tier=self.tier, kind="open"),
                )
            text = str(error).removeprefix(f"tier {self.tier!r}: ") or type(error).__name__
            self._tell(text, stalled=False)

    def _tell(self, reason: str, *, stalled: bool) -> None:
        if reason and reason != self.reason and not self._stopped.is_set():
            log.warning(
                "tier %s: %s; it is left out and tried again",
                self.tier,
                reason,
                extra=event("storage_unusable", tier=self.tier, reason=reason),
            )
        self.reason, self.stalled = reason, stalled
        if self._changed is not None and not self._stopped.is_set():
            self._changed(reason, stalled)


class Openings:
    """The secondaries of one daemon on their way."""

    def __init__(self, openings: Mapping[str, Opening]) -> None:
        self._openings = dict(openings)

    def start(self) -> None:
        """Begin with all of them at once."""
        for opening in self._openings.values():
            opening.start()

    async def settle(self) -> None:
        """Wait until each is usable or said why not, for a moment only if it says nothing.

        Raises:
            TierRefused: one of them needs somebody to change something.
        """
        await asyncio.gather(*(opening.wait() for opening in self._openings.values()))
        for opening in self._openings.values():
            if opening.refused is not None:
                raise opening.refused

    @property
    def fresh(self) -> bool:
        """Whether it is known that no tier was there in an earlier run."""
        return not any(opening.may_hold_blocks for opening in self._openings.values())

    def is_open(self, tier: str) -> bool:
        """Whether a tier's storage can be used."""
        return self._openings[tier].opened

    def follow(self, changed: Callable[[str, str, bool], None]) -> None:
        """Tell of each tier what becomes of it: its name, then as :data:`Changed`."""
        for name, opening in self._openings.items():
            opening.follow(lambda reason, stalled, name=name: changed(name, reason, stalled))  # type: ignore[misc]

    def stop(self) -> None:
        """Try no more."""
        for opening in self._openings.values():
            opening.stop()

    def close(self) -> None:
        """Give the storage up that is open, within :data:`CLOSE_SECONDS`."""
        self.stop()
        opened = [opening.backend.close for opening in self._openings.values() if opening.opened]
        if opened and not aside.within(CLOSE_SECONDS, list(opened)):
            log.warning(
                "storage did not close within %g s; it is left as it is",
                CLOSE_SECONDS,
                extra=event("storage_not_closed"),
            )

"""Reads a tier's content at start, in a thread, at the pace at which the loop takes it in.

A scan that the storage breaks off is made again: what it did not see must not be taken for lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvtierd.core.stimuli import Found, FoundBlock
from kvtierd.edges.backends.base import Backend, Owned
from kvtierd.errors import TierError
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

SCAN_LOOK_AHEAD = 4
SCAN_POLL = 0.5
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


class Scan:
    """One scan in a thread; everything but :meth:`_work` and :meth:`_hand_over` is the loop thread's."""

    def __init__(
        self,
        tier: str,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        found: Callable[[Found], None],
        finished: Callable[[], None],
        ended: Callable[[], None],
        trouble: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.running = True
        self._tier, self._backend, self._loop = tier, backend, loop
        self._found, self._finished, self._ended = found, finished, ended
        self._trouble = trouble
        self._blocks = 0
        self._error = ""
        self._stopped = threading.Event()
        self._room = threading.Semaphore(SCAN_LOOK_AHEAD)
        threading.Thread(target=self._work, name=f"{tier}-scan", daemon=True).start()

    def stop(self) -> None:
        """Let the scan break off at its next batch."""
        self._stopped.set()

    def statistics(self) -> dict[str, Any]:
        """Return plain values; ``error`` is empty when the scan went well so far."""
        return {"running": self.running, "blocks": self._blocks, "error": self._error}

    def _work(self) -> None:
        pause, error = FIRST_PAUSE, self._run()
        while isinstance(error, TierError) and not self._stopped.is_set():
            self._post(self._break_off, str(error).removeprefix(f"tier {self._tier!r}: "))
            self._stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            error = self._run()
        self._post(self._end, error)

    def _run(self) -> BaseException | None:
        try:
            tenants = self._backend.tenants() if isinstance(self._backend, Owned) else {}
            if tenants and not self._hand_over([], tenants):
                return None
            for batch in self._backend.scan():
                if not self._hand_over(batch):
                    break
        except BaseException as error:
            return error
        return None

    def _post(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *args)

    def _hand_over(self, batch: list[FoundBlock], tenants: Mapping[str, str | None] | None = None) -> bool:
        while not self._room.acquire(timeout=SCAN_POLL):
            if self._stopped.is_set():
                return False
        if self._stopped.is_set():
            return False
        try:
            self._loop.call_soon_threadsafe(self._take, batch, tenants or {})
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _take(self, batch: list[FoundBlock], tenants: Mapping[str, str | None]) -> None:
        self._room.release()
        self._blocks += len(batch)
        self._found(Found(self._tier, batch, tenants=tenants))

    def _break_off(self, reason: str) -> None:
        if reason != self._error:
            log.warning(
                "tier %s: the scan broke off and will be made again: %s",
                self._tier,
                reason,
                extra=event("scan_broke_off", tier=self._tier, reason=reason),
            )
        self._error = reason
        self._trouble(reason)

    def _end(self, error: BaseException | None) -> None:
        self.running = False
        if error is None:
            if self._error:
                self._trouble("")
            self._error = ""
        elif isinstance(error, TierError):
            self._error = str(error)
        else:
            self._error = f"{type(error).__name__}: {error}"
            log.error(
                "tier %s: the scan broke off",
                self._tier,
                exc_info=error,
                extra=event("scan_broke_off", tier=self._tier),
            )
        self._ended()
        self._finished()

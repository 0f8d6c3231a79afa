"""Leaves readable records of namespaces in a tier's storage: best effort, one at a time, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from kvtierd.core.model import Layout
from kvtierd.edges.backends.base import Backend
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

QUEUE = 64
RECORDS = 1024
"""Namespaces described in a daemon's life: an engine that attaches with ever new ones fills no disk."""


class Describer:
    """At most ``QUEUE`` records wait, more are dropped. Its daemon thread lives while there is work.

    ``left_out``: how often a namespace beyond :data:`RECORDS` was not described; its blocks need no record.

    ``ended`` is called in the loop's thread when nothing is left to be written.
    """

    def __init__(
        self, tier: str, backend: Backend, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]
    ) -> None:
        self._tier, self._backend, self._loop, self._ended = tier, backend, loop, ended
        self._waiting: deque[tuple[str, Layout]] = deque()
        self._lock = threading.Lock()
        self._described: set[str] = set()
        self.left_out = 0
        self.busy = False

    def describe(self, namespace: str, layout: Layout) -> None:
        """Have a namespace described."""
        if namespace not in self._described:
            if len(self._described) >= RECORDS:
                self.left_out += 1
                return
            self._described.add(namespace)
        with self._lock:
            if len(self._waiting) < QUEUE:
                self._waiting.append((namespace, layout))
            if self.busy:
                return
            self.busy = True
        threading.Thread(target=self._work, name=f"{self._tier}-describe", daemon=True).start()

    def discard(self) -> None:
        """Forget what waits."""
        with self._lock:
            self._waiting.clear()

    def _next(self) -> tuple[str, Layout] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self.busy = False
            return None

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._backend.describe(*item)
            except Exception as error:  # backends may not; a record is not worth a crash
                log.warning(
                    "tier %s: a namespace could not be described: %r",
                    self._tier,
                    error,
                    extra=event("namespace_not_described", tier=self._tier),
                )
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended)

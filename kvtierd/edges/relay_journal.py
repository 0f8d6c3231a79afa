"""The file of one relay's records in ``state_dir``.

It is appended to before anything is told, and rewritten as it grows. No fsync: what the kernel has survives
any end of the process, and with the machine the engine ends too. A file that cannot be written is removed,
for one with holes would be worse than none; ``degraded`` says why, and a whole one is tried for every few
seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtierd.logs.events import event
from kvtierd.wire.kvevents import BlockStored
from kvtierd.wire.relay import Resident
from kvtierd.wire.relay_records import keep

log = logging.getLogger(__name__)

SLACK = 16 << 20
"""Bytes beyond three times those of the last rewrite before the next one."""
RETRY = 5.0
"""Seconds."""


class RelayJournal:
    """One file. ``background(work, done)`` runs ``work`` elsewhere, then ``done`` here."""

    def __init__(
        self, path: Path, background: Callable[[Callable[[], bytes], Callable[[bytes], None]], object]
    ) -> None:
        self._path = path
        self._background = background
        self._descriptor: int | None = None
        self._bytes = self._base = 0
        self._since: list[bytes] | None = None  # what was appended while a rewrite is under way
        self._rewrite = 0  # which one; an earlier one's result is too old
        self._retry_at = 0.0
        self.degraded: str | None = None

    def load(self) -> bytes:
        """Return what an earlier run left, and open the file for more."""
        data = b""
        try:
            with contextlib.suppress(FileNotFoundError):
                data = self._path.read_bytes()
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640
            )
            self._bytes = len(data)
        except OSError as error:
            self._degrade(error)
        return data

    def cut(self, length: int) -> None:
        """Take off a torn end."""
        if self._descriptor is not None and length != self._bytes:
            os.truncate(self._path, length)
            self._bytes = length

    def append(self, data: bytes) -> None:
        """Hand records to the kernel."""
        if self._since is not None:
            self._since.append(data)
        if self._descriptor is None:
            return
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError("a record was not written whole")
        except OSError as error:
            self._degrade(error)
            return
        self._bytes += len(data)

    def renew(
        self, known: Mapping[Resident, tuple[BlockStored, int]], place: tuple[int, bytes] | None, at: float
    ) -> None:
        """Write it anew in the background once it is mostly old, or it is time to try again.

        ``at``: seconds since the epoch, those of the last record.
        """
        mostly_old = self._descriptor is not None and self._bytes >= 3 * self._base + SLACK
        overdue = self.degraded is not None and not 0 <= self._retry_at - at <= RETRY
        if self._since is not None or not (mostly_old or overdue):
            return
        self._since = []
        self._rewrite += 1
        items = list(known.items())
        self._background(
            lambda: b"".join(keep(items, place, at)), functools.partial(self._replace, self._rewrite)
        )

    def clear(self) -> None:
        """Forget everything: all was taken back, in order."""
        self.cut(0)

    def close(self) -> None:
        """Close the descriptor; a rewrite under way comes too late."""
        self._since = None
        self._rewrite += 1
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, rewrite: int, data: bytes) -> None:
        if rewrite != self._rewrite:
            return
        since, self._since = self._since or [], None
        whole = b"".join((data, *since))
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_bytes(whole)
            os.replace(new, self._path)
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._degrade(error)
            return
        self._bytes, self._base = len(whole), len(data)
        if self.degraded is not None:
            self.degraded = None
            log.info(
                "relay: %s is whole again", self._path, extra=event("relay_restored", path=str(self._path))
            )

    def _degrade(self, error: OSError) -> None:
        if self.degraded is None:
            log.warning(
                "relay: %s: %s; after a crash now, readers keep what the engine had until it is told anew",
                self._path,
                error.strerror or error,
                extra=event("relay_degraded", path=str(self._path)),
            )
        self.degraded = f"{self._path}: {error.strerror or error}"
        self._retry_at = time.time() + RETRY
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

"""The file of one relay's records in ``state_dir``.

It is appended to before anything is told, and rewritten as it grows. No fsync: what the kernel has survives
any end of the process, and with the machine the engine ends too. A file that cannot be written is removed,
for one with holes would be worse than none; ``degraded`` says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtierd.wire.kvevents import BlockStored
from kvtierd.wire.relay import Resident
from kvtierd.wire.relay_records import keep

log = logging.getLogger(__name__)

SLACK = 16 << 20
"""Bytes beyond three times those of the last rewrite before the next one."""


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
        if self._descriptor is None:
            return
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError("a record was not written whole")
        except OSError as error:
            self._degrade(error)
            return
        self._bytes += len(data)
        if self._since is not None:
            self._since.append(data)

    def renew(
        self, known: Mapping[Resident, tuple[BlockStored, int]], place: tuple[int, bytes] | None, at: float
    ) -> None:
        """Write it anew in the background once it is mostly old."""
        if self._descriptor is None or self._since is not None or self._bytes < 3 * self._base + SLACK:
            return
        self._since = []
        items = list(known.items())
        self._background(lambda: b"".join(keep(items, place, at)), self._replace)

    def clear(self) -> None:
        """Forget everything: all was taken back, in order."""
        self.cut(0)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, data: bytes) -> None:
        since, self._since = self._since or [], None
        if self._descriptor is None:
            return
        whole = b"".join((data, *since))
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_bytes(whole)
            os.replace(new, self._path)
            os.close(self._descriptor)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._degrade(error)
            return
        self._bytes, self._base = len(whole), len(data)

    def _degrade(self, error: OSError) -> None:
        self.degraded = f"{self._path}: {error.strerror or error}"
        log.warning(
            "relay: %s; after a crash now, readers keep what the engine had until it is told anew",
            self.degraded,
        )
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

"""Batch numbers that only rise, across restarts and crashes: reserved in blocks in a small file.

A reader takes a number that went back for a stale message and drops it without a word. So a block of
numbers is on disk as used before the first of them is sent; after a crash the rest of the block is skipped,
after an orderly close the numbers go on without a hole.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from kvtierd.wire.stream import MAX_SEQUENCE

logger = logging.getLogger(__name__)


class SequenceStore:
    """The numbers of one audience's stream, kept in ``state_dir`` (``None``: kept nowhere).

    Where they cannot be kept, numbers start from the wall clock in microseconds since the epoch: more than
    any run before can have sent. ``degraded`` then says why. ``wall_clock`` returns seconds since the
    epoch. A crash skips at most ``block`` numbers, and each costs a late reader an empty batch.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str] | None,
        *,
        wall_clock: Callable[[], float],
        name: str = "default",
        block: int = 1 << 13,
    ) -> None:
        self._path = None if state_dir is None else Path(state_dir) / f"sequence-{quote(name, safe='')}"
        self._block = block
        self._lock = threading.Lock()
        self.degraded: str | None = None
        self._next, trusted = self._read()
        if self._path is None:
            self._degrade("there is no state_dir")
        elif trusted:
            trusted = self._reserve(self._next + block)
        if self._path is None or not trusted:
            self._next = max(self._next, int(wall_clock() * 1e6))
            self._reserve(self._next + block)
        self._reserved = self._next + block

    @property
    def low(self) -> bool:
        """Whether half of the reserved block is used: time to call :meth:`extend`, from any thread."""
        return self._reserved - self._next <= self._block // 2

    def next(self) -> int:
        """Return the next number; writes the file only if nobody called :meth:`extend` in time."""
        if self._next >= self._reserved:
            self.extend()
        number = self._next
        if number > MAX_SEQUENCE:
            raise OverflowError("the stream has used up all batch numbers below 2^63")
        self._next += 1
        return number

    def extend(self) -> None:
        """Reserve one block more. Waits for the disk."""
        with self._lock:
            end = self._reserved + self._block
            self._reserve(end)
            self._reserved = end

    def close(self) -> None:
        """Give back what was reserved and not used, so that the next run goes on without a hole."""
        with self._lock:
            self._reserve(self._next)
            self._reserved = self._next

    def _read(self) -> tuple[int, bool]:
        """Return the first free number and whether the file can be believed."""
        try:
            text = self._path.read_text("ascii") if self._path is not None else "0"
            number = int(text)
        except FileNotFoundError:
            return 0, True
        except (OSError, ValueError) as error:
            self._degrade(f"cannot read {self._path}: {error}")
            return 0, False
        if not 0 <= number <= MAX_SEQUENCE:
            self._degrade(f"{self._path} holds {number}, which is no batch number")
            return 0, False
        return number, True

    def _reserve(self, end: int) -> bool:
        """Write that numbers below ``end`` are taken; whole or not at all."""
        if self._path is None:
            return False
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            with open(temporary, "w", encoding="ascii") as file:
                file.write(f"{end}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            self._degrade(f"cannot write {self._path}: {error}")
            return False
        return True

    def _degrade(self, reason: str) -> None:
        if self.degraded is None:
            logger.warning("batch numbers will not survive a restart: %s", reason)
        self.degraded = reason


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

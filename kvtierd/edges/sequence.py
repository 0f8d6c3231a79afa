"""Batch numbers that only rise, across restarts and crashes: reserved in blocks in a small file.

A reader takes a number that went back for a stale message and drops it without a word. So a block of
numbers is on disk as used before the first of them is sent; after the end of the machine the rest of the
block is skipped. After an orderly close, and after the end of the process alone (:mod:`.number_page`), the
numbers go on without a hole: a reader that has all of them need not ask for anything.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from kvtierd.edges.number_page import NumberPage
from kvtierd.logs.events import event
from kvtierd.wire.stream import MAX_SEQUENCE

logger = logging.getLogger(__name__)


class SequenceStore:
    """The numbers of one stream, kept in ``state_dir`` for each of its audiences (``None``: kept nowhere).

    The stream goes on after the highest number that any of ``names`` got, so audiences may come to share
    one stream, or part, from one run to the next.

    Where they cannot be kept, numbers start from the wall clock in microseconds since the epoch: more than
    any run before can have sent. ``degraded`` then says why. So they do where a file is missing, unless
    ``fresh`` says that there was no run before. ``wall_clock`` returns seconds since the
    epoch. The end of the machine skips at most ``block`` numbers.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str] | None,
        *,
        wall_clock: Callable[[], float],
        names: Sequence[str] = ("default",),
        block: int = 1 << 13,
        fresh: bool = True,
    ) -> None:
        folder = None if state_dir is None else Path(state_dir)
        self._names = list(names)
        self._paths = [folder / f"sequence-{quote(name, safe='')}" for name in names] if folder else []
        self._pages = [NumberPage(path.with_name(f"next-{path.name}")) for path in self._paths]
        self._block = block
        self._fresh = fresh
        self._lock = threading.Lock()
        self.degraded: str | None = None
        self._next, trusted = self._read()
        if not self._paths:
            self._degrade("there is no state_dir")
        elif trusted:
            trusted = self._reserve(self._next + block)
        if not self._paths or not trusted:
            self._next = max(self._next, int(wall_clock() * 1e6))
            self._reserve(self._next + block)
        self._reserved = self._next + block
        self._keep()

    @property
    def low(self) -> bool:
        """Whether half of the reserved block is used: time to call :meth:`extend`, from any thread."""
        return self._reserved - self._next <= self._block // 2

    @property
    def upcoming(self) -> int:
        """The number that :meth:`next` will return."""
        return self._next

    def restart(self, first: int) -> None:
        """Go on at ``first``, which may be lower. Waits for the disk."""
        with self._lock:
            self._next = first
            self._reserve(first + self._block)
            self._reserved = first + self._block
            self._keep()

    def next(self) -> int:
        """Return the next number; writes the file only if nobody called :meth:`extend` in time."""
        if self._next >= self._reserved:
            self.extend()
        number = self._next
        if number > MAX_SEQUENCE:
            raise OverflowError("the stream has used up all batch numbers below 2^63")
        self._next += 1
        self._keep()
        return number

    def extend(self) -> None:
        """Reserve one block more. Waits for the disk."""
        with self._lock:
            end = self._reserved + self._block
            self._reserve(end)
            self._reserved = end

    def leave(self, name: str) -> None:
        """Count for an audience no more; when it comes back numbers go on from here. Waits for the disk."""
        with self._lock:
            at = self._names.index(name)
            del self._names[at]
            if self._paths:
                others, self._paths = self._paths, [self._paths[at]]
                self._reserve(self._next)
                self._paths = [path for path in others if path not in self._paths]
                del self._pages[at]

    def close(self) -> None:
        """Give back what was reserved and not used, so that the next run goes on without a hole."""
        with self._lock:
            self._reserve(self._next)
            self._reserved = self._next

    def _read(self) -> tuple[int, bool]:
        """Return the first free number and whether all files can be believed."""
        found = [self._read_one(path, page) for path, page in zip(self._paths, self._pages, strict=True)]
        return max((number for number, _ in found), default=0), all(trusted for _, trusted in found)

    def _keep(self) -> None:
        for page in self._pages:
            page.set(self._next)

    def _read_one(self, path: Path, page: NumberPage) -> tuple[int, bool]:
        try:
            number = int(path.read_text("ascii"))
        except FileNotFoundError:
            return 0, self._fresh
        except (OSError, ValueError) as error:
            self._degrade(f"cannot read {path}: {error}")
            return 0, False
        if not 0 <= number <= MAX_SEQUENCE:
            self._degrade(f"{path} holds {number}, which is no batch number")
            return 0, False
        if page.found is not None and page.found <= number:
            number = page.found  # the process ended before it used up its block
        return number, True

    def _reserve(self, end: int) -> bool:
        """Write that numbers below ``end`` are taken; each file whole or not at all."""
        try:
            for path in self._paths:
                temporary = path.with_name(f"{path.name}.new")
                with open(temporary, "w", encoding="ascii") as file:
                    file.write(f"{end}\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            if self._paths:
                _sync_folder(self._paths[0].parent)
        except OSError as error:
            self._degrade(f"cannot write {path}: {error}")
            return False
        return bool(self._paths)

    def _degrade(self, reason: str) -> None:
        if self.degraded is None:
            logger.warning(
                "batch numbers will not survive a restart: %s; make state_dir writable",
                reason,
                extra=event("sequence_degraded", reason=reason),
            )
        self.degraded = reason


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

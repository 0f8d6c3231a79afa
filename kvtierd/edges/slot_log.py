"""The slot table on disk (SLOTS.md): written before anybody acts on a turn, read after a crash.

Files ``<stem>.slots-<n>`` beside the pool's own file. No fsync: what a write handed to the kernel survives
any end of the process; with the machine the pool ends too. When the newest file holds more than twice as many
entries of blocks as are live, a next one is begun and takes them over little by little, with the turns.

Where it cannot be written its files are removed, since a record with holes is worse than none: ``degraded``
says why, the daemon serves on, and every few seconds a new record is begun. One that does not have all blocks
yet is right, too: a slot that it does not name is free, and what may be under a copy is named at its start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtierd.core.ladder import Ladder
from kvtierd.core.ledger import Change, Counters, Placed, PoolState
from kvtierd.core.model import State
from kvtierd.core.residency import PoolNode
from kvtierd.edges.collector import uncollected
from kvtierd.logs.events import event
from kvtierd.wire.frames import Torn, Unreadable
from kvtierd.wire.slot_records import Header, SlotReader, SlotWriter, header

log = logging.getLogger(__name__)

SLACK = 4096
"""Entries of blocks beyond twice the live ones before a next file is begun."""
KEEP = 64
"""Blocks taken over with a turn, at least, while a next file is being filled."""
KEEP_IDLE = 512
"""Blocks taken over with a turn that changed nothing."""
RETRY = 5.0


def table_paths(stem: Path) -> list[tuple[int, Path]]:
    """Return the generations beside a pool's file, oldest first."""
    name = re.compile(re.escape(stem.name) + r"\.slots-(\d{1,18})")
    try:
        found = ((name.fullmatch(path.name), path) for path in stem.parent.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match is not None)
    except OSError:
        return []


def remove_tables(stem: Path) -> None:
    """Remove all generations: no daemon will believe in what the pool holds."""
    for _, path in table_paths(stem):
        path.unlink(missing_ok=True)


def read_tables(stem: Path) -> tuple[Header, PoolState]:
    """Read what an earlier daemon left beside the pool at ``stem``; cuts a torn end. May take seconds.

    Raises:
        Unreadable: there is nothing that can be believed.
        OSError: it cannot be read, or not cut.
    """
    reader = SlotReader()
    with uncollected():
        return _read(reader, [path for _, path in table_paths(stem)]), reader.state


def _read(reader: SlotReader, paths: Sequence[Path]) -> Header:
    headers: list[Header] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                headers.append(reader.read(file))
        except Torn as torn:
            if path is not paths[-1]:
                raise Unreadable(f"{path.name}: it ends within a record, but is not the last") from torn
            log.info(
                "slot table: %s is cut at byte %d",
                path.name,
                torn.offset,
                extra=event("slot_table_cut", file=path.name, offset=torn.offset),
            )
            if torn.offset:
                os.truncate(path, torn.offset)
                headers.append(reader.header)
            else:
                path.unlink()
        except Unreadable as error:
            raise Unreadable(f"{path.name}: {error}") from error
    if not headers:
        raise Unreadable("there is no slot table")
    if any(other != headers[0] for other in headers):
        raise Unreadable("its files speak of different pools")
    return headers[0]


class SlotLog:
    """The slot table of the running daemon; every start begins a generation of its own.

    ``degraded``: why nothing is recorded.
    """

    def __init__(
        self,
        stem: Path,
        of: Header,
        ladder: Ladder,
        *,
        clock: Callable[[], float] = time.monotonic,
        slack: int = SLACK,
    ) -> None:
        self._stem = stem
        self._header = of
        self._ladder = ladder
        self._clock = clock
        self._slack = slack
        self._writer = SlotWriter()
        self._descriptor: int | None = None
        self._entries = 0
        self._bytes = 0
        self._old: list[Path] = []
        self._todo: Iterator[PoolNode] | None = None
        """Blocks that the current file still has to take over."""
        self._retry_at = 0.0
        self.degraded: str | None = None
        self._counts = dict.fromkeys(("frames", "entries", "kept", "compactions", "failures"), 0)

    def open(self) -> None:
        """Begin; what earlier generations say goes over into a new one."""
        self._ladder.stack.primary.ledger.on = True
        self._try(lambda: self._begin([path for _, path in table_paths(self._stem)]))

    def record(self) -> None:
        """Write down what the turn changed; to be called before anything of it is carried out."""
        counters, changes = self._ladder.take_changes()
        if self._descriptor is None:
            return
        data = b""
        if changes:
            self._counts["frames"] += 1
            self._counts["entries"] += len(changes)
            self._entries += sum(isinstance(change, Placed) for change in changes)
            data = self._writer.changes(counters, changes)
        if self._todo is not None:
            data += self._take_over(counters, max(KEEP, 2 * len(changes)) if changes else KEEP_IDLE)
        if data:
            self._try(lambda: self._append(data))
        self._renew()

    def tick(self) -> None:
        """Try again to record, if that failed."""
        if self._descriptor is None and self.degraded is not None and self._clock() >= self._retry_at:
            remove_tables(self._stem)
            self._try(lambda: self._begin([]))

    def close(self, *, keep: bool) -> None:
        """End it. Unless ``keep``, no daemon will believe in what the pool holds."""
        self._ladder.stack.primary.ledger.on = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if not keep:
            with contextlib.suppress(OSError):
                remove_tables(self._stem)

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start and present sizes, by name (plain values)."""
        return {
            **self._counts,
            "bytes": self._bytes,
            "copying": self._todo is not None,
            "degraded": self.degraded,
        }

    # -- generations --------------------------------------------------------------------------------

    def _begin(self, old: list[Path]) -> None:
        """Begin a next generation; the blocks follow in :meth:`_take_over`."""
        numbers = [number for number, _ in table_paths(self._stem)]
        path = self._stem.with_name(f"{self._stem.name}.slots-{max(numbers, default=0) + 1}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._old, self._writer = descriptor, old, SlotWriter()
        self._entries = self._bytes = 0
        counters, changes = self._ladder.take_changes()
        nodes = [node for space in self._ladder.stack.primary.spaces.values() for node in space.blocks]
        self._append(header(self._header) + self._writer.changes(counters, [*self._base(), *changes]))
        self._todo = iter(nodes)

    def _base(self) -> list[Change]:
        """Return all that is live but the blocks."""
        ladder, sessions = self._ladder, self._ladder.sessions
        changes: list[Change] = [space.shape() for space in ladder.stack.primary.spaces.values()]
        return [*changes, *sessions.mappings(), *sessions.holds()]

    def _take_over(self, counters: Counters, limit: int) -> bytes:
        """Return the frame that takes over the next blocks."""
        assert self._todo is not None
        placed: list[Change] = []
        for _ in range(4 * limit):
            node = next(self._todo, None)
            if node is None:
                self._todo = None
                break
            if node.state is State.RESIDENT:
                placed.append(Placed(node.slot, node.generation, node.block))
                if len(placed) >= limit:
                    break
        self._counts["kept"] += len(placed)
        self._entries += len(placed)
        return self._writer.changes(counters, placed) if placed else b""

    def _renew(self) -> None:
        """Drop older generations when this one has all; begin a next one when this one is mostly old."""
        if self._todo is not None or self._descriptor is None:
            return
        self.degraded = None
        old, self._old = self._old, []
        for path in old:
            with contextlib.suppress(OSError):  # together with the newer one it stays right
                path.unlink(missing_ok=True)
        live = sum(len(space.blocks) for space in self._ladder.stack.primary.spaces.values())
        if self._entries > 2 * live + self._slack:
            self._counts["compactions"] += 1
            self._try(lambda: self._begin([path for _, path in table_paths(self._stem)]))

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes were written")
        self._bytes += written

    def _try(self, write: Callable[[], None]) -> None:
        """Write, or be without a record; the daemon may not go on beside one that is wrong.

        Raises:
            OSError: it can be neither written nor removed.
        """
        try:
            write()
        except OSError as error:
            if self.degraded is None:
                log.warning(
                    "the slot table cannot be written: %s; the pool would not survive a crash",
                    error,
                    extra=event("slot_table_degraded", reason=str(error)),
                )
            self.degraded = f"the slot table cannot be written: {error}"
            self._counts["failures"] += 1
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor, self._todo, self._old = None, None, []
            remove_tables(self._stem)
            self._retry_at = self._clock() + RETRY

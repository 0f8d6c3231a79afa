"""A pool that outlives the daemon: its file, the slot table beside it, the pipes of its engines.

::

    <stem>             the pool's bytes (``pool.path``)
    <stem>.slots-<n>   what its slots hold (:mod:`kvtierd.edges.slot_log`)
    <stem>.live/       one named pipe for each process that was given the pool (:mod:`kvtierd.edges.liveness`)

The next daemon goes on with it if it is the same file, whole, of the wanted size, and the machine was not
started anew in between; else it is removed (engines keep their mappings) and a new one takes its place.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtierd.core.geometry import UNIT
from kvtierd.core.handover import Live, pool_counters, pool_state
from kvtierd.core.ladder import Ladder
from kvtierd.core.ledger import Change, Placed, PoolState
from kvtierd.core.model import State
from kvtierd.core.recovery import Inconsistent, restore
from kvtierd.edges import backing, systemd
from kvtierd.edges.collector import uncollected
from kvtierd.edges.libc import MemoryCalls
from kvtierd.edges.number_page import boot_id
from kvtierd.edges.pool import Found, Pool, PoolSettings, pool_path
from kvtierd.edges.slot_log import SlotLog, read_tables, remove_tables
from kvtierd.errors import PoolError
from kvtierd.logs.events import event
from kvtierd.wire.frames import Torn, Unreadable
from kvtierd.wire.slot_records import Header, SlotReader, SlotWriter, header

log = logging.getLogger(__name__)

COPY_SLICE = 256
"""Blocks in a part of a copy; turns may run between two of them."""
STORE_NAME = "kvtierd-pool"
"""Of the pool's descriptor in the service manager's store."""


class KeptPool:
    """The pool of one daemon and what has to outlive it.

    A pool survives every end of the daemon if it is a file, or if the service manager keeps its descriptor;
    any other one only a takeover. ``recorded``: whether there is a slot table for the next daemon.
    ``state``: what the earlier daemon left in it, ``None`` in a new pool and once it was restored.
    """

    def __init__(
        self,
        pool: Pool,
        stem: Path,
        state: PoolState | None = None,
        *,
        recorded: bool,
    ) -> None:
        self.pool = pool
        self.survived = state is not None
        self.recorded = recorded
        self._live: Live | None = None
        self._stem = stem
        self._state = state
        self._log: SlotLog | None = None
        self._ladder: Ladder | None = None

    @classmethod
    def open(cls, settings: PoolSettings, runtime_dir: Path, calls: MemoryCalls | None = None) -> KeptPool:
        """Go on with the pool that is there, or make one. May take seconds: call it off the loop.

        Raises:
            PoolError: see :meth:`Pool.allocate`; or another daemon has the file.
        """
        stem = pool_path(settings, runtime_dir)
        named = stem is not None
        fd = backing.lock_file(stem) if stem is not None else systemd.stored(STORE_NAME)
        stem = stem or runtime_dir / "pool"
        found, state, reason = _find(fd, stem, settings.bytes - settings.bytes % UNIT)
        if found is None:
            remove_tables(stem)
            _remove_pipes(stem)
            systemd.forget(STORE_NAME)
        pool = Pool.allocate(settings, runtime_dir, calls, found)
        pool.record("kept", "no" if found is None else "yes", reason)
        return cls(pool, stem, state, recorded=named or systemd.store(STORE_NAME, pool.fd))

    @classmethod
    def take(cls, settings: PoolSettings, runtime_dir: Path, found: Found, *, recorded: bool) -> KeptPool:
        """Map the pool of a daemon that hands over; :meth:`know` what is in it before it is restored.

        ``recorded``: whether it survives that daemon, be it in the service manager's store.

        Raises:
            PoolError: it cannot be mapped.
        """
        path = pool_path(settings, runtime_dir)
        pool = Pool.allocate(settings, runtime_dir, None, found)
        pool.record("kept", "yes", "taken over")
        return cls(pool, path or runtime_dir / "pool", PoolState(), recorded=recorded)

    def know(self, table: bytes, *, whole: bool = True, live: Live | None = None) -> None:
        """Take in a generation of the slot table of a daemon that hands over.

        ``whole``: it says all, else what changed since the last one. ``live``: what goes on.

        Raises:
            PoolError: it cannot be read.
        """
        reader = SlotReader()
        if not whole and self._state is not None:
            reader.state = self._state
        try:
            with uncollected():
                reader.read(io.BytesIO(table))
        except (Torn, Unreadable) as error:
            raise PoolError(f"takeover: the table of the pool: {error}") from None
        self._state, self._live = reader.state, live

    @property
    def pipes(self) -> Path:
        """The folder of the liveness pipes."""
        return _pipes(self._stem)

    def table(self, ladder: Ladder) -> bytes:
        """Return all that there is to know of the pool, as one generation of a slot table."""
        state = pool_state(ladder)
        changes: list[Change] = [*state.shapes.values(), *ladder.sessions.mappings()]
        changes += [*state.held.values(), *state.blocks.values()]
        frames = SlotWriter().changes(state.counters, changes)
        return header(self._header()) + frames

    def copy(self, ladder: Ladder) -> Iterator[bytes]:
        """Yield the same in parts, between which turns may run; what they change is in :meth:`changed`."""
        primary, sessions = ladder.stack.primary, ladder.sessions
        primary.ledger.on = True
        counters, _ = ladder.take_changes()  # the turns before have taken all of theirs
        primary.ledger.copy()
        writer = SlotWriter()
        base: list[Change] = [space.shape() for space in primary.spaces.values()]
        base += [*sessions.mappings(), *sessions.holds()]
        nodes = list(primary.nodes())
        yield header(self._header()) + writer.changes(counters, base)
        for at in range(0, len(nodes), COPY_SLICE):
            placed: list[Change] = [
                Placed(node.slot, node.generation, node.block)
                for node in nodes[at : at + COPY_SLICE]
                if node.state is State.RESIDENT
            ]
            yield writer.changes(counters, placed)

    def changed(self, ladder: Ladder) -> bytes | None:
        """Return what changed since a copy began, as a generation; ``None`` if that is too much."""
        self.record()
        changes = ladder.stack.primary.ledger.copied()
        if changes is None:
            return None
        shapes = [space.shape() for space in ladder.stack.primary.spaces.values()]
        counters = pool_counters(ladder)
        return header(self._header()) + SlotWriter().changes(counters, [*shapes, *changes])

    def stop_copy(self, ladder: Ladder) -> None:
        """Keep no changes any more: the copy is of no use."""
        ladder.stack.primary.ledger.copied()
        if self._log is None:
            ladder.stack.primary.ledger.on = False
            ladder.take_changes()

    @property
    def whole(self) -> bool:
        """Whether a daemon that came now would find every block."""
        return self._log is not None and self._log.degraded is None

    def restore(self, ladder: Ladder, now: float) -> set[bytes]:
        """Put what was left into a new ladder and begin to record; returns the processes that it knew of.

        Raises:
            PoolError: what was left contradicts itself; it is removed, and the next start makes a new pool.
        """
        state, self._state = self._state or PoolState(), None
        try:
            with uncollected():
                restore(ladder, state, now, live=self._live)
        except Inconsistent as error:
            if self.recorded:
                remove_tables(self._stem)
            raise PoolError(f"pool.path: {self._stem}: {error}: start again, with an empty pool") from None
        if self.survived:
            log.info(
                "pool %s goes on: %d blocks, %d copies of engines may be under way",
                self.pool.pool_id,
                len(state.blocks),
                len(ladder.sessions.quarantines),
                extra=event("pool_goes_on", pool_id=self.pool.pool_id, blocks=len(state.blocks)),
            )
        self._ladder = ladder
        if self.recorded:
            self._log = SlotLog(self._stem, self._header(), ladder)
            self._log.open()
        else:
            ladder.stack.primary.ledger.on = False
            ladder.take_changes()
        return {process for _, process in state.mapped}

    def record(self) -> None:
        """Write down what a turn changed, before anything of it is carried out."""
        if self._log is not None:
            self._log.record()
        elif self._ladder is not None and self._ladder.stack.primary.ledger.on:
            self._ladder.take_changes()  # for a copy alone

    def tick(self) -> None:
        """Do the record's upkeep."""
        if self._log is not None:
            self._log.tick()

    def stop_recording(self) -> None:
        """Leave what was recorded to the next daemon."""
        if self._log is not None:
            self._log.close(keep=True)
            self._log = None

    def close(self, *, keep: bool) -> None:
        """Unmap the pool. Unless it is to be kept, nothing of it stays."""
        if self._log is not None:
            self._log.close(keep=keep)
        if not keep:
            systemd.forget(STORE_NAME)
            _remove_pipes(self._stem)
        self.pool.close(keep=keep)

    def statistics(self) -> dict[str, Any]:
        """Return the pool's figures and those of its record, by name (plain values)."""
        table = {} if self._log is None else {"slot_table": self._log.statistics()}
        return {
            "pool_id": self.pool.pool_id,
            "bytes": self.pool.bytes,
            "prefaulted_bytes": self.pool.prefaulted_bytes,
            **self.pool.achieved,
            **table,
        }

    def _header(self) -> Header:
        there = os.fstat(self.pool.fd)
        return Header(boot_id(), self.pool.pool_id, self.pool.bytes, there.st_dev, there.st_ino)


def _find(fd: int | None, stem: Path, size: int) -> tuple[Found | None, PoolState | None, str]:
    """Return the file that is there and its state, or why not."""
    if fd is None:
        return None, None, ""
    try:
        there = os.fstat(fd)
        if there.st_size != size or there.st_blocks * 512 < size:
            raise Unreadable(f"it has {there.st_size} bytes, {size} are wanted")
        of, state = read_tables(stem)
        if not of.boot or of != Header(boot_id(), of.pool_id, size, there.st_dev, there.st_ino):
            raise Unreadable("its slot table is that of another pool or of an earlier run of the machine")
    except (Unreadable, OSError) as error:
        log.warning(
            "pool.path: %s is not gone on with: %s",
            stem,
            error,
            extra=event("pool_not_kept", file=str(stem), reason=str(error)),
        )
        backing.remove_file(stem, fd)
        os.close(fd)
        return None, None, str(error)
    return Found(fd, of.pool_id), state, ""


def _pipes(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.live")


def _remove_pipes(stem: Path) -> None:
    with contextlib.suppress(OSError):
        for path in _pipes(stem).iterdir():
            path.unlink()
        _pipes(stem).rmdir()

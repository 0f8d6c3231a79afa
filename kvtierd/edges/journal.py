"""The announced journal on disk: what is told is recorded before it is sent, in one write a batch.

No fsync while it runs: what a write handed to the kernel survives any end of the process. The end of the
machine is another matter: the boot id in each file tells, and then the journal, unless it was closed in
order, is only believed as "at least this was told" (see :class:`~kvtierd.wire.announced.History`).

Files ``announced-<n>`` in ``state_dir``. When the newest one holds more than twice as many entries as are
live, a next one is begun: live entries are copied in small parts along with the batches, then the old file
is removed. No thread, no pause, and reading all files in order is right at any moment.

Where it cannot be written (disk full, read-only) its files are removed, since a record with holes is worse
than none; ``degraded`` says why, events go on, and a whole new record is tried for every few seconds.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtierd.core.model import Block, BlockId, TierEvent
from kvtierd.edges.collector import uncollected
from kvtierd.edges.journal_file import JournalFile
from kvtierd.edges.number_page import boot_id
from kvtierd.logs.events import event
from kvtierd.wire.announced import Announced, History, TierLabel
from kvtierd.wire.frames import Unreadable
from kvtierd.wire.records import HistoryReader, Mark

log = logging.getLogger(__name__)

TAIL = 1.0
"""Seconds within which what a socket took has left the process, unless its reader is behind."""
SLACK = 4096
"""Entries beyond twice the live ones before a next file is begun."""
KEEP = 64
"""Entries copied with a batch, at least, while a next file is being filled."""
KEEP_IDLE = 512
"""Entries copied with a tick."""
RETRY = 5.0
_NAME = re.compile(r"announced-(\d{1,18})")
_LONG_AGO = -1e18


class Journal:
    """The journal in ``folder``. One thread at a time: :meth:`load`, :meth:`follow`, then the others.

    ``clock``: seconds that run through all processes of one boot. ``background`` runs elsewhere what may take
    long (removing a large file). ``degraded``: why nothing is recorded; ``lost``: why nothing, or not all,
    of what was found at the start is believed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        boot: str | None = None,
        background: Callable[[Callable[[], None]], object] = lambda work: work(),
        slack: int = SLACK,
        tail: float = TAIL,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._boot = boot_id() if boot is None else boot
        self._background = background
        self._slack = slack
        self._tail = tail
        self._announced: Announced | None = None
        self._current: JournalFile | None = None
        self._partial = False
        """Whether the current file is no record yet, since not all live entries are in it."""
        self._old: list[JournalFile] = []
        self._todo: Iterator[tuple[TierLabel, BlockId]] | None = None
        """What the current file still has to take over."""
        self._next = 1
        self._renewed_at = self._wrote_at = self._retry_at = _LONG_AGO
        self._unsettled = False
        self.continued = False
        """Whether there was a journal, readable or not."""
        self.degraded: str | None = None
        self.lost: str | None = None
        self._counts = dict.fromkeys(("batches", "entries", "kept", "compactions", "failures"), 0)

    # -- start and end ------------------------------------------------------------------------------

    def load(self) -> History | None:
        """Read what was told before; ``None`` if there is nothing that can be believed. May take seconds."""
        history: History | None = None
        try:
            with uncollected():
                history = self._read()
        except (Unreadable, OSError) as error:
            self.lost = str(error)
            log.warning(
                "announced journal: %s; what is found will be announced anew",
                error,
                extra=event("journal_lost", reason=str(error)),
            )
            self._set_aside()
        try:
            if self._current is None:
                self._create()
            assert self._current is not None
            self._current.append(self._current.writer.mark(self._clock(), Mark.OPENED))
            self._current.sync()
        except OSError as error:
            self._degrade(error)
        return history

    def follow(self, announced: Announced) -> None:
        """Take the set whose entries are recorded, before its :meth:`~Announced.begin`."""
        self._announced = announced
        if self._old:
            self._todo = announced.residencies()

    def close(self, *, flushed: bool) -> None:
        """End it, and wait for the disk. ``flushed``: all that was told has left the process."""
        if self._current is not None:
            try:
                if flushed and not self._partial:
                    self._current.append(self._current.writer.mark(self._clock(), Mark.CLOSED))
                    self._current.sync()
            except OSError as error:
                self._degrade(error)
        if self._current is not None:
            if self._partial:
                self._current.remove()
            self._current.close()
            self._current = None
        self._announced = None

    def _paths(self) -> list[tuple[int, Path]]:
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match is not None)

    def _read(self) -> History | None:
        numbered = self._paths()
        for path in self._folder.glob("announced-*.new"):
            path.unlink()
        if not numbered:
            self.lost = "there is none"
            return None
        self.continued = True
        self._next = numbered[-1][0] + 1
        reader = HistoryReader(self._tail)
        files = [JournalFile(path) for _, path in numbered]
        boots: list[str | None] = []
        believed: str | None = None
        for file in files:
            boots.append(file.read(reader, last=file is files[-1]))
            if file.entries or believed is None:
                believed = boots[-1]
        whole = reader.closed or believed in (None, self._boot)
        if not whole:
            self.lost = "the machine ended before it was closed"
        self._resume(files, boots[-1])
        return reader.finish(whole=whole)

    def _resume(self, files: list[JournalFile], boot: str | None) -> None:
        """Go on with the newest file if it is of this boot, else with a new one."""
        newest = files[-1]
        if boot is None:
            newest.remove()
            files = files[:-1]
        try:
            if boot == self._boot:
                newest.resume()
                self._current, files = newest, files[:-1]
            else:
                self._create()
        except OSError as error:
            self._degrade(error)
            return
        self._old = files
        self._renewed_at = self._clock()

    def _set_aside(self) -> None:
        """Keep files that cannot be believed, under another name; the latest of each number."""
        with contextlib.suppress(OSError):
            for number, path in self._paths():
                path.replace(path.with_name(f"{path.name}.aside"))
                self._next = number + 1

    # -- while it runs ------------------------------------------------------------------------------

    def append(self, events: Sequence[TierEvent]) -> None:
        """Record one batch, already taken in by the set; to be called before it is sent."""
        file = self._current
        if file is None or not events:
            return
        now = self._clock()
        data = file.writer.changes(now, events)
        file.entries += len(events)
        self._counts["batches"] += 1
        self._counts["entries"] += len(events)
        if self._todo is not None:
            data += self._keep(file, now, max(KEEP, 2 * len(events)))
        self._write(data, now)
        self._unsettled = True
        self._renew(now)

    def tick(self) -> None:
        """Do what is due without a batch: settle, copy, remove, or try again to record."""
        now = self._clock()
        if self._current is None:
            self._retry(now)
            return
        data = b""
        if self._todo is not None:
            data = self._keep(self._current, now, KEEP_IDLE)
        if self._unsettled and now - self._wrote_at > self._tail:
            self._unsettled = False
            data += self._current.writer.mark(now, Mark.SETTLED)
        if data:
            self._write(data, now)
        self._renew(now)

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start and present sizes, by name (plain values)."""
        files = [*self._old, *([] if self._current is None else [self._current])]
        return {
            **self._counts,
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
            "copying": self._todo is not None,
            "settled": not self._unsettled,
            "degraded": self.degraded,
            "lost": self.lost,
        }

    def _create(self) -> None:
        name = f"announced-{self._next}" + (".new" if self._partial else "")
        file = JournalFile(self._folder / name)
        self._next += 1
        file.create(self._boot)
        self._current = file
        self._renewed_at = self._clock()

    def _write(self, data: bytes, now: float) -> None:
        assert self._current is not None
        try:
            self._current.append(data)
            self._wrote_at = now
        except OSError as error:
            self._degrade(error)

    def _keep(self, file: JournalFile, now: float, limit: int) -> bytes:
        """Return the record that takes over the next live entries."""
        assert self._todo is not None
        assert self._announced is not None
        blocks: list[tuple[TierLabel, Block]] = []
        for _ in range(4 * limit):  # most of an old file may be gone
            item = next(self._todo, None)
            if item is None:
                self._todo = None
                break
            block = self._announced.holding(*item)
            if block is not None:
                blocks.append((item[0], block))
                if len(blocks) >= limit:
                    break
        self._counts["kept"] += len(blocks)
        file.entries += len(blocks)
        return file.writer.kept(now, blocks) if blocks else b""

    def _renew(self, now: float) -> None:
        """Begin a next file when this one is mostly old, or end the change to it."""
        if self._todo is not None or self._current is None or self._announced is None:
            return
        if self._partial:
            self._complete(self._current)
        elif self._old:
            if now - self._renewed_at > self._tail:  # till then, the old one may have doubts of its own
                old, self._old = self._old, []
                for file in old:
                    self._background(file.remove)
        elif self._current.entries > 2 * len(self._announced) + self._slack:
            self._counts["compactions"] += 1
            old_file = self._current
            try:
                self._create()
            except OSError as error:
                self._degrade(error)
                return
            old_file.close()
            self._old = [old_file]
            self._todo = self._announced.residencies()

    # -- when it cannot be written ------------------------------------------------------------------

    def _degrade(self, error: OSError) -> None:
        reason = f"the announced journal cannot be written: {error}"
        if self.degraded is None:
            log.warning(
                "%s; after a crash now, what is found will be announced anew; make state_dir writable",
                reason,
                extra=event("journal_degraded", reason=str(reason)),
            )
        self.degraded = reason
        self._counts["failures"] += 1
        for file in (*self._old, *([] if self._current is None else [self._current])):
            file.remove()
        self._current, self._old, self._todo, self._partial = None, [], None, False
        self._retry_at = self._clock() + RETRY

    def _retry(self, now: float) -> None:
        """Begin a whole record anew; it counts when all live entries are in it."""
        if self.degraded is None or now < self._retry_at or self._announced is None:
            return
        self._partial = True
        try:
            self._create()
        except OSError as error:
            self._degrade(error)
            return
        self._todo = self._announced.residencies()

    def _complete(self, file: JournalFile) -> None:
        path = file.path.with_suffix("")
        try:
            file.path.rename(path)
        except OSError as error:
            self._degrade(error)
            return
        file.path = path
        self._partial = False
        self.degraded = None
        log.info("the announced journal is whole again", extra=event("journal_restored"))

"""One file of the announced journal: created, appended to, read back, cut where it is torn."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from kvtierd.logs.events import event
from kvtierd.wire.frames import Torn, Unreadable
from kvtierd.wire.records import (
    HistoryReader,
    RecordWriter,
    header,
    read_header,
    read_records,
)

log = logging.getLogger(__name__)


class JournalFile:
    """A generation of the journal. ``entries`` and ``bytes`` are what is in it."""

    def __init__(self, path: Path, writer: RecordWriter | None = None) -> None:
        self.path = path
        self.writer = writer or RecordWriter()
        self.entries = 0
        self.bytes = 0
        self._descriptor: int | None = None

    def create(self, boot: str) -> None:
        """Make the file, with its header.

        Raises:
            OSError: it cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o640)
        self.append(header(boot))

    def resume(self) -> None:
        """Open what :meth:`read` found in order.

        Raises:
            OSError: it cannot be written.
        """
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, data: bytes) -> None:
        """Hand bytes to the kernel in one write; all of them or an error.

        Raises:
            OSError: they were not taken; a part may be there.
        """
        assert self._descriptor is not None
        written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes were written")
        self.bytes += written

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        assert self._descriptor is not None
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Close it and take it away."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def read(self, reader: HistoryReader, *, last: bool) -> str | None:
        """Feed the file's records to ``reader``; return its boot id, ``None`` if it has not even a header.

        A torn end of the ``last`` file is cut: it is of a batch that was not sent.

        Raises:
            Unreadable: it cannot be believed.
            OSError: it cannot be read, or not cut.
        """
        boot: str | None = None
        before = reader.entries
        reader.generation()
        try:
            with self.path.open("rb") as file:
                boot = read_header(file)
                for record in read_records(file):
                    reader.take(record)
        except Torn as torn:
            if not last:
                raise Unreadable(f"{self.path.name}: it ends within a record, but is not the last") from torn
            log.info(
                "announced journal: %s is cut at byte %d",
                self.path.name,
                torn.offset,
                extra=event("journal_cut", file=self.path.name, offset=torn.offset),
            )
            os.truncate(self.path, torn.offset)
        except Unreadable as error:
            raise Unreadable(f"{self.path.name}: {error}") from error
        self.entries = reader.entries - before
        self.bytes = self.path.stat().st_size
        self.writer = RecordWriter(*reader.names())
        return boot

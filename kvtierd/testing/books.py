"""What the stream keeps of a daemon's blocks, without its sockets and files; for benches and tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvtierd.core.model import Medium, TierEvent
from kvtierd.wire.announced import Announced, History, TierLabel
from kvtierd.wire.projection import Projection, View, runs_of
from kvtierd.wire.records import RecordWriter
from kvtierd.wire.stream import Limits, StreamLog, split

CPU = TierLabel("cpu", Medium.CPU, None)


class Books:
    """The announcer's set, the journal's writer, and one audience's projection and log.

    ``ring_batches``: how many batches the log keeps as they were sent.
    """

    def __init__(self, view: View | None = None, *, namespace: str = "bench", ring_batches: int = 64) -> None:
        view = view if view is not None else View()
        self.announced = Announced([CPU], History())
        self.announced.begin()
        self.records = RecordWriter([CPU], [namespace])
        self.projection = Projection(view)
        self.log = StreamLog(Limits(ring_batches, 64 << 20), view)
        self._numbers = itertools.count()

    def tell(self, events: Sequence[TierEvent]) -> None:
        """Take one turn's events in, in drain order."""
        told = self.announced.advance(events).events
        self.records.changes(1.0, told)
        for run in runs_of(self.projection.apply(told)):
            for part in split(run.changes):
                self.log.append(next(self._numbers), 1.0, run.rank, part)

"""What telling a block costs is counted in calls, which no busy machine changes."""

from __future__ import annotations

import sys

from kvtierd.core.model import EventKind, Medium, TierEvent
from kvtierd.testing.events_bench import stored
from kvtierd.wire.announced import Announced, History, TierLabel
from kvtierd.wire.projection import Projection, View, runs_of
from kvtierd.wire.records import RecordWriter
from kvtierd.wire.stream import Limits, StreamLog, split

CPU = TierLabel("cpu", Medium.CPU, None)
MOST = {EventKind.STORED: 0, EventKind.REMOVED: 7}
"""Python functions entered for each block by all of the stream's own code, sockets left out."""


class Stream:
    """What the announcer, the journal and a publisher do with a turn's events."""

    def __init__(self) -> None:
        self.announced = Announced([CPU], History())
        self.announced.begin()
        self.records = RecordWriter([CPU], ["bench"])
        self.projection = Projection(View())
        self.log = StreamLog(Limits(10_000, 64 << 20))
        self.number = 0

    def publish(self, events: list[TierEvent]) -> int:
        """Publish and return how many Python functions were entered."""
        calls = 0

        def note(frame: object, what: str, argument: object) -> None:
            nonlocal calls
            calls += what == "call"

        sys.setprofile(note)
        try:
            told = self.announced.advance(events).events
            self.records.changes(1.0, told)
            for run in runs_of(self.projection.apply(told)):
                for part in split(run.changes):
                    self.log.append(self.number, 1.0, run.rank, part)
                    self.number += 1
        finally:
            sys.setprofile(None)
        return calls


def turn(kind: EventKind, first: int, count: int) -> list[TierEvent]:
    made = [stored(number) for number in range(first, first + count)]
    return [TierEvent(kind, one.tier, one.medium, one.locality, one.block) for one in made]


def test_a_block_is_told_with_few_calls_whatever_the_batch() -> None:
    for kind, most in MOST.items():
        stream = Stream()
        if kind is EventKind.REMOVED:
            stream.publish(turn(EventKind.STORED, 0, 512))
        few, many = stream.publish(turn(kind, 0, 64)), stream.publish(turn(kind, 64, 320))
        print(kind, (many - few) / 256)
        assert (many - few) // 256 <= most, kind

"""What telling a block costs is counted in calls, which no busy machine changes."""

from __future__ import annotations

import sys

from kvtierd.core.model import EventKind, TierEvent
from kvtierd.testing.books import Books
from kvtierd.testing.events_bench import stored

MOST = {EventKind.STORED: 0, EventKind.REMOVED: 7}
"""Python functions entered for each block by all of the stream's own code, sockets left out."""


def calls_of(books: Books, events: list[TierEvent]) -> int:
    """Tell events and return how many Python functions were entered."""
    calls = 0

    def note(frame: object, what: str, argument: object) -> None:
        nonlocal calls
        calls += what == "call"

    sys.setprofile(note)
    try:
        books.tell(events)
    finally:
        sys.setprofile(None)
    return calls


def turn(kind: EventKind, first: int, count: int) -> list[TierEvent]:
    made = [stored(number) for number in range(first, first + count)]
    return [TierEvent(kind, one.tier, one.medium, one.locality, one.block) for one in made]


def test_a_block_is_told_with_few_calls_whatever_the_batch() -> None:
    for kind, most in MOST.items():
        books = Books(ring_batches=10_000)
        if kind is EventKind.REMOVED:
            books.tell(turn(EventKind.STORED, 0, 512))
        few, many = calls_of(books, turn(kind, 0, 64)), calls_of(books, turn(kind, 64, 320))
        print(kind, (many - few) / 256)
        assert (many - few) // 256 <= most, kind

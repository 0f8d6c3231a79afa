"""What the batches came to that a log has no more: the latest change of each key, with its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, takewhile

from kvtierd.wire.places import ReaderKey
from kvtierd.wire.projection import Change


class Folded:
    """The net effect of all batches before a log's ring; the latest change of a key is the last.

    At most ``max_tombstones`` removals are remembered.
    """

    def __init__(self, max_tombstones: int) -> None:
        self._max_tombstones = max_tombstones
        self._known: dict[ReaderKey, Change] = {}
        self._stored: dict[ReaderKey, Change] = {}
        self._gone: dict[ReaderKey, Change] = {}
        self.floor = -1
        """Latest number whose removals may have been forgotten."""
        self.forgotten = 0
        self.folded = 0
        self.ranks: set[int] = set()
        self.ts, self.rank = 0.0, 0

    @property
    def resident(self) -> int:
        """How many residencies there are."""
        return len(self._known) + len(self._stored)

    @property
    def tombstones(self) -> int:
        """How many removals are remembered."""
        return len(self._gone)

    def seed(self, changes: Iterable[Change]) -> None:
        """Take in stores that are older than all numbers."""
        for change in changes:
            self._known[change.key] = change
            self.ranks.add(change.place.rank)

    def fold(self, sequence: int, ts: float, rank: int, changes: Sequence[Change]) -> None:
        """Take in the batch that follows those already folded.

        Keys are hashed anew for each look into a dict, so there are as few as can be.
        """
        self.folded += 1
        self.ts, self.rank = ts, rank
        known, stored, gone = self._known, self._stored, self._gone
        for change in changes:
            key = change.key
            if change.block is None:
                if stored.pop(key, None) is None:
                    known.pop(key, None)
                into = gone
            else:
                if known:
                    known.pop(key, None)
                if gone:
                    gone.pop(key, None)
                into = stored
            before = len(into)
            change.number = sequence
            into[key] = change
            if len(into) == before:  # it was there, such as a store that is told once more: to the end
                into[key] = into.pop(key)
        self.ranks.update([place.rank for place in {change.key[1] for change in changes}])
        while len(gone) > self._max_tombstones:
            self.floor = gone.pop(next(iter(gone))).number
            self.forgotten += 1

    def renumber(self, number: int) -> None:
        """Date all that is known back to ``number``; a new count of numbers goes on after it."""
        self._stored = self._known | self._stored
        for change in chain(self._stored.values(), self._gone.values()):
            change.number = number
        self._known = {}
        self.floor = -1

    def changed_since(self, start: int) -> tuple[list[Change], dict[ReaderKey, Change]]:
        """Return the removals and the stores whose latest change has number ``start`` or more, in order.

        From 0, where the reader knows nothing yet, no removals. Copies: the rest may change meanwhile.
        """
        if start == 0:
            return [], self._known | self._stored
        return list(_latest(self._gone, start).values()), _latest(self._stored, start)


def _latest(changes: dict[ReaderKey, Change], start: int) -> dict[ReaderKey, Change]:
    found = list(takewhile(lambda item: item[1].number >= start, reversed(changes.items())))
    return dict(reversed(found))

"""What readers tell residencies apart by: an event hash and the place that it is at."""

from __future__ import annotations

import functools

import msgspec

from kvtierd.core.model import EventHash

EVERY_RANK = -1
"""The rank in keys that stand for all attached dp ranks."""


class Place(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """Where a residency is, to a reader. ``locality`` is ``None`` too where the form cannot say it.

    There are millions of keys with a place: it keeps its hash, and the collector need not look into them.
    """

    rank: int
    group: int
    medium: str
    locality: str | None

    def of_rank(self, rank: int) -> Place:
        """Return the same place of another dp rank."""
        return place_of(rank, self.group, self.medium, self.locality)


@functools.lru_cache(maxsize=1024)
def place_of(rank: int, group: int, medium: str, locality: str | None) -> Place:
    """Return the place of these words, one object for all who ask."""
    return Place(rank, group, medium, locality)


ReaderKey = tuple[EventHash, Place]
"""What a reader tells residencies apart by."""

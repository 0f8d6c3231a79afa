"""What readers tell residencies apart by: an event hash and the place that it is at."""

from __future__ import annotations

import functools

from kvtierd.core.model import EventHash

EVERY_RANK = -1
"""The rank in keys that stand for all attached dp ranks."""


class Place(str):
    """Where a residency is, to a reader. ``locality`` is ``None`` too where the form cannot say it.

    It is a string of its words because a string keeps its hash: there are millions of keys.
    """

    __slots__ = ("group", "locality", "medium", "rank")

    rank: int
    group: int
    medium: str
    locality: str | None

    def of_rank(self, rank: int) -> Place:
        """Return the same place of another dp rank."""
        return place_of(rank, self.group, self.medium, self.locality)


@functools.lru_cache(maxsize=1024)
def place_of(rank: int, group: int, medium: str, locality: str | None) -> Place:
    """Return the place of these words."""
    place = Place((rank, group, medium, locality))
    place.rank, place.group, place.medium, place.locality = rank, group, medium, locality
    return place


ReaderKey = tuple[EventHash, Place]
"""What a reader tells residencies apart by."""

"""Blocks of the shared pool announced for every attached dp rank, to readers that keep ranks apart.

A rank that attaches is told of everything that is there, a rank that leaves has all of it taken back; both
can be a million events, so they are made piece by piece between other work (:meth:`Fan.sweep`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvtierd.wire.places import EVERY_RANK, ReaderKey
from kvtierd.wire.projection import Change, unknown_ancestry


class Fan:
    """Turns changes of keys with :data:`EVERY_RANK` into one for each rank that readers know of.

    ``announced``: all residencies, as the projection keeps them. ``only``: the one rank that counts here.
    """

    def __init__(
        self, announced: Mapping[ReaderKey, Change], ranks: Iterable[int], *, only: int | None = None
    ) -> None:
        self._announced = announced
        self._only = only
        self.ranks = set(self._mine(ranks))
        self._joining: tuple[int, set[ReaderKey]] | None = None

    def spread(self, changes: Iterable[Change]) -> list[Change]:
        """Return the changes rank by rank, each rank's in their order; those of a real rank come along."""
        by_rank: dict[int, list[Change]] = {rank: [] for rank in sorted(self.ranks)}
        for change in changes:
            rank = change.place.rank
            if rank != EVERY_RANK:
                by_rank.setdefault(rank, []).append(change)
                continue
            for rank in self.ranks:
                by_rank[rank].append(change.of_rank(rank))
            if self._joining is not None:
                rank, known = self._joining
                by_rank.setdefault(rank, []).extend(self._to_joining(change, rank, known))
        return [change for part in by_rank.values() for change in part]

    def sweep(self, wanted: Iterable[int]) -> Iterator[list[Change]] | None:
        """Return what one rank must be told so that the ranks become ``wanted``; ``None``: they are.

        To be used up before the next call; :meth:`spread` may be called between two of its lists. No rank at
        all is never wanted: the pool's blocks then stay with those who were last.
        """
        ranks = set(self._mine(wanted))
        for rank in sorted(ranks - self.ranks):
            return self._join(rank)
        for rank in sorted(self.ranks - ranks):
            return self._leave(rank)
        return None

    def _mine(self, ranks: Iterable[int]) -> Iterable[int]:
        return ranks if self._only is None else [rank for rank in ranks if rank == self._only]

    def _join(self, rank: int) -> Iterator[list[Change]]:
        known: set[ReaderKey] = set()
        self._joining = (rank, known)
        for key in [key for key in self._announced if key[1].rank == EVERY_RANK]:
            if key in self._announced and key not in known:
                yield [change.of_rank(rank) for change in unknown_ancestry(self._announced, key, known)]
        self._joining = None
        self.ranks.add(rank)

    def _leave(self, rank: int) -> Iterator[list[Change]]:
        self.ranks.discard(rank)
        shared = [change for key, change in self._announced.items() if key[1].rank == EVERY_RANK]
        for change in reversed(shared):  # the order of stores is root first, but for a parent stored again
            yield [change.undone().of_rank(rank)]

    def _to_joining(self, change: Change, rank: int, known: set[ReaderKey]) -> Iterator[Change]:
        """Tell a rank in the middle of its sweep: ancestors first, and no removal of what it never heard."""
        if change.block is None:
            if change.key in known:
                known.discard(change.key)
                yield change.of_rank(rank)
        elif change.key in self._announced:
            for told in unknown_ancestry(self._announced, change.key, known):
                yield told.of_rank(rank)

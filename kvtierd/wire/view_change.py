"""What readers must be told when their audience's view is another one than in the run before.

The journal knows tiers, not audiences: what an earlier run told a reader is what its view then made of them.
Readers that kept what they knew end with the present view once they are told the difference: what only the
old view shows is removed, what only the new one shows is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtierd.core.model import TierEvent
from kvtierd.wire.kvevents import WireEvent
from kvtierd.wire.places import EVERY_RANK, ReaderKey
from kvtierd.wire.projection import Change, Projection, View, root_first


def needs_new_start(old: View, new: View) -> bool:
    """Whether some of the difference cannot be said: localities in arrays, removals that were kept quiet.

    Readers that can should then forget everything and ask from 0.
    """
    return old.form is not new.form or (new.removals and not old.removals)


class ViewChange:
    """Follows what readers were told under ``views``, all that one who hears the stream now may have had.

    Where these do not agree, a store has a removal before it, for readers that count stores.
    """

    def __init__(self, views: Iterable[View], new: View, ranks: Iterable[int]) -> None:
        self._new = new
        self._ranks = sorted(ranks)
        self._before = [Projection(view) for view in views]

    def seed(self, events: Sequence[TierEvent]) -> None:
        """Take residencies that readers were told of."""
        for projection in self._before:
            projection.apply(events)

    def inject(self, rank: int, events: Sequence[WireEvent]) -> None:
        """Take another publisher's events that readers were told of."""
        for projection in self._before:
            projection.inject(rank, events)

    def difference(self, announced: Mapping[ReaderKey, Change], ranks: Iterable[int]) -> list[Change]:
        """Return what to tell where the new view shows ``announced`` to ``ranks``: removals, then stores."""
        now = dict(_spread(announced, self._new, ranks))
        known = [dict(_spread(p.announced, p.view, self._ranks)) for p in self._before]
        silent = any(self._new.tokens and not projection.view.tokens for projection in self._before)
        everywhere = set.intersection(*map(set, known))
        doubted = {
            key: change
            for told in known
            for key, change in told.items()
            if silent or key not in everywhere or key not in now
        }
        fresh = {key: change for key, change in now.items() if silent or key not in everywhere}
        removals = [change.undone(told=self._new.removals) for change in root_first(doubted)]
        return [*reversed(removals), *root_first(fresh)]


def _spread(
    announced: Mapping[ReaderKey, Change], view: View, ranks: Iterable[int]
) -> Iterator[tuple[ReaderKey, Change]]:
    """Yield each reader's key; those of every rank become one for each rank that the view has."""
    mine = [rank for rank in ranks if view.rank in (None, rank)]
    for key, change in announced.items():
        if key[1].rank != EVERY_RANK:
            yield key, change
            continue
        for rank in mine:
            spread = change.of_rank(rank)
            yield spread.key, spread

"""The default: evicts what is worth least by what this workload has taught so far.

Blocks are sorted into classes by how often they were used, evicted ones remembered. :mod:`reuse` learns for
each class how long its blocks wait for their next use; what a block is worth then depends on its class and
age. Where recency is the best guide it evicts as LRU does; where blocks come back only after a pause that is
longer than the cache can wait for all of them, it keeps some long enough instead of all too short; a scan
or a tail that is never asked for again leaves first.
"""

from __future__ import annotations

from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING

from kvtierd.core.model import State
from kvtierd.core.policies.base import Aging
from kvtierd.core.policies.ghosts import Ghosts
from kvtierd.core.policies.reuse import BUCKETS, ReuseTimes, age_bucket, bucket_start

if TYPE_CHECKING:
    from kvtierd.core.residency import Node

_MOST_USES = 3
_PROMOTED = _MOST_USES + 1
"""Brought up from another tier and not used since: its use is yet to come."""

_CLASSES = _PROMOTED + 1
_LESSON = 1024
_RESHELVED = 4
"""Blocks whose age is looked at with every eviction; one that grew into another bucket moves there."""

_COMPARED = 8
_GHOSTS = 1 << 16
"""Evicted names that are remembered at least, as long as they are not many times the blocks."""

_ENDS = [bucket_start(bucket + 1) for bucket in range(BUCKETS)]
"""Ages at which a block is too old for each bucket."""

_last_use = attrgetter("touch")


class Auto(Aging):
    """Shelves of evictable blocks, one for each class and age bucket, ordered by worth.

    ``stamp``: the class; ``shelf``: the number of the list that an offered block is on; ``place``: its index
    there; ``hits``: uses since it was first seen, as far as it is remembered.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reuse = ReuseTimes(_CLASSES)
        self._ghosts = Ghosts()
        self._shelves: list[list[Node]] = [[] for _ in range(_CLASSES * BUCKETS)]
        self._next_lesson = _LESSON
        self._hand = (0, 0)
        """Rank of a shelf and index on it: which block's age is looked at next."""
        self._worst_first: list[int] = []
        """Numbers of the shelves by rank."""
        self._rank: list[int] = [0] * len(self._shelves)
        self._filled = 0
        """A bit for each rank whose shelf has blocks: the first one is found without a look at the others."""
        self._learn()

    def inserted(self, node: Node) -> None:
        """Class the block by what is remembered of it."""
        self._arrive(node)
        block_id = node.block.id
        known = self._ghosts.take(block_id)
        if node.state is State.LOADING:
            node.hits, node.stamp = known or 0, _PROMOTED
        else:
            if known is not None:
                node.hits = known + 1
            node.stamp = min(node.hits, _MOST_USES)
        self._reuse.used(block_id, node.stamp, self.clock, self.residents)
        if self.clock >= self._next_lesson:
            self._next_lesson = self.clock + max(_LESSON, self.residents // 2)
            self._learn()

    def touched(self, node: Node) -> None:
        """Count another use, and the first of a promoted block however soon it comes."""
        if not self._is_another_use(node) and node.stamp != _PROMOTED:
            return
        self._note_use(node)
        node.hits += 1
        node.stamp = min(node.hits, _MOST_USES)
        self._reuse.used(node.block.id, node.stamp, self.clock, self.residents)
        if node.place >= 0:
            self._reshelve(node)

    def offer(self, node: Node) -> None:
        """Put the block on the shelf of its class and age."""
        node.shelf = number = node.stamp * BUCKETS + age_bucket(self.clock - node.touch)
        shelf = self._shelves[number]
        if not shelf:
            self._filled |= 1 << self._rank[number]
        node.place = len(shelf)
        shelf.append(node)

    def withdraw(self, node: Node) -> None:
        """Take the block off its shelf; the shelf's last one gets its place."""
        shelf = self._shelves[node.shelf]
        last = shelf.pop()
        if last is not node:
            shelf[node.place] = last
            last.place = node.place
        elif not shelf:
            self._filled ^= 1 << self._rank[node.shelf]
        node.place = -1

    def removed(self, node: Node, *, evicted: bool) -> None:
        """Remember how often an evicted block was used; an insertion that came to nothing is undone."""
        self.residents -= 1
        if evicted:
            limit = min(8 * self.residents, max(_GHOSTS, self.residents // 2))
            self._ghosts.put(node.block.id, node.hits, limit)
        else:
            self._reuse.forget(node.block.id)

    def victim(self) -> Node | None:
        """Return a block of the worst shelf that has any: of the first few there, the oldest."""
        if self._filled:
            self._age()
        while self._filled:
            node = min(self._shelves[self._worst_first[_first(self._filled)]][:_COMPARED], key=_last_use)
            if self.clock - node.touch < _ENDS[node.shelf % BUCKETS]:
                return node
            self._reshelve(node)  # it is older than its shelf by now
        return None

    def _reshelve(self, node: Node) -> None:
        self.withdraw(node)
        self.offer(node)

    def _learn(self) -> None:
        """Order the shelves by worth; of equal ones the older goes first."""
        worth = self._reuse.worth(self.clock)
        order = sorted(
            product(range(_CLASSES), range(BUCKETS)), key=lambda at: (worth[at[0]][at[1]], -at[1], at[0])
        )
        self._worst_first = [kind * BUCKETS + bucket for kind, bucket in order]
        self._filled = 0
        for rank, number in enumerate(self._worst_first):
            self._rank[number] = rank
            if self._shelves[number]:
                self._filled |= 1 << rank

    def _age(self) -> None:
        """Move a few blocks on that outgrew their shelf; the hand goes round over all shelves."""
        rank, at = self._hand
        for _ in range(_RESHELVED):
            number = self._worst_first[rank]
            shelf = self._shelves[number]
            if at >= len(shelf):
                rank, at = self._next(rank), 0
            elif self.clock - shelf[at].touch < _ENDS[number % BUCKETS]:
                at += 1
            else:
                self._reshelve(shelf[at])
        self._hand = (rank, at)

    def _next(self, rank: int) -> int:
        """Return the rank of the next shelf, round the end, that has a block."""
        higher = self._filled >> rank + 1
        return rank + 1 + _first(higher) if higher else _first(self._filled)


def _first(bits: int) -> int:
    """Return the number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1

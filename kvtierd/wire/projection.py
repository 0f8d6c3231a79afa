"""What one audience sees: residencies counted under the reader's own key.

Several tiers can share a reader's key (two storage tiers of one locality), and so can several blocks
(overlapping chunks, two namespaces). A reader keeps a set, so it is told only when a count leaves 0 or
comes back to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtierd.core.model import Block, EventKind, Locality, Medium, TierEvent
from kvtierd.wire.kvevents import EventHash, WireEvent, has_group, removed, stored


class ReaderKey(NamedTuple):
    """What a reader tells residencies apart by. ``locality`` is ``None`` too where the form cannot say it."""

    rank: int
    hash: EventHash
    group: int
    medium: Medium
    locality: Locality | None


@dataclass(frozen=True, slots=True)
class Change:
    """A reader's key became resident (``block``: whose ``index``-th hash says it) or not (``block`` None).

    ``grouped``: whether the announcement carried the group, so that the removal does just that.
    """

    key: ReaderKey
    block: Block | None
    index: int = 0
    grouped: bool = True

    def to_wire(self, *, tokens: bool = True) -> WireEvent:
        """Return the event that tells it."""
        key = self.key
        if self.block is not None:
            return stored(self.block, self.index, key.medium, key.locality, tokens=tokens)
        return removed(key.hash, key.group if self.grouped else None, key.medium, key.locality)

    @property
    def parent(self) -> EventHash | None:
        """The event hash that must be known before this one."""
        if self.block is None or self.block.meta is None:
            return None
        return self.block.meta.hashes[self.index - 1] if self.index else self.block.meta.parent

    @property
    def size(self) -> int:
        """Roughly how many bytes the event takes on the wire."""
        tokens = self.block.meta.token_ids if self.block is not None and self.block.meta is not None else ()
        return 256 + 5 * len(tokens)


class Run(NamedTuple):
    """Changes of one dp rank that follow each other; they travel in one or several batches of their own."""

    rank: int
    changes: list[Change]


class Projection:
    """Turns tier events in drain order into what a reader must hear, in the same order.

    ``hidden`` names the tiers whose events this audience does not get; ``locality`` says whether its form
    carries the locality (else tiers that differ in nothing else are one to the reader).
    """

    def __init__(self, *, hidden: frozenset[str] = frozenset(), locality: bool = True) -> None:
        self._hidden = hidden
        self._locality = locality
        self._announced: dict[ReaderKey, Change] = {}
        self._more: dict[ReaderKey, int] = {}  # residencies beyond the first, where there are any
        self.unmatched = 0
        """Removals of what was never stored: a bug upstream, ignored."""

    def __len__(self) -> int:
        """Return how many residencies the reader knows."""
        return len(self._announced)

    def apply(self, events: Sequence[TierEvent]) -> list[Run]:
        """Count the events and return the changes to announce, in runs of one dp rank."""
        runs: list[Run] = []
        for event in events:
            if event.tier in self._hidden:
                continue
            for change in self._count(event):
                if not runs or runs[-1].rank != change.key.rank:
                    runs.append(Run(change.key.rank, []))
                runs[-1].changes.append(change)
        return runs

    def resident(self) -> Iterator[WireEvent]:
        """Yield the events that rebuild the present state in an empty reader, parents before children."""
        return (change.to_wire() for change in root_first(dict(self._announced)))

    def _count(self, event: TierEvent) -> Iterator[Change]:
        hashes = event.block.hashes
        if event.kind is EventKind.STORED:
            for index in range(len(hashes)):
                yield from self._stored(event, index, hashes[index])
        else:
            for event_hash in reversed(hashes):
                yield from self._removed(event, event_hash)

    def _key(self, event: TierEvent, event_hash: EventHash) -> ReaderKey:
        locality = event.locality if self._locality else None
        block = event.block
        return ReaderKey(block.dp_rank, event_hash, block.id.key.group, event.medium, locality)

    def _stored(self, event: TierEvent, index: int, event_hash: EventHash) -> Iterator[Change]:
        key = self._key(event, event_hash)
        if key in self._announced:
            self._more[key] = self._more.get(key, 0) + 1
            return
        change = Change(key, event.block, index, has_group(event.block))
        self._announced[key] = change
        yield change

    def _removed(self, event: TierEvent, event_hash: EventHash) -> Iterator[Change]:
        key = self._key(event, event_hash)
        if key in self._more:
            self._more[key] -= 1
            if not self._more[key]:
                del self._more[key]
        elif (announced := self._announced.pop(key, None)) is not None:
            yield Change(key, None, grouped=announced.grouped)
        else:
            self.unmatched += 1


def root_first(changes: Mapping[ReaderKey, Change]) -> Iterator[Change]:
    """Yield stores so that each comes after its parent, where that is among them.

    Lazy: the caller may stop between two changes, but must not alter the mapping meanwhile.
    """
    done: set[ReaderKey] = set()
    for first in changes:
        key: ReaderKey | None = first
        chain: list[Change] = []
        while key is not None and key not in done:
            done.add(key)  # before its parent, so that a cycle of parents ends too
            chain.append(changes[key])
            key = _parent_key(changes, changes[key])
        yield from reversed(chain)


def _parent_key(changes: Mapping[ReaderKey, Change], change: Change) -> ReaderKey | None:
    """Find the parent where the child is, else in any other tier: readers ask that it be known somewhere."""
    parent = change.parent
    if parent is None:
        return None
    near = change.key._replace(hash=parent)
    if near in changes:
        return near
    for medium in Medium:
        for locality in (None, *Locality):
            key = near._replace(medium=medium, locality=locality)
            if key in changes:
                return key
    return None

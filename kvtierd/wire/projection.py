"""What one audience sees: residencies counted under the reader's own key.

Several tiers can share a reader's key (two storage tiers of one locality), and so can several blocks
(overlapping chunks, two namespaces). A reader keeps a set, so it is told only when a count leaves 0 or
comes back to it. Events of another publisher (an engine's own, relayed) join the same counts; they are taken
as a set, so that a repeat says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from kvtierd.core.model import (
    GROUP_BYTES,
    Block,
    Common,
    EventHash,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    group_of,
)
from kvtierd.wire.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Form,
    WireEvent,
    foreign_block,
    has_group,
    removed,
    stored,
)
from kvtierd.wire.places import EVERY_RANK, Place, ReaderKey, place_of

DEVICE = "GPU"
MEDIA = (DEVICE, *(medium.value for medium in Medium))
_WIRE_MEDIA = (*MEDIA, "FS", "OBJ")
EVENT_BYTES = 256
"""Roughly what an event without token ids takes."""
_STORED = EventKind.STORED


@dataclass(frozen=True, slots=True)
class View:
    """What an audience wants to hear and how. Audiences of equal views can share all that is made of one.

    ``media``: only these (by kvtierd's names). ``removals``: whether it hears that a block left a tier.
    ``names``: tiers whose medium has another name on the wire. ``rank``: only this dp rank. ``each_rank``:
    blocks of the shared pool are announced for every attached dp rank, else once, for the rank that stored
    them. ``reannounce``: blocks are told again when a parent comes that readers did not know.
    """

    form: Form = Form.MAP
    tokens: bool = True
    media: frozenset[str] | None = None
    removals: bool = True
    one_block: bool = True
    names: tuple[tuple[str, str], ...] = ()
    rank: int | None = None
    each_rank: bool = False
    reannounce: bool = False


class Change(msgspec.Struct, gc=False):
    """A reader's key became resident (``block``: whose ``index``-th hash says it) or not (``block`` None).

    ``grouped``: whether the announcement carried the group, so that the removal does just that. ``told``:
    whether the reader hears it, or only the record of what is there changes. ``number``: of the batch that
    told it, once that fell off a log's ring; a place for it here costs nothing, a pair with it 64 bytes.
    """

    key: ReaderKey
    block: Block | None
    index: int = 0
    grouped: bool = True
    told: bool = True
    number: int = -1

    def to_wire(self, tokens: bool = True, raw: bool = False) -> WireEvent:
        """Return the event that tells it (``raw``: to be encoded as it is, see :func:`stored`)."""
        event_hash, place = self.key
        carried = place.group if self.grouped else None
        if self.block is not None:
            return stored(self.block, self.index, place.medium, place.locality, carried, tokens, raw)
        return removed(event_hash, carried, place.medium, place.locality)

    def of_rank(self, rank: int) -> Change:
        """Return the same change of another dp rank."""
        event_hash, place = self.key
        return Change((event_hash, place.of_rank(rank)), self.block, self.index, self.grouped, self.told)

    def undone(self, *, told: bool = True) -> Change:
        """Return the removal that takes this store back."""
        return Change(self.key, None, grouped=self.grouped, told=told)

    @property
    def place(self) -> Place:
        """Where it came or went."""
        return self.key[1]

    @property
    def parent(self) -> EventHash | None:
        """The event hash that must be known before this one."""
        if self.block is None:
            return None
        return self.block.hashes[self.index - 1] if self.index else self.block.parent

    @property
    def size(self) -> int:
        """Roughly how many bytes the event takes on the wire."""
        block = self.block
        if block is None:
            return EVENT_BYTES
        told_as = block.told_as
        return EVENT_BYTES + len(block.tokens) // (len(told_as) if told_as.__class__ is tuple else 1)


class Run(NamedTuple):
    """Changes of one dp rank that follow each other; they travel in one or several batches of their own."""

    rank: int
    changes: list[Change]


class Watcher(Protocol):
    """Who looks at a projection's changes as they are made."""

    def stored(self, change: Change) -> Iterator[Change]:
        """Note a store; yield what must be told after it."""
        ...

    def removed(self, change: Change) -> None:
        """Note that this store has been taken back."""
        ...


class Projection:
    """Turns tier events in drain order, and another publisher's events, into what a reader must hear."""

    def __init__(self, view: View | None = None) -> None:
        self.view = view = view if view is not None else View()
        self._locality = view.form is Form.MAP
        self._names = dict(view.names)
        self.announced: dict[ReaderKey, Change] = {}
        """All that readers know; to be read only."""
        self._more: dict[ReaderKey, int] = {}  # residencies beyond the first, where there are any
        self._foreign: set[ReaderKey] = set()
        self.watcher: Watcher | None = None
        """Sees all changes, and may have more told."""
        self.unmatched = 0
        """Removals of what was never stored: a bug upstream, ignored."""
        self.foreign_repeats = 0
        """Another publisher's stores of what it had, and removals of what it had not."""

    def __len__(self) -> int:
        """Return how many residencies the reader knows."""
        return len(self.announced)

    @property
    def foreign(self) -> int:
        """How many residencies another publisher announced."""
        return len(self._foreign)

    def apply(self, events: Sequence[TierEvent]) -> list[Change]:
        """Count the events and return the changes to announce, in the same order."""
        announced, changes = self.announced, list[Change]()
        plain, removals = self.watcher is None, self.view.removals
        tier: str | None = None
        where: Medium | None = None
        how: Locality | None = None
        common: Common | None = None
        tail = b""
        place: Place | None = None
        grouped = True
        for event in events:
            block = event.block
            # The same for many in a row, and the same objects: to look for these costs half.
            if (
                event.tier is not tier
                or common is not block.common
                or tail != block.key[-GROUP_BYTES:]
                or event.medium is not where
                or event.locality is not how
            ):
                tier, where, how = event.tier, event.medium, event.locality
                common, tail = block.common, block.key[-GROUP_BYTES:]
                place, grouped = self._place(event), has_group(block)
            if place is None:
                continue
            told_as = block.told_as
            if isinstance(told_as, tuple):
                self._several(event, [(each, place) for each in block.hashes], grouped, changes)
                continue
            key = told_as, place
            if event.kind is _STORED:
                change = Change(key, block, 0, grouped)
                if plain and announced.setdefault(key, change) is change:
                    changes.append(change)
                else:
                    self._stored(key, change, changes)
            elif key in announced:
                self._removed(key, changes, told=removals)
            else:
                self.unmatched += 1
        return changes

    def _several(self, event: TierEvent, keys: list[ReaderKey], grouped: bool, changes: list[Change]) -> None:
        """Count an event of a block that readers know as several."""
        if event.kind is _STORED:
            for index, key in enumerate(keys):
                self._stored(key, Change(key, event.block, index, grouped), changes)
            return
        for key in reversed(keys):
            if key in self.announced:
                self._removed(key, changes, told=self.view.removals)
            else:
                self.unmatched += 1

    def _place(self, event: TierEvent) -> Place | None:
        """Return where an event's block is to readers, ``None`` if they do not want to hear of it."""
        view, block, medium, locality = self.view, event.block, event.medium.value, event.locality
        rank = EVERY_RANK if view.each_rank else block.common.dp_rank
        if view.media is not None and medium not in view.media:
            return None
        if view.rank is not None and rank not in (view.rank, EVERY_RANK):
            return None
        said = locality.value if self._locality and locality is not None else None
        return place_of(rank, group_of(block.key), self._names.get(event.tier) or medium, said)

    def inject(self, rank: int, events: Sequence[WireEvent]) -> list[Change]:
        """Take another publisher's events of one dp rank; return the changes to announce."""
        changes = list[Change]()
        if self.view.rank is not None and self.view.rank != rank:
            return changes
        for event in events:
            if isinstance(event, AllBlocksCleared):
                mine = [key for key in self._foreign if key[1].rank == rank]
                for key in _leaf_first(self.announced, mine):
                    self._left(key, changes)
                continue
            medium = (event.medium or DEVICE).upper()
            if self.view.media is not None and medium not in self.view.media:
                continue
            place = place_of(rank, event.group_idx or 0, medium, event.locality if self._locality else None)
            keys = [(event_hash, place) for event_hash in event.block_hashes]
            if isinstance(event, BlockStored):
                self._came(keys, event, rank, changes)
            elif isinstance(event, BlockRemoved):
                for key in keys:
                    self._left(key, changes)
        return changes

    def resident(self) -> Iterator[WireEvent]:
        """Yield the events that rebuild the present state in an empty reader, parents before children."""
        return (change.to_wire() for change in root_first(dict(self.announced)))

    def _stored(self, key: ReaderKey, change: Change, changes: list[Change]) -> None:
        if self.announced.setdefault(key, change) is not change:
            self._more[key] = self._more.get(key, 0) + 1
            return
        changes.append(change)
        if self.watcher is not None:
            changes.extend(self.watcher.stored(change))

    def _removed(self, key: ReaderKey, changes: list[Change], *, told: bool) -> None:
        if key in self._more:
            self._more[key] -= 1
            if not self._more[key]:
                del self._more[key]
            return
        change = self.announced.pop(key)
        if self.watcher is not None:
            self.watcher.removed(change)
        changes.append(change.undone(told=told))

    def _came(self, keys: list[ReaderKey], event: BlockStored, rank: int, changes: list[Change]) -> None:
        block = foreign_block(event, rank)
        for index, key in enumerate(keys):
            if key in self._foreign:
                self.foreign_repeats += 1
                continue
            self._foreign.add(key)
            self._stored(key, Change(key, block, index, has_group(block)), changes)

    def _left(self, key: ReaderKey, changes: list[Change]) -> None:
        if key not in self._foreign:
            self.foreign_repeats += 1
            return
        self._foreign.remove(key)
        self._removed(key, changes, told=True)


def runs_of(changes: Sequence[Change]) -> list[Run]:
    """Cut changes where the dp rank changes; the order stays."""
    if len({change.key[1] for change in changes}) == 1:
        return [Run(changes[0].place.rank, [*changes])]
    runs: list[Run] = []
    for change in changes:
        rank = change.place.rank
        if not runs or runs[-1].rank != rank:
            runs.append(Run(rank, []))
        runs[-1].changes.append(change)
    return runs


def root_first(changes: Mapping[ReaderKey, Change]) -> Iterator[Change]:
    """Yield stores so that each comes after its parent, where that is among them.

    Lazy: the caller may stop between two changes, but must not alter the mapping meanwhile.
    """
    done: set[ReaderKey] = set()
    for first in changes:
        yield from unknown_ancestry(changes, first, done)


def unknown_ancestry(
    changes: Mapping[ReaderKey, Change], key: ReaderKey, known: set[ReaderKey]
) -> Iterator[Change]:
    """Yield what of a key's chain is not in ``known``, root first, itself last; adds it to ``known``."""
    chain: list[Change] = []
    at: ReaderKey | None = key
    while at is not None and at not in known:
        known.add(at)  # before its parent, so that a cycle of parents ends too
        chain.append(changes[at])
        at = parent_key(changes, changes[at])
    yield from reversed(chain)


def _leaf_first(changes: Mapping[ReaderKey, Change], keys: Sequence[ReaderKey]) -> list[ReaderKey]:
    chosen = {key: changes[key] for key in keys}
    return [change.key for change in reversed(list(root_first(chosen)))]


def parent_key(changes: Mapping[ReaderKey, Change], change: Change) -> ReaderKey | None:
    """Find the parent where the child is, else in any other tier: readers ask that it be known somewhere.

    An engine's block may have its parent in the pool that all ranks share.
    """
    parent = change.parent
    if parent is None:
        return None
    place = change.place
    near = parent, place
    if near in changes:
        return near
    for medium in dict.fromkeys((place.medium, *_WIRE_MEDIA)):
        for locality in (None, *(locality.value for locality in Locality)):
            other = parent, place_of(place.rank, place.group, medium, locality)
            if other in changes:
                return other
    return None

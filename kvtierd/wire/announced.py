"""What readers were told, tier by tier, and how a restart's difference reaches them.

The set survives the daemon in a journal (:mod:`kvtierd.wire.records` is its form). At the next start:

* CPU entries are taken back at once, unless the pool survived; so are those of tiers that left the tier file
  or changed their labels, with the labels that were told, and those that were told in the last moments before
  a crash and may not have got out (they come back as stores when they are found).
* The other entries stay *unconfirmed* until their tier's scan ends (the pool's: until all that survived of
  it has been stored again): a store of one changes nothing for a
  reader and is swallowed; what the scan did not find is taken back when it ends, before the scan's stores.
  A tier that is only known by asking (a shared bucket, whose scan yields nothing) loses all its entries
  then, and tells of each again when it is found: the daemon's inventory does just that.
* Without a record (or with one that may lack its end) what a first scan finds is removed, then stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtierd.core.model import Block, BlockId, BlockKey, EventKind, Locality, Medium, TierEvent
from kvtierd.wire.block_map import BlockMap

_STORED = EventKind.STORED


class TierLabel(NamedTuple):
    """What events say of a tier; equal labels are the same tier across restarts."""

    name: str
    medium: Medium
    locality: Locality | None


@dataclass(slots=True)
class History:
    """What a journal says was told before.

    ``entries``: in the order of their announcement. ``doubts``: changes of the last moments, stores and
    removals alike, that readers may not have got. ``whole``: False if more may have been told than it says.
    """

    entries: dict[TierLabel, dict[BlockId, Block]] = field(default_factory=dict)
    doubts: list[tuple[TierLabel, Block]] = field(default_factory=list)
    whole: bool = True


class Told(NamedTuple):
    """What to do about readers: count ``seeds`` (stores that they know, or may), then send ``events``."""

    seeds: list[TierEvent]
    events: list[TierEvent]


class Announced:
    """The residencies that readers know of. ``tiers``: those whose events are on, in drain order.

    ``pool_survived``: whether CPU entries are to be found again like those of other tiers.
    """

    def __init__(
        self, tiers: Sequence[TierLabel], history: History | None, *, pool_survived: bool = False
    ) -> None:
        self._pool_survived = pool_survived
        self._labels = {label.name: label for label in tiers}
        self._told = {label.name: BlockMap() for label in tiers}
        self._unconfirmed: dict[str, BlockMap] = {}
        self._suspect: set[str] = set()
        self._history = history
        if history is None or not history.whole:
            self._suspect = {label.name for label in tiers if self._outlives(label)}
        self.confirmed = 0
        """Entries of before that were found again."""
        self.repeated = 0
        """Stores of what was told already: a bug upstream, ignored."""
        self.unmatched = 0
        """Removals of what was never told: ignored."""

    def __len__(self) -> int:
        return sum(map(len, self._told.values())) + self.unconfirmed

    @property
    def unconfirmed(self) -> int:
        """How many entries of before wait for their tier's scan to end."""
        return sum(map(len, self._unconfirmed.values()))

    def holding(self, label: TierLabel, block_id: BlockId) -> Block | None:
        """Return the block if readers know of it in that tier."""
        if self._labels.get(label.name) != label:
            return None
        block = self._told[label.name].get(block_id)
        if block is None and label.name in self._unconfirmed:
            block = self._unconfirmed[label.name].get(block_id)
        return block

    def residencies(self) -> Iterator[tuple[TierLabel, BlockId]]:
        """Iterate over what readers know of as of now, each tier's in the order of its announcement."""
        history = self._history.entries if self._history is not None else {}
        parts = [(label, list(blocks.values())) for label, blocks in history.items()]
        parts += ((self._labels[name], list(blocks)) for name, blocks in self._known())
        return ((label, block.id) for label, blocks in parts for block in blocks)

    def stores(self) -> list[TierEvent]:
        """Return the stores that tell all that readers know of, each tier's in the order of announcement."""
        return [
            TierEvent(EventKind.STORED, *self._labels[name], block)
            for name, blocks in self._known()
            for block in blocks
        ]

    def known(self, tier: str, block: Block) -> Block:
        """Return the entry of before if it says the same as a block just found, so that one can go."""
        unconfirmed = self._unconfirmed.get(tier)
        known = unconfirmed.get(block.id) if unconfirmed is not None else None
        return known if known is not None and known == block else block

    def _known(self) -> Iterator[tuple[str, BlockMap]]:
        """Yield what readers know of each tier, the earlier first."""
        for name in self._labels:
            if name in self._unconfirmed:
                yield name, self._unconfirmed[name]
            yield name, self._told[name]

    def begin(self) -> Told:
        """Take over what was told before; to be called once, before anything else."""
        history, self._history = self._history or History(), None
        seeds = [
            TierEvent(EventKind.STORED, *label, block)
            for label, blocks in history.entries.items()
            for block in blocks.values()
        ]
        removals: list[TierEvent] = []
        doubts: dict[TierLabel, dict[BlockId, None]] = {}
        for label, block in history.doubts:
            if history.entries.get(label, {}).get(block.id) is block:
                doubts.setdefault(label, {})[block.id] = None
            else:  # removed, or stored anew: whether readers know that is open
                seeds.append(TierEvent(EventKind.STORED, *label, block))
                removals.append(TierEvent(EventKind.REMOVED, *label, block))
        removals.reverse()
        for label, blocks in sorted(
            history.entries.items(), key=lambda item: item[0].medium is not Medium.CPU
        ):
            stays = history.whole and self._outlives(label) and self._labels.get(label.name) == label
            leaving = doubts.get(label, {}) if stays else blocks
            removals += _removals(label, [block for key, block in blocks.items() if key in leaving])
            if stays:
                self._unconfirmed[label.name] = BlockMap(b for k, b in blocks.items() if k not in leaving)
        return Told(seeds, removals)

    def advance(self, events: Iterable[TierEvent], *, scanned: Iterable[str] = ()) -> Told:
        """Take in one turn's events and the tiers whose scan ended with it; return what to tell readers.

        Removals of what is told anew, or was not found, come first, leaf first.
        """
        told = Told([], [])
        again: list[TierEvent] = []
        plain = not self._unconfirmed and not self._suspect
        tier, common, blocks = "", None, dict[BlockKey, Block]()
        for event in events:
            if event.kind is _STORED:
                if not plain:
                    self._stored(event, told, again)
                    continue
                block = event.block
                if common is not block.common or tier != event.tier:  # the same for many in a row
                    tier, common = event.tier, block.common
                    blocks = self._told[tier].of(common.namespace)
                if block.key in blocks:
                    self.repeated += 1
                else:
                    blocks[block.key] = block
                    told.events.append(event)
            else:
                self._removed(event, told)
        again.reverse()
        for name in scanned:
            self._suspect.discard(name)
            if missing := self._unconfirmed.pop(name, None):
                again += _removals(self._labels[name], list(missing))
        return Told(told.seeds, again + told.events) if again else told

    def _outlives(self, label: TierLabel) -> bool:
        """Whether what is in a tier can have outlived the process."""
        return label.medium is not Medium.CPU or self._pool_survived

    def _stored(self, event: TierEvent, told: Told, again: list[TierEvent]) -> None:
        block = event.block
        blocks = self._told[event.tier].of(block.common.namespace)
        if block.key in blocks:
            self.repeated += 1
            return
        old = self._unconfirmed[event.tier].pop(block) if event.tier in self._unconfirmed else None
        blocks[block.key] = block
        if old is not None:
            if old == block:
                self.confirmed += 1
                return
            again.append(TierEvent(EventKind.REMOVED, event.tier, event.medium, event.locality, old))
        elif event.tier in self._suspect:
            told.seeds.append(event)
            again.append(TierEvent(EventKind.REMOVED, event.tier, event.medium, event.locality, block))
        told.events.append(event)

    def _removed(self, event: TierEvent, told: Told) -> None:
        old = self._told[event.tier].pop(event.block)
        if old is None and event.tier in self._unconfirmed:
            old = self._unconfirmed[event.tier].pop(event.block)
        if old is None:
            self.unmatched += 1
        elif old is event.block:
            told.events.append(event)
        else:  # with the words that told of it
            told.events.append(TierEvent(EventKind.REMOVED, event.tier, event.medium, event.locality, old))


def _removals(label: TierLabel, blocks: Sequence[Block]) -> Iterator[TierEvent]:
    """Yield removals in reverse order of announcement: each block had its parent told before itself."""
    return (TierEvent(EventKind.REMOVED, *label, block) for block in reversed(blocks))

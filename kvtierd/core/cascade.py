"""From the pool down: writes of committed blocks to every secondary, within budget and capacity.

A block waits in its tier's ``wanted`` queue, unpinned, until there is budget and room; if the pool evicts it
before, its copy for that tier is dropped and counted. So a slow tier never holds the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvtierd.core.effects import BlockAt, Write
from kvtierd.core.model import BlockId, EventKind
from kvtierd.core.residency import Node, State, root_first
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.core.tier import SecondaryTier

WRITE_BATCH = 64
WANTED_LIMIT = 1 << 20


class Cascade:
    """Writes to the secondaries and the evictions there that make room."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def want(self, ids: Iterable[BlockId], tiers: tuple[str, ...] | None) -> None:
        """Ask for copies of pool blocks in the named secondaries (``None``: all), root first."""
        ids = list(ids)
        for tier in self._stack.secondaries:
            if tiers is not None and tier.name not in tiers:
                continue
            for block_id in ids:
                if tier.resident(block_id) is None:
                    tier.wanted[block_id] = None
            while len(tier.wanted) > WANTED_LIMIT:
                tier.wanted.popitem(last=False)
                tier.counters["cascade_dropped_queue_full"] += 1
            self.pump(tier)

    def pump(self, tier: SecondaryTier) -> None:
        """Start one write of what is wanted, as far as budget and room allow; make room where it is short.

        One write at a time for each tier, so that its stores are announced root first; the workers share its
        blocks. Nothing is written while the tier's scan runs: only then is it known what it holds already.
        """
        if tier.scanning or tier.in_flight:
            return
        batch: list[tuple[Node, Node]] = []
        while tier.wanted and self._fill(tier, batch) and not batch:
            pass  # all of them were dropped: look further
        if batch:
            self._start(tier, batch)

    def _fill(self, tier: SecondaryTier, batch: list[tuple[Node, Node]]) -> bool:
        """Look at the head of the queue; ``False`` when nothing left it or the next has to wait."""
        before = len(tier.wanted)
        for block_id in list(itertools.islice(tier.wanted, WRITE_BATCH)):
            source = self._stack.primary.resident(block_id)
            if source is None or tier.resident(block_id) is not None:
                del tier.wanted[block_id]
                tier.counters["cascade_dropped_evicted"] += source is None
            elif not tier.busy(block_id) and not self._admit(tier, source, batch):
                return False
        return len(tier.wanted) < before

    def _admit(self, tier: SecondaryTier, source: Node, batch: list[tuple[Node, Node]]) -> bool:
        """Add one block to the batch; ``False`` when it has to wait for budget or deletions."""
        size = tier.spec.estimate(source.block)
        if tier.in_flight and tier.in_flight + size > tier.spec.budget:
            return False
        node = Node(source.block, State.WRITING, size=size)
        node.pins = 1
        tier.blocks.add(node)  # from here on its parent is no candidate for eviction
        if not tier.fits(size):
            room_comes = self._make_room(tier, size)
            tier.blocks.remove(node)
            if room_comes:
                return False
            del tier.wanted[source.block.id]
            tier.counters["cascade_dropped_no_room"] += 1
            return True
        del tier.wanted[source.block.id]
        tier.writing += size
        tier.in_flight += size
        self._stack.primary.space_of(source).blocks.pin(source)
        batch.append((node, source))
        return True

    def _make_room(self, tier: SecondaryTier, size: int) -> bool:
        """Evict for ``size`` bytes and, in the same deletion, for what waits behind; whether it will fit."""
        capacity = tier.spec.capacity
        assert capacity is not None
        if size > capacity:
            return False
        ahead = max(size, min(size * len(tier.wanted), size * WRITE_BATCH, capacity // 16))
        self.trim(tier, capacity - ahead - tier.writing)
        return tier.used + tier.writing + size <= capacity

    def trim(self, tier: SecondaryTier, limit: int) -> None:
        """Evict leaves until at most ``limit`` bytes are resident or no leaf is left."""
        victims: list[BlockId] = []
        while tier.used > limit and (victim := tier.blocks.victim()) is not None:
            self._stack.retire(tier, victim)
            tier.counters["evictions"] += 1
            victims.append(victim.block.id)
        self._stack.start_delete(tier, victims)

    def _start(self, tier: SecondaryTier, batch: list[tuple[Node, Node]]) -> None:
        nodes = tuple(node for node, _ in batch)
        sources = tuple(source for _, source in batch)
        op = self._stack.begin(Operation("write", tier, nodes, sources))
        blocks = tuple(BlockAt(source.block, source.slot) for source in sources)
        self._stack.effects.append(Write(op, tier.name, blocks))

    def wrote(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        """Take a write's outcomes: visible and announced, or gone as if never tried."""
        tier = operation.tier
        for node, source, outcome in zip(operation.nodes, operation.sources, outcomes, strict=True):
            self._stack.primary.unpin(source)
            tier.writing -= node.size
            tier.in_flight -= node.size
            node.pins -= 1
            self._settle(tier, node, outcome)
        self.pump(tier)

    def _settle(self, tier: SecondaryTier, node: Node, outcome: Outcome) -> None:
        block_id = node.block.id
        doomed = block_id in tier.doomed
        tier.doomed.discard(block_id)
        if outcome.status is not Status.OK:
            tier.blocks.remove(node)
            tier.counters[f"write_{outcome.status.value}"] += 1
            tier.last_fault = outcome.reason or outcome.status.value
            return
        node.size = outcome.stored_bytes
        if doomed:  # evicted while it was on its way: never announced, only deleted
            tier.blocks.remove(node)
            tier.deletes[block_id] = node.size
            tier.deleting += node.size
            self._stack.start_delete(tier, [block_id])
            return
        tier.insert(node)
        tier.blocks.offer(node)

    def deleted(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        """Take a deletion's outcomes: the bytes are free. What could not be deleted is counted."""
        tier = operation.tier
        for outcome in outcomes:
            tier.deleting -= tier.deletes.pop(outcome.id)
            if outcome.status not in (Status.OK, Status.GONE):
                tier.counters["delete_failed"] += 1
                tier.last_fault = outcome.reason or outcome.status.value
        self.pump(tier)

    def found(self, tier: SecondaryTier, blocks: Sequence[FoundBlock]) -> None:
        """Index a part of a tier's scan: hits at once, announced when the scan ends."""
        for found in blocks:
            block_id = found.block.id
            if tier.blocks.get(block_id) is not None or block_id in tier.removed_in_scan:
                continue
            node = Node(found.block, State.RESIDENT, size=found.stored_bytes)
            tier.blocks.add(node)
            tier.used += node.size
            tier.unannounced[block_id] = None

    def scanned(self, tier: SecondaryTier) -> None:
        """End a tier's scan: announce what it found, root first, then trim to the capacity."""
        tier.scanning = False
        nodes = [tier.blocks.nodes[block_id] for block_id in tier.unannounced]
        tier.unannounced.clear()
        tier.removed_in_scan.clear()
        for node in root_first(nodes):
            tier.announce(EventKind.STORED, node.block)
        if tier.spec.capacity is not None:
            self.trim(tier, tier.spec.capacity)
        self.pump(tier)

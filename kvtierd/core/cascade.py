"""From the pool down: writes of committed blocks to every secondary, within budget and capacity.

A block waits in its tier's ``wanted`` queue, unpinned, until there is budget and room; if the pool evicts it
before, its copy for that tier is dropped and counted. So a slow tier never holds the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvtierd.core.effects import BlockAt, Write
from kvtierd.core.model import BlockId, BlockKey, Departure, State, block_ids
from kvtierd.core.residency import PoolNode, StoredNode, root_first
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import Outcome, Status
from kvtierd.core.tier import PoolSpace, SecondaryTier
from kvtierd.core.upkeep import WRITE_BATCH, Upkeep

WANTED_LIMIT = 1 << 20
RETRIED_LIMIT = 1 << 16
SPARE_SLOTS = 16
"""With a tier that is written on eviction, one slot in so many is kept free by writing ahead."""


class Cascade:
    """Writes to the secondaries, one at a time for each, as far as the tier's gate allows."""

    def __init__(self, stack: Stack, upkeep: Upkeep) -> None:
        self._stack = stack
        self._upkeep = upkeep
        self._demoting = [tier for tier in stack.secondaries if tier.spec.on_evict]

    def demote_all(self) -> None:
        """Do :meth:`demote` for every layout, if some tier is written on eviction."""
        if self._demoting:
            for space in self._stack.primary.spaces.values():
                self.demote(space)

    def want(self, namespace: str, keys: Iterable[BlockKey], tiers: tuple[str, ...] | None) -> None:
        """Ask for copies of pool blocks in the named secondaries (``None``: all), root first."""
        ids: list[BlockId] = []
        for tier in self._stack.secondaries:
            if (tiers is None or tier.name in tiers) and not tier.spec.on_evict:
                ids = ids or block_ids(namespace, keys)
                self._enqueue(tier, ids)
                self.pump(tier)

    def _enqueue(self, tier: SecondaryTier, ids: Iterable[BlockId]) -> None:
        for block_id in ids:
            if tier.resident(block_id) is not None or block_id in tier.wanted:
                continue
            source = self._stack.primary.get(block_id)
            if source is None:
                continue
            size = source.block.payload_bytes
            if not tier.gate.takes_more(len(tier.wanted) * size + tier.in_flight):
                tier.counters["cascade_dropped_slow"] += 1
            elif len(tier.wanted) >= WANTED_LIMIT:
                tier.counters["cascade_dropped_queue_full"] += 1
            else:
                tier.wanted[block_id] = None

    def write_down(self) -> None:
        """Have what only the pool holds written to the tiers that are otherwise written on eviction."""
        for tier in self._demoting:
            for space in self._stack.primary.spaces.values():
                for node in root_first(node for node in space.blocks if node.state is State.RESIDENT):
                    if tier.resident(node.block.id) is None and len(tier.wanted) < WANTED_LIMIT:
                        tier.wanted.setdefault(node.block.id)
            self.pump(tier)

    def demote(self, space: PoolSpace) -> None:
        """Keep some slots free for a tier that is written on eviction: write the next victims, then evict."""
        missing = max(1, space.arena.slots // SPARE_SLOTS) - space.arena.free_slots
        if missing <= 0 or space.arena.can_grow():
            return
        wished = min(missing, WRITE_BATCH)
        if self._fewest_leaving(space) >= wished:
            return  # they are on their way; a slow tier costs the turns nothing
        victims: list[PoolNode] = []
        while len(victims) < wished and (victim := space.blocks.victim()) is not None:
            space.blocks.pin(victim)  # so that the next one is another
            victims.append(victim)
        for victim in victims:
            space.blocks.unpin(victim)
            self._demote(victim)
        for tier in self._demoting:
            self.pump(tier)

    def _fewest_leaving(self, space: PoolSpace) -> int:
        return min(len(tier.leaving.get(space.namespace, ())) for tier in self._demoting)

    def _demote(self, victim: PoolNode) -> None:
        block_id = victim.block.id
        absent = [tier for tier in self._demoting if tier.resident(block_id) is None]
        if not absent:
            self._stack.primary.forget(victim, Departure.CAPACITY)
        for tier in absent:
            leaving = tier.leaving.setdefault(block_id.namespace, set())
            if len(leaving) < WRITE_BATCH:
                leaving.add(block_id)
                tier.wanted.setdefault(block_id)

    def pump(self, tier: SecondaryTier) -> None:
        """Start one write of what is wanted, as far as budget and room allow; make room where it is short.

        One write at a time for each tier, so that its stores are announced root first; the workers share its
        blocks. Nothing is written while the tier's scan runs: only then is it known what it holds already.
        """
        if tier.scanning or tier.in_flight or not tier.gate.may_write(self._stack.now):
            return
        batch: list[tuple[StoredNode, PoolNode]] = []
        while tier.wanted and self._fill(tier, batch) and not batch:
            pass  # all of them were dropped: look further
        if batch:
            self._start(tier, batch)

    def _fill(self, tier: SecondaryTier, batch: list[tuple[StoredNode, PoolNode]]) -> bool:
        """Look at the head of the queue; ``False`` when nothing left it or the next has to wait."""
        before = len(tier.wanted)
        for block_id in list(itertools.islice(tier.wanted, WRITE_BATCH)):
            source = self._stack.primary.get(block_id)
            if source is not None and source.state is State.LOADING:
                continue  # its turn comes when the promotion ended
            if source is None or source.state is not State.RESIDENT or tier.resident(block_id) is not None:
                tier.unwant(block_id)
                tier.counters["cascade_dropped_evicted"] += source is None
            elif not tier.busy(block_id) and not self._admit(tier, source, batch):
                return False
        return len(tier.wanted) < before

    def _admit(self, tier: SecondaryTier, source: PoolNode, batch: list[tuple[StoredNode, PoolNode]]) -> bool:
        """Add one block to the batch; ``False`` when it has to wait for budget or deletions."""
        size = tier.spec.estimate(source.block)
        if tier.in_flight and tier.in_flight + size > tier.gate.write_limit():
            return False
        node = StoredNode(source.block, State.WRITING, size=size)
        node.pins = 1
        tier.add(node)  # from here on its parent is no candidate for eviction
        if not tier.fits(size):
            room_comes = self._upkeep.make_room(tier, node)
            tier.remove(node)
            if room_comes:
                return False
            tier.unwant(source.block.id)
            tier.counters["cascade_dropped_no_room"] += 1
            return True
        del tier.wanted[source.block.id]
        tier.writing += size
        tier.in_flight += size
        self._stack.primary.space_of(source).blocks.pin(source)
        batch.append((node, source))
        return True

    def _start(self, tier: SecondaryTier, batch: list[tuple[StoredNode, PoolNode]]) -> None:
        nodes = tuple(node for node, _ in batch)
        sources = tuple(source for _, source in batch)
        op = self._stack.begin(Operation("write", tier, pooled=sources, stored=nodes))
        blocks = tuple(BlockAt(source.block, source.slot) for source in sources)
        self._stack.effects.append(Write(op, tier.name, blocks))
        tier.gate.writes.started()

    def wrote(self, operation: Operation, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Take a write's outcomes: visible and announced, or gone as if never tried."""
        tier = operation.tier
        size = tier.in_flight
        for node, source, outcome in zip(operation.stored, operation.pooled, outcomes, strict=True):
            self._stack.primary.unpin((source,))
            tier.writing -= node.size
            tier.in_flight -= node.size
            node.pins -= 1
            self._settle(tier, node, outcome)
            self._left(tier, source)
        good = any(outcome.status is Status.OK for outcome in outcomes)
        tier.gate.writes.ended(self._stack.now, None if good else tier.last_fault)
        if good:
            tier.gate.wrote(size, seconds)
        self._upkeep.relieve(tier, outcomes)
        self.pump(tier)

    def _left(self, tier: SecondaryTier, source: PoolNode) -> None:
        """Evict a block from the pool that was written for that reason, if it may still go."""
        if tier.left(source.block.id):
            space = self._stack.primary.space_of(source)
            if tier.resident(source.block.id) is not None and space.blocks.evictable(source):
                self._stack.primary.forget(source, Departure.CAPACITY)

    def _failed(self, tier: SecondaryTier, node: StoredNode, outcome: Outcome) -> None:
        """Count a block that was not written; it gets one more try as long as the pool has it."""
        block_id = node.block.id
        tier.counters[f"write_{outcome.status.value}"] += 1
        tier.last_fault = outcome.reason or outcome.status.value
        if block_id in tier.retried:
            tier.retried.discard(block_id)
            tier.counters["cascade_dropped_failed"] += 1
            return
        if len(tier.retried) >= RETRIED_LIMIT:
            tier.retried.clear()
        tier.retried.add(block_id)
        tier.wanted[block_id] = None

    def _settle(self, tier: SecondaryTier, node: StoredNode, outcome: Outcome) -> None:
        block_id = node.block.id
        doomed = block_id in tier.doomed
        tier.doomed.discard(block_id)
        if outcome.status is not Status.OK:
            tier.remove(node)
            if not doomed:
                self._failed(tier, node, outcome)
            return
        tier.retried.discard(block_id)
        tier.unstick(block_id)
        tier.resize(node, outcome.stored_bytes)
        if doomed:  # evicted while it was on its way: never announced, only deleted
            tier.remove(node)
            tier.asked.pop(block_id, None)
            tier.deletes[block_id] = node.size
            tier.deleting += node.size
            self._stack.start_delete(tier, [block_id])
            return
        tier.show(node, self._stack.now)
        tier.blocks.offer(node)

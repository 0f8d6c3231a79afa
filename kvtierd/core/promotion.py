"""From a secondary up into the pool: one read for each absent block, however many wait for it.

Promotions that nobody reads yet (asked for by a lookup or a prefetch) are kept for ``GRACE`` seconds.
Together with the reads under way they may take half of a layout's slots, so that they never flush the pool;
a load that needs more goes on in waves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtierd.core.effects import BlockAt, Read
from kvtierd.core.model import BlockId, BlockKey, Departure, State, group_of
from kvtierd.core.residency import PoolNode, StoredNode
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import Outcome, Status
from kvtierd.core.tier import PoolSpace, SecondaryTier

GRACE = 5.0
SHARE = 0.5


@dataclass(slots=True)
class Readable:
    """A tier that may be read now: its index, and how many bytes it gives before a hit takes too long.

    ``cold``: how many blocks a lookup found there.
    """

    tier: SecondaryTier
    find: Callable[[BlockKey], StoredNode | None]
    room: float
    cold: int = 0


class Promotion:
    """Reads from the secondaries into pool slots.

    ``settled`` is called for every node that a load waits for when its read ended, well or not.
    """

    def __init__(self, stack: Stack, settled: Callable[[PoolNode], None]) -> None:
        self._stack = stack
        self._settled = settled
        self._batches: dict[str, list[tuple[PoolNode, StoredNode]]] = {}
        self.grace: dict[PoolNode, float] = {}
        """Promoted blocks that are pinned until they are read, or until the time given."""
        self.counted: set[PoolNode] = set()
        """Blocks whose hit was counted when a lookup began their promotion: who asks next asks again."""

    def readable(self, namespace: str, tiers: tuple[str, ...] | None) -> list[Readable]:
        """Return the secondaries (of those named) that may be read now, in the order of the stack."""
        now = self._stack.now
        return [
            Readable(tier, tier.blocks.of(namespace).get, tier.loading.room(now))
            for tier in self._stack.secondaries
            if (tiers is None or tier.name in tiers) and tier.gate.may_read(now)
        ]

    def source(
        self, space: PoolSpace, block_id: BlockId, tiers: tuple[str, ...] | None
    ) -> SecondaryTier | None:
        """Return the first secondary (of those named) that can serve the block."""
        for tier in self._stack.secondaries:
            if tiers is not None and tier.name not in tiers:
                continue
            node = tier.resident(block_id)
            if node is None or not tier.gate.may_read(self._stack.now):
                continue
            size = node.block.payload_bytes
            if size != space.geometry.payload_bytes[group_of(block_id.key)]:
                tier.counters["wrong_size"] += 1
            elif tier.loading.room(self._stack.now) < size:
                tier.counters["declined_slow"] += 1
            else:
                return tier
        return None

    def full(self, space: PoolSpace) -> bool:
        """Whether the layout's promotion budget is used up."""
        return space.promoting >= max(1, int(space.most_slots() * SHARE))

    def start(self, space: PoolSpace, block_id: BlockId, tier: SecondaryTier) -> PoolNode | None:
        """Reserve a slot and note the read; ``None`` when the pool has no room. :meth:`flush` sends it."""
        if self.full(space):
            self._stack.primary.counters["promotion_over_budget"] += 1
            return None
        below = tier.blocks.known(block_id)
        tier.blocks.pin(below)  # neither may the room made in the pool ever cost the source
        node = PoolNode(below.block, State.LOADING, generation=self._stack.next_generation())
        node.pins = 1
        space.blocks.add(node)
        space.unread[block_id.key] = tier.name
        slot = self._stack.take_slot(space)
        if slot is None:
            space.blocks.remove(node)
            space.unread.pop(block_id.key, None)
            tier.blocks.unpin(below)
            self._stack.primary.counters["promotion_no_room"] += 1
            return None
        node.slot = slot
        space.promoting += 1
        tier.loading.started(node.block.payload_bytes, self._stack.now)
        tier.blocks.touch(below)
        tier.used_at(block_id, self._stack.now)
        self._batches.setdefault(tier.name, []).append((node, below))
        return node

    def flush(self) -> None:
        """Send the noted reads, one effect for each tier."""
        for name, batch in self._batches.items():
            tier = self._stack.by_name[name]
            operation = Operation("read", tier, tuple(n for n, _ in batch), tuple(b for _, b in batch))
            op = self._stack.begin(operation)
            blocks = tuple(BlockAt(node.block, node.slot) for node, _ in batch)
            self._stack.effects.append(Read(op, name, blocks))
            tier.gate.reads.started()
        self._batches = {}

    def read(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        """Take a read's outcomes: visible in the pool, or never there."""
        tier = operation.tier
        answered = any(outcome.status is not Status.FAILED for outcome in outcomes)
        fault = next((outcome.reason for outcome in outcomes), "") or "reads fail"
        tier.gate.reads.ended(self._stack.now, None if answered else fault)
        asked = sum(node.block.payload_bytes for node in operation.pooled)
        good = (outcome.status is Status.OK for outcome in outcomes)
        came = sum(node.block.payload_bytes for node, ok in zip(operation.pooled, good, strict=True) if ok)
        tier.loading.ended(asked, came, self._stack.now)
        corrupt: list[StoredNode] = []
        for node, below, outcome in zip(operation.pooled, operation.stored, outcomes, strict=True):
            below.pins -= 1
            tier.counters[f"read_{outcome.status.value}"] += 1
            self._settle_source(tier, below, outcome, corrupt)
            self._settle_target(node, outcome)
            self._settled(node)
        self._stack.delete(tier, corrupt, Departure.CORRUPT)

    def _settle_target(self, node: PoolNode, outcome: Outcome) -> None:
        primary = self._stack.primary
        if outcome.status is Status.OK and node.state is not State.GONE:
            primary.publish((node,))
            if node.pins == 1:  # nobody waits for it: the read's own pin becomes its grace
                self.grace[node] = self._stack.now + GRACE
                return
        elif node.state is not State.GONE:
            primary.abandon(node)
        self._settle_count(node)
        primary.space_of(node).promoting -= 1
        primary.unpin((node,))

    def claim(self, node: PoolNode) -> None:
        """End a promoted block's grace: it is being read, and pinned by the reader."""
        if self.grace.pop(node, None) is not None:
            self._settle_count(node)
            self._stack.primary.space_of(node).promoting -= 1
            self._stack.primary.unpin((node,))

    def _settle_count(self, node: PoolNode) -> None:
        if node in self.counted:
            self.counted.discard(node)
            self.told(node)

    def told(self, node: PoolNode) -> None:
        """Forget where a block came from: it is counted for that tier."""
        if node.state is not State.GONE:  # its successor may have been promoted, too
            self._stack.primary.space_of(node).unread.pop(node.block.key, None)

    def expire(self) -> None:
        """End the grace of what nobody read in time."""
        now = self._stack.now
        over = [node for node, until in self.grace.items() if until <= now or node.state is State.GONE]
        for node in over:
            self._stack.primary.counters["promotions_unread"] += 1
            self.claim(node)

    def stalled(self, operation: Operation) -> None:
        """Stop waiting for a read past its deadline; its slots stay pinned until it really ends."""
        for node in operation.pooled:
            if node.state is not State.GONE:
                self._stack.primary.abandon(node)
            self._settled(node)

    def _settle_source(
        self, tier: SecondaryTier, below: StoredNode, outcome: Outcome, corrupt: list[StoredNode]
    ) -> None:
        lost = outcome.status in (Status.CORRUPT, Status.GONE)
        if outcome.status is not Status.OK:
            tier.last_fault = outcome.reason or outcome.status.value
        if below.state is State.GONE:  # evicted meanwhile: its deletion waits for the last of its reads
            if not below.pins:
                self._stack.start_delete(tier, [below.block.id], corrupt=outcome.status is Status.CORRUPT)
        elif outcome.status is Status.CORRUPT:
            corrupt.append(below)
        elif lost and below.pins:
            self._stack.retire(tier, below, Departure.GONE)  # another read of it is under way: keep its place
        elif lost:
            tier.forget(below, Departure.GONE)
        else:
            tier.blocks.offer(below)

"""The tiers stacked under one roof: slot allocation, operation numbers, and removal from any tier."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtierd.core.effects import Answer, Delete, Effect, LadderReply
from kvtierd.core.model import BlockId, BlockKey, Departure, State
from kvtierd.core.presence import Presence
from kvtierd.core.reclaim import reclaim
from kvtierd.core.residency import PoolNode, StoredNode, leaf_first
from kvtierd.core.tenants import Tenants
from kvtierd.core.tier import PoolSpace, PrimaryTier, SecondaryTier, Tier, TierSpec


@dataclass(frozen=True, slots=True)
class Operation:
    """Work in flight at an edge. Reads go from ``stored`` to ``pooled``, block by block, writes back."""

    kind: str
    tier: SecondaryTier
    pooled: tuple[PoolNode, ...] = ()
    stored: tuple[StoredNode, ...] = ()


@dataclass(slots=True)
class Removals:
    """Residencies that ended and the bytes they had taken, by tier."""

    blocks: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def note(self, tier: str, size: int) -> None:
        """Count one."""
        self.blocks[tier] += 1
        self.bytes[tier] += size


class Stack:
    """The primary tier and the secondaries in drain order, and the effects of the current turn."""

    def __init__(
        self,
        pool_id: str,
        pool_units: int,
        primary: TierSpec,
        secondaries: Sequence[TierSpec],
        tenants: Sequence[str] = (),
        presence: Presence | None = None,
    ) -> None:
        self.pool_id = pool_id
        self.tenants = Tenants(tenants)
        self.primary = PrimaryTier(primary, pool_units, self.tenants)
        self.secondaries = [SecondaryTier(spec, self.tenants) for spec in secondaries]
        self.by_name = {tier.name: tier for tier in self.secondaries}
        self.presence = presence
        for tier in self.secondaries:
            tier.blocks.presence = presence
        self.effects: list[Effect] = []
        self.operations: dict[int, Operation] = {}
        self.now = 0.0
        self._op = itertools.count(1)
        self.generation = 0
        """The last one that a reservation got."""

    @property
    def names(self) -> tuple[str, ...]:
        """All tier names, primary first."""
        return (self.primary.name, *self.by_name)

    @property
    def tiers(self) -> list[Tier]:
        """All tiers, primary first."""
        return [self.primary, *self.secondaries]

    def answer(self, session: int, reply: LadderReply) -> None:
        """Queue an answer."""
        self.effects.append(Answer(session, reply))

    def next_generation(self) -> int:
        """Return a number that no earlier reservation of this pool had."""
        self.generation += 1
        return self.generation

    def begin(self, operation: Operation) -> int:
        """Register work in flight and return its number."""
        op = next(self._op)
        self.operations[op] = operation
        return op

    # -- room in the pool ---------------------------------------------------------------------------

    def take_slot(self, space: PoolSpace) -> int | None:
        """Return a slot that is free, new, given up by a detached layout, or evicted; else ``None``."""
        slot = space.arena.take()
        if slot is None and len(self.primary.spaces) > 1 and reclaim(self, space):
            slot = space.arena.take()
        if slot is not None:
            return slot
        victim = space.blocks.victim()
        if victim is None:
            return None
        self.primary.forget(victim, Departure.CAPACITY)
        return space.arena.take()

    def touch(self, namespace: str, keys: Sequence[BlockKey]) -> int:
        """Mark blocks as just used in every tier, the first one last; return how many residencies."""
        space = self.primary.spaces[namespace]
        find, touch, count = space.index.get, space.blocks.touch, 0
        for key in reversed(keys):
            if (node := find(key)) is not None:
                touch(node)
                count += 1
        return count + sum(tier.touch(namespace, keys, self.now) for tier in self.secondaries)

    # -- removal ------------------------------------------------------------------------------------

    def evict(self, ids: Iterable[BlockId], tiers: Sequence[str]) -> int:
        """Remove blocks from tiers, last one first; return how many residencies ended."""
        count = 0
        ids = list(dict.fromkeys(ids))
        for block_id in reversed(ids):
            node = self.primary.get(block_id) if self.primary.name in tiers else None
            if node is not None and node.state in (State.RESIDENT, State.LOADING):
                count += node.state is State.RESIDENT
                self.primary.forget(
                    node, Departure.CLEARED
                )  # a promotion under way would bring the block back
        for tier in self.secondaries:
            if tier.name in tiers:
                count += self._evict_secondary(tier, ids)
        return count

    def reset(self, namespaces: Collection[str] | None, tiers: Sequence[str]) -> Removals:
        """Remove namespaces (``None``: every one) from tiers, leaf first, work in flight included."""
        gone = Removals()
        for namespace, space in self.primary.spaces.items():
            if self.primary.name in tiers and (namespaces is None or namespace in namespaces):
                for node in leaf_first(space.blocks):
                    if node.state is State.RESIDENT:
                        gone.note(self.primary.name, space.geometry.slot_bytes)
                    self.primary.forget(
                        node, Departure.CLEARED
                    )  # stores and promotions under way carry old bytes too
        for tier in self.secondaries:
            if tier.name in tiers:
                self._reset_secondary(tier, namespaces, gone)
        return gone

    def _reset_secondary(
        self, tier: SecondaryTier, namespaces: Collection[str] | None, gone: Removals
    ) -> None:
        chosen = (node for node in tier.blocks if namespaces is None or node.block.namespace in namespaces)
        nodes = leaf_first(chosen)
        for node in nodes:
            if node.state is State.RESIDENT:
                gone.note(tier.name, node.size)
        self._evict_secondary(tier, [node.block.id for node in reversed(nodes)])
        for block_id in list(tier.wanted):
            if namespaces is None or block_id.namespace in namespaces:
                tier.unwant(block_id)
        if tier.scanning:
            tier.refuse_all_found(namespaces)

    def _evict_secondary(self, tier: SecondaryTier, ids: Iterable[BlockId]) -> int:
        victims = []
        for block_id in reversed(list(ids)):
            tier.unwant(block_id)
            node = tier.blocks.get(block_id)
            if node is None:
                if tier.scanning:
                    tier.refuse_found(block_id)
                continue
            if node.state is State.WRITING:
                tier.doomed.add(block_id)
            else:
                victims.append(node)
        self.delete(tier, victims, Departure.CLEARED)
        return len(victims)

    def retire(self, tier: SecondaryTier, node: StoredNode, why: Departure) -> None:
        """Forget a visible block of a tier; its bytes count until :meth:`start_delete`'s work is done."""
        tier.forget(node, why)
        tier.deletes[node.block.id] = node.size
        tier.deleting += node.size

    def delete(self, tier: SecondaryTier, nodes: Sequence[StoredNode], why: Departure) -> None:
        """Forget visible blocks of a tier and have their storage deleted.

        A block that is being read is deleted when the read ends (the promotion sees to it).
        """
        for node in nodes:
            self.retire(tier, node, why)
        unread = [node.block.id for node in nodes if not node.pins]
        self.start_delete(tier, unread, corrupt=why is Departure.CORRUPT)

    def start_delete(self, tier: SecondaryTier, ids: Sequence[BlockId], *, corrupt: bool = False) -> None:
        """Hand a deletion to the tier's workers; the ids are already noted in ``tier.deletes``."""
        if ids:
            op = self.begin(Operation("delete", tier))
            self.effects.append(Delete(op, tier.name, tuple(ids), corrupt))

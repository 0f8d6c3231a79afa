"""The content of the secondaries: room, age, deletions, and what a scan finds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvtierd.core.model import BlockId, Departure, EventKind, State
from kvtierd.core.residency import StoredNode, root_first
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.core.tier import SecondaryTier

WRITE_BATCH = 64
EXPIRY_BATCH = 256
TRIM_BATCH = 512
"""Blocks that one deletion makes room of: a lowered limit must not hold up a turn."""
AGE_BATCH = 4096
STUCK_BATCH = 64
STUCK_RETRY = 30.0


class Upkeep:
    """Evictions of the secondaries and everything that is found in or gone from their storage."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._retry_at: dict[str, float] = {}
        """When each tier that has undeletable blocks is asked again to delete some."""

    def make_room(self, tier: SecondaryTier, node: StoredNode) -> bool:
        """Evict for a block and, in the same deletion, for what waits behind; whether it will fit.

        Where tenants have shares, a block of one that is over its own takes the room of such tenants only,
        and so does what waits behind.
        """
        capacity, size = tier.spec.capacity, node.size
        assert capacity is not None
        assert node.account is not None, node
        if size > capacity:
            return False
        ahead = max(size, min(size * len(tier.wanted), size * WRITE_BATCH, capacity // 16))
        held = tier.writing + tier.stuck_bytes
        accounts, more = tier.accounts, False
        if accounts.shares:
            accounts.floor = 0 if node.account.excess > 0 else -math.inf
            more = self.trim(tier, capacity - size - held)
            accounts.floor = 0
        more = self.trim(tier, capacity - ahead - held) or more
        accounts.floor = -math.inf
        return more or tier.used + held + size <= capacity

    def trim(self, tier: SecondaryTier, limit: int, why: Departure = Departure.CAPACITY) -> bool:
        """Evict leaves until at most ``limit`` bytes are resident or no leaf is left.

        Of much, only a part goes now, and the next when that is deleted; whether it is so.
        """
        victims: list[BlockId] = []
        while tier.used > limit:
            if len(victims) == TRIM_BATCH:
                break
            if (victim := tier.blocks.victim()) is None:
                break
            self._stack.retire(tier, victim, why)
            victims.append(victim.block.id)
        self._stack.start_delete(tier, victims)
        return len(victims) == TRIM_BATCH

    def deleted(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        """Take a deletion's outcomes: the bytes are free, but for what could not be deleted."""
        tier = operation.tier
        for outcome in outcomes:
            size = tier.deletes.pop(outcome.id)
            tier.deleting -= size
            if outcome.status not in (Status.OK, Status.GONE):
                if not tier.stuck:
                    self._retry_at[tier.name] = self._stack.now + STUCK_RETRY
                tier.stick(outcome.id, size)
                tier.last_fault = outcome.reason or outcome.status.value

    def found(self, tier: SecondaryTier, blocks: Sequence[FoundBlock]) -> None:
        """Index a part of a tier's scan: hits at once, announced when the scan ends.

        What an engine had removed meanwhile is deleted instead.
        """
        unwelcome = []
        for found in blocks:
            block_id = found.block.id
            if tier.blocks.get(block_id) is not None or block_id in tier.removed_in_scan:
                continue
            if tier.is_unwelcome(block_id):
                tier.removed_in_scan.add(block_id)
                tier.deletes[block_id] = found.stored_bytes
                tier.deleting += found.stored_bytes
                unwelcome.append(block_id)
                continue
            node = StoredNode(found.block, State.RESIDENT, size=found.stored_bytes)
            tier.add(node)
            tier.used += node.size
            tier.used_at(block_id, self._stack.now - found.idle_seconds)
            tier.unannounced[block_id] = None
        self._stack.start_delete(tier, unwelcome)

    def scanned(self, tier: SecondaryTier) -> None:
        """End a tier's scan: announce what it found, root first, then trim to the capacity."""
        tier.scanning = False
        nodes = [tier.blocks.known(block_id) for block_id in tier.unannounced]
        tier.unannounced.clear()
        for past in (tier.removed_in_scan, tier.unwelcome, tier.unwelcome_namespaces):
            past.clear()
        tier.all_unwelcome = False
        for node in root_first(nodes):
            tier.announce(EventKind.STORED, node.block)
        if tier.spec.capacity is not None:
            self.trim(tier, tier.spec.capacity)

    def relieve(self, tier: SecondaryTier, outcomes: Sequence[Outcome]) -> None:
        """After writes were refused for want of space (others fill the storage too), give some up."""
        refused = sum(outcome.status is Status.FULL for outcome in outcomes)
        if refused and len(tier.blocks):
            average = max(1, tier.used // len(tier.blocks))
            self.trim(tier, max(0, tier.used - 2 * refused * average), Departure.CROWDED)

    def tick(self, tier: SecondaryTier) -> None:
        """Expire what was not used for the tier's ttl; try again to delete what could not be deleted."""
        now = self._stack.now
        if tier.unaged:
            for block_id in list(itertools.islice(tier.unaged, AGE_BATCH)):
                tier.used_at(block_id, now)
        if tier.spec.ttl is not None:
            self._expire(tier, now - tier.spec.ttl)
        if tier.stuck and now >= self._retry_at[tier.name]:
            self._retry_at[tier.name] = now + STUCK_RETRY
            ids = [
                block_id for block_id in itertools.islice(tier.stuck, STUCK_BATCH) if not tier.busy(block_id)
            ]
            for block_id in ids:
                tier.deletes[block_id] = tier.unstick(block_id)
                tier.deleting += tier.deletes[block_id]
            self._stack.start_delete(tier, ids)

    def _expire(self, tier: SecondaryTier, before: float) -> None:
        old = [item[0] for item in itertools.islice(tier.ages.items(), EXPIRY_BATCH) if item[1] < before]
        for block_id in old:
            del tier.ages[block_id]
            tier.overdue[block_id] = None
        victims = []
        for block_id in list(itertools.islice(reversed(tier.overdue), EXPIRY_BATCH)):
            node = tier.blocks.known(block_id)  # the younger of a chain, its leaves, come first
            if tier.blocks.evictable(node):
                self._stack.retire(tier, node, Departure.TTL)
                victims.append(block_id)
            else:
                tier.overdue.move_to_end(block_id, last=False)  # the next look is at others
        self._stack.start_delete(tier, victims)

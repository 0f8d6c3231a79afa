"""The invariant watch of a daemon in production: a small part of the state at a time, all of it in a round.

:func:`kvtierd.core.invariants.validate` proves everything and is linear in the state. A patrol costs the same
few microseconds however large the pool is: each look proves the ledgers that are kept as sums and the next
slice of a list of blocks that was taken when the round began. What left since then is passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvtierd.core.ladder import Ladder
from kvtierd.core.model import BlockId, State
from kvtierd.core.residency import PoolNode
from kvtierd.core.slots import Extent
from kvtierd.core.tier import PoolSpace, SecondaryTier
from kvtierd.errors import InvariantBroken

SLICE = 128
"""Blocks that one look proves."""
ROUND_SECONDS = 60.0
"""A round begins at most this often: its list takes ten milliseconds for a million blocks."""


class Patrol:
    """Looks at one ladder, now and then, between two turns."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._round: Iterator[tuple[PoolSpace, PoolNode]] | None = None
        self._seen = bytearray()
        self._began = float("-inf")
        self.looks = self.rounds = self.blocks = 0

    def look(self) -> None:
        """Prove the sums and the next slice.

        Raises:
            InvariantBroken: a promise does not hold; ``block`` names the block where it is known.
        """
        self.looks += 1
        self._prove_sums()
        now = self._ladder.stack.now
        if self._round is None and now - self._began >= ROUND_SECONDS:
            self._began = now
            self._seen = bytearray(self._ladder.stack.primary.extents.units // 8 + 1)
            self._round = iter(self._list())
        if self._round is None:
            return
        count = 0
        for space, node in itertools.islice(self._round, SLICE):
            count += 1
            if node.state is not State.GONE:
                self._prove(space, node)
        self.blocks += count
        if count < SLICE:
            self._round, self._seen = None, bytearray()
            self.rounds += 1

    def _list(self) -> list[tuple[PoolSpace, PoolNode]]:
        """Return the pool's blocks; free slots are noted as seen, so that no block may have one of them."""
        found: list[tuple[PoolSpace, PoolNode]] = []
        for space in self._ladder.stack.primary.spaces.values():
            found += zip(itertools.repeat(space), space.blocks)
            for slot in space.arena.free_list():
                self._mark(slot)
        return found

    def _mark(self, slot: int) -> bool:
        """Note a slot; whether it was noted before."""
        at, bit = slot >> 3, 1 << (slot & 7)
        before = bool(self._seen[at] & bit)
        self._seen[at] |= bit
        return before

    def _prove(self, space: PoolSpace, node: PoolNode) -> None:
        block_id = node.block.id
        _require(space.blocks.get(block_id) is node, f"{node} is not where its name leads", block_id)
        _require(node.pins >= 0, f"{node} has fewer than no pins", block_id)
        if node.state in (State.RESERVED, State.LOADING):
            _require(node.pins > 0, f"{node} is being written and nobody holds it", block_id)
        _require(_owns(space.arena.extents, node.slot), f"{node} has a slot of another layout", block_id)
        _require(not self._mark(node.slot), f"{node} shares its slot with another or a free one", block_id)

    # -- sums ---------------------------------------------------------------------------------------

    def _prove_sums(self) -> None:
        ladder = self._ladder
        primary = ladder.stack.primary
        held = primary.extents.free_units
        for space in primary.spaces.values():
            held += sum(extent.units for extent in space.arena.extents)
            used = space.arena.free_slots + len(space.blocks) + len(space.leaving)
            _require(used == space.arena.slots, f"{used} slots accounted for of {space.arena.slots}")
        _require(held == primary.extents.units, f"{held} units accounted for of {primary.extents.units}")
        for tier in ladder.stack.secondaries:
            _prove_budget(ladder, tier)
        self._prove_holders()

    def _prove_holders(self) -> None:
        """What is held is pinned: the newest holders, which are the ones that are copied to and from."""
        sessions = self._ladder.sessions
        for job in itertools.islice(reversed(sessions.jobs.values()), 8):
            _require_pins(f"job {job.number}", list(itertools.islice(job.nodes.values(), 16)))
        for lease in itertools.islice(reversed(sessions.leases.values()), 8):
            _require_pins(f"lease {lease.number}", lease.nodes[:16])
        for held in itertools.islice(reversed(sessions.quarantines.values()), 8):
            _require_pins(f"quarantine {held.number}", held.nodes[:16])


def _prove_budget(ladder: Ladder, tier: SecondaryTier) -> None:
    name = tier.spec.name
    low = min(tier.used, tier.writing, tier.deleting, tier.stuck_bytes)
    _require(low >= 0, f"{name}: {low} bytes are less than none")
    _require(
        tier.writing == tier.in_flight, f"{name}: {tier.writing} bytes writing, {tier.in_flight} in flight"
    )
    capacity = tier.spec.capacity
    idle = not tier.scanning and not ladder.stack.operations  # what is being read is trimmed afterwards
    if capacity is not None and idle:
        _require(tier.used + tier.writing <= capacity, f"{name}: {tier.used} bytes of {capacity}")


def _owns(extents: Sequence[Extent], slot: int) -> bool:
    return any(extent.start <= slot < extent.start + extent.units for extent in extents)


def _require_pins(holder: str, nodes: Sequence[PoolNode]) -> None:
    for node in nodes:
        _require(node.pins > 0, f"{holder} holds {node}, which nobody pinned", node.block.id)


def _require(condition: bool, message: str, block: BlockId | None = None) -> None:
    if not condition:
        raise InvariantBroken(message, block)

"""Everything that must hold of a ladder between two turns; checked at the teardown of every core test.

Linear in the state: for tests and ``--paranoid``, not for the hot path.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from zlib import crc32

from kvtierd.core.holdings import Holdings
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import Departure, State
from kvtierd.core.presence import FULL
from kvtierd.core.residency import Link, N, Node, ResidentSet
from kvtierd.core.sessions import Job, Lease
from kvtierd.core.statistics import visible_blocks
from kvtierd.core.tier import PoolSpace, SecondaryTier
from kvtierd.errors import InvariantBroken


def validate(ladder: Ladder) -> None:
    """Check the ladder.

    Raises:
        InvariantBroken: with the first promise that does not hold.
    """
    _check_units(ladder)
    _check_holdings(ladder)
    _check_counters(ladder)
    _check_presence(ladder)
    pins = _expected_pins(ladder)
    for space in ladder.stack.primary.spaces.values():
        _check_set(space.blocks)
        _check_slots(space)
        _check_pins([*space.blocks, *space.leaving], pins)
    for tier in ladder.stack.secondaries:
        _check_set(tier.blocks)
        _check_accounts(tier)
        _check_secondary(ladder, tier)
        _check_pins(tier.blocks, pins)


def _check_holdings(ladder: Ladder) -> None:
    holdings: tuple[Holdings[Job] | Holdings[Lease], ...] = (ladder.sessions.jobs, ladder.sessions.leases)
    for held in holdings:
        counted = Counter(one.session for one in held.values())
        _require(held.counts == counted, f"jobs or leases by session: {counted}, counted {held.counts}")


def _check_counters(ladder: Ladder) -> None:
    """Hits and misses add up; what came into the pool left it for a reason that was counted, or is there."""
    stack = ladder.stack
    counters = stack.primary.counters
    for tier in stack.tiers:
        negative = [name for name, value in tier.counters.items() if value < 0]
        _require(not negative, f"tier {tier.name}: counters below 0: {negative}")
    hits = sum(tier.counters["lookup_hits"] for tier in stack.tiers)
    asked, misses = counters["lookup_blocks"], counters["lookup_misses"]
    _require(asked == hits + misses, f"{asked} keys looked up, {hits} hits and {misses} misses")
    left = sum(counters[f"left_{why.value}"] for why in Departure)
    here = sum(node.state is State.RESIDENT for node in stack.primary.nodes())
    _require(left == counters["removed"], f"{left} departures counted, {counters['removed']} announced")
    came = counters["stored"] + counters["restored"]
    _require(came == left + here, f"{came} stored or restored, {left} left, {here} here")
    for name, told in visible_blocks(stack).items():
        secondary = stack.by_name.get(name)
        seen = sum(
            node.state is State.RESIDENT
            for node in (secondary.blocks if secondary else stack.primary.nodes())
        )
        _require(told == seen, f"tier {name}: {told} blocks told of, {seen} visible")


def _check_presence(ladder: Ladder) -> None:
    """A cell counts the blocks that fall into it, in all tiers and states; what is nowhere has a zero."""
    presence = ladder.stack.presence
    if presence is None:
        return
    mask = len(presence.cells) - 1
    nodes: list[Node] = [*ladder.stack.primary.nodes()]
    for tier in ladder.stack.secondaries:
        nodes += tier.blocks
    counts = Counter(crc32(node.block.key) & mask for node in nodes)
    for cell, count in counts.items():
        told = presence.cells[cell]
        _require(told in (FULL, count), f"cell {cell} counts {told} blocks, there are {count}")
    told = len(presence.cells) - bytes(presence.cells).count(0)
    _require(told == len(counts) or FULL in presence.cells, f"{told} cells count blocks, not {len(counts)}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantBroken(message)


def _check_units(ladder: Ladder) -> None:
    primary = ladder.stack.primary
    held = [extent for space in primary.spaces.values() for extent in space.arena.extents]
    total = sum(extent.units for extent in held) + primary.extents.free_units
    _require(total == primary.extents.units, f"{total} units accounted for of {primary.extents.units}")
    ordered = sorted(held, key=lambda extent: extent.start)
    for left, right in itertools.pairwise(ordered):
        _require(left.start + left.units <= right.start, f"extents overlap: {left} {right}")


def _check_slots(space: PoolSpace) -> None:
    """Every slot is free, held by one node of the set, or by one leaving node."""
    step = space.arena.slot_units
    known = Counter(
        slot
        for extent in space.arena.extents
        for slot in range(extent.start, extent.start + extent.units, step)
    )
    used = Counter(space.arena.free_list())
    used.update(node.slot for node in space.blocks)
    used.update(node.slot for node in space.leaving)
    _require(used == known, f"slots do not add up: {used - known} twice or unknown, {known - used} lost")
    loading = sum(node.state is State.LOADING for node in (*space.blocks, *space.leaving))
    _require(space.promoting >= loading, f"{loading} slots are loading, {space.promoting} counted")
    strangers = space.unread.keys() - space.index.keys()
    _require(not strangers, f"{len(strangers)} blocks are unread that are not there")
    loading_keys = {node.block.key for node in space.blocks if node.state is State.LOADING}
    _require(loading_keys <= space.unread.keys(), "nobody knows where a block is being promoted from")
    for node in space.leaving:
        held = node.state is State.GONE and node.pins > 0
        _require(held, f"a leaving node must be gone and pinned: {node}")


def _check_set(blocks: ResidentSet[N]) -> None:
    children: Counter[tuple[str, Link | None]] = Counter()
    for node in blocks:
        _require(node.state is not State.GONE, f"a node of the set is marked gone: {node}")
        children[node.block.namespace, node.parent] += 1
    owned = set()
    for node in blocks:
        name = (node.block.namespace, node.link)
        owned.add(name)
        _require(node.children == children[name], f"{node} has {children[name]} children, not as counted")
    orphans = {name: count for name, count in children.items() if name not in owned and name[1] is not None}
    counted = {(space, link): count for space, of in blocks.orphans().items() for link, count in of.items()}
    _require(orphans == counted, "children without a parent are counted wrongly")
    if any(blocks.evictable(node) for node in blocks):
        _require(blocks.victim() is not None, "an evictable block is hidden from the policy")


def _check_secondary(ladder: Ladder, tier: SecondaryTier) -> None:
    resident = sum(node.size for node in tier.blocks if node.state is State.RESIDENT)
    writing = sum(node.size for node in tier.blocks if node.state is State.WRITING)
    _require(resident == tier.used, f"{tier.name}: {resident} bytes resident, {tier.used} counted")
    _require(
        writing == tier.writing == tier.in_flight, f"{tier.name}: {writing} bytes writing, {tier.writing}"
    )
    stuck = sum(tier.stuck.values())
    _require(stuck == tier.stuck_bytes, f"{tier.name}: {stuck} bytes undeletable, {tier.stuck_bytes} counted")
    if tier.spec.ttl is not None:
        there = {node.block.id for node in tier.blocks if node.state is State.RESIDENT}
        known = [*tier.ages, *tier.overdue, *tier.unaged]
        _require(
            len(known) == len(there) and there == set(known),
            f"{tier.name}: ages are kept for other blocks than the resident",
        )
    deleting = sum(tier.deletes.values())
    _require(deleting == tier.deleting, f"{tier.name}: {deleting} bytes deleting, {tier.deleting} counted")
    capacity = tier.spec.capacity
    if capacity is not None and not tier.scanning:
        pinned = any(node.pins for node in tier.blocks)  # what is being read is trimmed afterwards
        _require(
            pinned or tier.used + tier.writing <= capacity, f"{tier.name}: over its capacity of {capacity}"
        )
    reads = [op for op in ladder.stack.operations.values() if op.kind == "read" and op.tier is tier]
    reading = sum(node.block.payload_bytes for op in reads for node in op.pooled)
    _require(reading == tier.loading.reading, f"{tier.name}: {reading} bytes are read, not as counted")
    _check_queues(ladder, tier)
    for block_id in tier.deletes:
        _require(tier.blocks.get(block_id) is None, f"{tier.name}: a block is there while it is deleted")
    for block_id in tier.doomed:
        node = tier.blocks.get(block_id)
        _require(node is not None and node.state is State.WRITING, f"{tier.name}: doomed without a write")


def _check_accounts(tier: SecondaryTier) -> None:
    """Every block is on one account, with its size."""
    held: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for node in tier.blocks:
        assert node.account is not None, node
        held[node.account.name] += node.size
        blocks[node.account.name] += 1
    for name in tier.accounts.tenants.names:
        account = tier.accounts.named(name)
        counted = (account.held, account.blocks)
        _require(
            counted == (held[name], blocks[name]),
            f"{tier.name}: tenant {name} has {blocks[name]} blocks, {held[name]} bytes, counted {counted}",
        )


def _check_queues(ladder: Ladder, tier: SecondaryTier) -> None:
    """Nothing is kept about blocks that nothing is under way for."""
    operations = [op for op in ladder.stack.operations.values() if op.tier is tier]
    writing = {node.block.id for op in operations if op.kind == "write" for node in op.stored}
    for leaving in tier.leaving.values():
        _require(leaving <= {*tier.wanted, *writing}, f"{tier.name}: blocks leave the pool without a write")
    for block_id in tier.stuck:
        _require(tier.resident(block_id) is None, f"{tier.name}: a block is there that is to be deleted")
    ops = set(tier.asked.values())
    _require(ops <= set(ladder.stack.operations), f"{tier.name}: blocks are asked for by no probe")


def _expected_pins(ladder: Ladder) -> Counter[int]:
    """Count, by node identity, who holds pins."""
    pins: Counter[int] = Counter()
    holders: list[Iterable[Node]] = [job.nodes.values() for job in ladder.sessions.jobs.values()]
    holders += [lease.nodes for lease in ladder.sessions.leases.values()]
    holders += [held.nodes for held in ladder.sessions.quarantines.values()]
    holders += [load.nodes for load in ladder.loads.waiting.values()]
    holders.append(ladder.loads.promotion.grace)
    for operation in ladder.stack.operations.values():
        holders += [operation.pooled, operation.stored]
    for nodes in holders:
        pins.update(id(node) for node in nodes)
    return pins


def _check_pins(nodes: Iterable[Node], expected: Counter[int]) -> None:
    for node in nodes:
        _require(node.pins == expected[id(node)], f"{node} should have {expected[id(node)]} pins")

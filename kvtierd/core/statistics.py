"""The ladder's figures as plain values, for status and metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Departure, SkipReason

if TYPE_CHECKING:
    from kvtierd.core.ladder import Ladder
    from kvtierd.core.stack import Stack
    from kvtierd.core.tier import PoolSpace, PrimaryTier, SecondaryTier, Tier

CASCADE_SKIPS = ("slow", "queue_full", "evicted", "no_room", "failed")
"""Why a secondary did not get a block that was meant for it."""
DECLINED = {"slow": "declined_slow", "wrong_size": "wrong_size"}
"""Why a block that a secondary has was not read from there."""
PROMOTION_REFUSALS = ("over_budget", "no_room")
RANKS = 64
"""Ranks that have a figure of their own."""
GIVEN_UP = ("jobs_revoked", "leases_revoked", "load_deadline", "promotions_unread")
"""What ended without the word of its holder, or in vain."""


def collect(ladder: Ladder) -> dict[str, Any]:
    """Return the figures; keys are stable names, sizes in bytes."""
    sessions = ladder.sessions
    stack = ladder.stack
    counters = stack.primary.counters
    return {
        "tiers": _tiers(stack),
        "lookups": {name: counters[f"lookup_{name}"] for name in ("blocks", "misses", "repeats")},
        "promotions_refused": {why: counters[f"promotion_{why}"] for why in PROMOTION_REFUSALS},
        "given_up": {name: counters[name] for name in GIVEN_UP},
        "failed_copies": _failed_copies(ladder),
        "tenants": _tenants(stack),
        "layouts": [_space(namespace, space) for namespace, space in stack.primary.spaces.items()],
        "sessions": [
            {
                "session": session.number,
                "engine_id": session.engine,
                "role": session.role.value,
                "rank": session.rank,
                "dp_rank": session.dp_rank,
                "namespace": session.namespace,
            }
            for session in sessions.open.values()
        ],
        "jobs": len(sessions.jobs),
        "leases": len(sessions.leases),
        "loads_waiting": len(ladder.loads.waiting),
        "promotions_unread": len(ladder.loads.promotion.grace),
        "quarantined_slots": sum(len(held.nodes) for held in sessions.quarantines.values()),
        "operations": len(stack.operations),
    }


def _failed_copies(ladder: Ladder) -> dict[str, int]:
    """Return by rank the blocks that its workers could not copy; ranks beyond ``RANKS`` are one."""
    by_name: Counter[str] = Counter()
    for rank, blocks in sorted(ladder.sessions.failed_copies.items()):
        by_name[str(rank) if rank < RANKS else "other"] += blocks
    return dict(by_name)


def _tiers(stack: Stack) -> list[dict[str, Any]]:
    """Return each tier's figures; ``misses``: keys that lookups found neither there nor above."""
    primary, visible = stack.primary, visible_blocks(stack)
    tiers = [_primary(primary, visible[primary.name])]
    tiers += [_secondary(tier, primary, visible[tier.name]) for tier in stack.secondaries]
    left = stack.primary.counters["lookup_blocks"]
    for tier in tiers:
        left -= tier["hits"]
        tier["misses"] = left
    return tiers


def visible_blocks(stack: Stack) -> dict[str, int]:
    """Return by tier how many blocks can be found there, without those reserved or on their way; no walk."""
    counters = stack.primary.counters
    visible = {tier.name: len(tier.blocks) for tier in stack.secondaries}
    visible[stack.primary.name] = counters["stored"] + counters["restored"] - counters["removed"]
    for operation in stack.operations.values():
        if operation.kind == "write":
            visible[operation.tier.name] -= len(operation.stored)
    return visible


def _primary(tier: PrimaryTier, blocks: int) -> dict[str, Any]:
    held = (tier.extents.units - tier.extents.free_units) * UNIT
    used = sum(len(space.blocks) * space.geometry.slot_bytes for space in tier.spaces.values())
    return {
        "name": tier.name,
        "medium": tier.spec.medium.value,
        "locality": None,
        "blocks": blocks,
        "used_bytes": used,
        "capacity_bytes": tier.extents.units * UNIT,
        **_flow(tier, tier),
        "extent_bytes": held,
        "skipped": {why.value: tier.counters[f"store_skipped_{why.value}"] for why in SkipReason},
        "counters": dict(tier.counters),
    }


def _flow(tier: Tier, primary: PrimaryTier) -> dict[str, Any]:
    """Return what went in and out since the start, in blocks; a load counts for the tier that served it.

    ``hits``: keys that lookups found there; a promoted block counts for the tier that it came from, once.
    """
    names = ("stored", "removed", "evictions")
    return {
        **{name: tier.counters[name] for name in names},
        "hits": tier.counters["lookup_hits"],
        "loads": primary.counters[f"load_from_{tier.name}"],
        "left": {why.value: tier.counters[f"left_{why.value}"] for why in Departure},
    }


def _secondary(tier: SecondaryTier, primary: PrimaryTier, blocks: int) -> dict[str, Any]:
    return {
        "name": tier.name,
        "medium": tier.spec.medium.value,
        "locality": tier.spec.locality.value if tier.spec.locality is not None else None,
        "blocks": blocks,
        "used_bytes": tier.used,
        "capacity_bytes": tier.spec.capacity,
        **_flow(tier, primary),
        "writing_bytes": tier.writing,
        "deleting_bytes": tier.deleting,
        "wanted": len(tier.wanted),
        "scanning": tier.scanning,
        "condition": tier.gate.condition,
        "reason": tier.gate.reason,
        "last_fault": tier.last_fault,
        "read_bytes_per_second": round(tier.loading.rate),
        "undeletable_bytes": tier.stuck_bytes,
        "declined": {why: tier.counters[name] for why, name in DECLINED.items()},
        "skipped": {why: tier.counters[f"cascade_dropped_{why}"] for why in CASCADE_SKIPS},
        "counters": dict(tier.counters),
    }


def _tenants(stack: Stack) -> list[dict[str, Any]]:
    """Return what each tenant has in each tier: bounded, and no walk over blocks."""
    in_pool: Counter[str] = Counter()
    bytes_in_pool: Counter[str] = Counter()
    for space in stack.primary.spaces.values():
        in_pool[space.account.name] += len(space.blocks)
        bytes_in_pool[space.account.name] += len(space.blocks) * space.geometry.slot_bytes
    rows = []
    for name in stack.tenants.names:
        tiers = {}
        for tier in stack.tiers:
            account = tier.accounts.named(name)
            pool = tier is stack.primary
            tiers[tier.name] = {
                "blocks": in_pool[name] if pool else account.blocks,
                "used_bytes": bytes_in_pool[name] if pool else account.held,
                "share_bytes": account.share,
                "evicted": account.evicted,
            }
        rows.append({"tenant": name, "tiers": tiers})
    return rows


def _space(namespace: str, space: PoolSpace) -> dict[str, Any]:
    geometry = space.geometry
    return {
        "namespace": namespace,
        "model": space.layout.model,
        "tenant": space.layout.tenant,
        "attached_sessions": len(space.sessions),
        "ranks": space.layout.ranks,
        "rank_bytes_per_block": list(geometry.block_bytes),
        "bytes_per_block": list(geometry.payload_bytes),
        "slot_bytes": geometry.slot_bytes,
        "bytes": space.arena.slots * geometry.slot_bytes,
        "slots": space.arena.slots,
        "free_slots": space.arena.free_slots,
        "blocks": len(space.blocks),
        "waste_bytes_per_slot": [geometry.waste(group) for group in range(len(geometry.payload_bytes))],
    }

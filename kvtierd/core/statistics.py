"""The ladder's figures as plain values, for status and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtierd.core.geometry import UNIT

if TYPE_CHECKING:
    from kvtierd.core.ladder import Ladder
    from kvtierd.core.tier import PoolSpace, PrimaryTier, SecondaryTier, Tier


def collect(ladder: Ladder) -> dict[str, Any]:
    """Return the figures; keys are stable names, sizes in bytes."""
    sessions = ladder.sessions
    stack = ladder.stack
    return {
        "tiers": [_primary(stack.primary), *(_secondary(tier, stack.primary) for tier in stack.secondaries)],
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


def _primary(tier: PrimaryTier) -> dict[str, Any]:
    held = (tier.extents.units - tier.extents.free_units) * UNIT
    blocks = sum(len(space.blocks) for space in tier.spaces.values())
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
        "counters": dict(tier.counters),
    }


def _flow(tier: Tier, primary: PrimaryTier) -> dict[str, int]:
    """Return what went in and out since the start, in blocks; a load counts for the tier that served it."""
    names = ("stored", "removed", "evictions")
    return {
        **{name: tier.counters[name] for name in names},
        "loads": primary.counters[f"load_from_{tier.name}"],
    }


def _secondary(tier: SecondaryTier, primary: PrimaryTier) -> dict[str, Any]:
    return {
        "name": tier.name,
        "medium": tier.spec.medium.value,
        "locality": tier.spec.locality.value if tier.spec.locality is not None else None,
        "blocks": len(tier.blocks),
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
        "undeletable_bytes": tier.stuck_bytes,
        "counters": dict(tier.counters),
    }


def _space(namespace: str, space: PoolSpace) -> dict[str, Any]:
    geometry = space.geometry
    return {
        "namespace": namespace,
        "model": space.layout.model,
        "attached_sessions": len(space.sessions),
        "slot_bytes": geometry.slot_bytes,
        "slots": space.arena.slots,
        "free_slots": space.arena.free_slots,
        "blocks": len(space.blocks),
        "waste_bytes_per_slot": [geometry.waste(group) for group in range(len(geometry.payload_bytes))],
    }

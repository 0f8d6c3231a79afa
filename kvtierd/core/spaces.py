"""Makes a layout's share of the pool."""

from __future__ import annotations

from kvtierd.core.geometry import UNIT, Geometry
from kvtierd.core.model import Layout
from kvtierd.core.policies.lru import Lru
from kvtierd.core.reclaim import forget_layout, reclaim
from kvtierd.core.stack import Stack
from kvtierd.core.tier import PoolSpace

MAX_LAYOUTS = 1024
"""Layouts with a share of the pool; beyond, the oldest that no engine uses goes."""


class PoolExhausted(Exception):
    """The layout can get no slot; says why and what to do."""


def make_space(stack: Stack, layout: Layout) -> PoolSpace:
    """Return a share without any room yet, not part of the pool yet."""
    primary = stack.primary
    policy = (primary.spec.policy or Lru)()
    namespace = layout.namespace()
    stack.tenants.learn(namespace, layout.tenant)
    account = primary.accounts.of(namespace)
    space = PoolSpace(layout, Geometry.of(layout), primary.extents, policy, account)
    if primary.spec.shares:
        space.arena.room = lambda: primary.units_for(account)
    space.blocks.presence = stack.presence
    secondaries = stack.secondaries
    if secondaries:
        space.blocks.spare = lambda block_id: any(block_id in tier.wanted for tier in secondaries)
    return space


def open_space(stack: Stack, namespace: str, layout: Layout) -> PoolSpace:
    """Return the layout's share of the pool with room for at least one slot in it.

    Raises:
        PoolExhausted: there is none, and none can be made.
    """
    primary = stack.primary
    space = primary.spaces.get(namespace)
    if space is not None:
        return space
    space = make_space(stack, layout)
    if len(primary.spaces) >= MAX_LAYOUTS and not forget_layout(stack, space):
        primary.counters["layouts_refused"] += 1
        raise PoolExhausted(
            f"{len(primary.spaces)} layouts are in use, which is as many as there may be: an engine that"
            " comes back with the same model and geometry needs no new one; stop engines of other layouts"
        )
    if not space.arena.grow() and not (reclaim(stack, space) and space.arena.grow()):
        held = sum(len(other.sessions) for other in primary.spaces.values())
        if primary.spec.shares and primary.extents.free_units >= space.arena.slot_units:
            raise PoolExhausted(
                f"no room for a slot of {space.geometry.slot_bytes} bytes in the pool for tenant"
                f" {space.account.name}: what is free is kept for other tenants' shares. Give this one a"
                f" share of {primary.name!r} under tenants in the tier file, or raise pool.bytes"
            )
        raise PoolExhausted(
            f"no room for a slot of {space.geometry.slot_bytes} bytes in the pool of"
            f" {primary.extents.units * UNIT} bytes ({primary.extents.free_units * UNIT} free,"
            f" {held} sessions of other layouts attached): raise pool.bytes or stop engines of other layouts"
        )
    primary.spaces[namespace] = space
    return space

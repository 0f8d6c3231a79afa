"""Room from layouts that no engine uses: extent by extent, as much as is needed and no more.

An extent goes as a whole, so all blocks in it go, and with each its descendants: a chain never has a hole.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtierd.core.ledger import Shaped
from kvtierd.core.model import Departure
from kvtierd.core.residency import Link, PoolNode, leaf_first

if TYPE_CHECKING:
    from kvtierd.core.stack import Stack
    from kvtierd.core.tier import PoolSpace


def reclaim(stack: Stack, wanting: PoolSpace) -> bool:
    """Take extents of detached layouts away until ``wanting`` can grow; whether any unit came back.

    Their blocks get removals, leaf first. Where tenants have shares, one that is within its own loses
    nothing to another.
    """
    primary = stack.primary
    returned = 0
    for namespace, space in list(primary.spaces.items()):
        while not (space is wanting or space.attached or _is_protected(stack, space, wanting)):
            gained = _give_up_one(stack, space)
            returned += gained
            if _left(stack, namespace, space):
                break
            if not gained or wanting.arena.can_grow():
                break
        if wanting.arena.can_grow():
            break
    return returned > 0


def forget_layout(stack: Stack, wanting: PoolSpace) -> bool:
    """Take away the oldest layout that no engine uses, for another; whether there was one."""
    for namespace, space in list(stack.primary.spaces.items()):
        if space.attached or _is_protected(stack, space, wanting):
            continue
        while _give_up_one(stack, space):
            pass
        if _left(stack, namespace, space):
            stack.primary.counters["layouts_forgotten"] += 1
            return True
    return False


def _left(stack: Stack, namespace: str, space: PoolSpace) -> bool:
    """Drop a layout that has nothing in the pool any more; whether that is so."""
    if space.arena.extents or len(space.blocks):
        return False
    stack.primary.ledger.note(Shaped(space.layout, ()))
    del stack.primary.spaces[namespace]
    return True


def _is_protected(stack: Stack, space: PoolSpace, wanting: PoolSpace) -> bool:
    if not stack.primary.spec.shares:
        return False
    stack.primary.settle()
    return space.account is not wanting.account and space.account.excess <= 0


def _give_up_one(stack: Stack, space: PoolSpace) -> int:
    """Free what is wholly free already, else the extent that costs the fewest blocks; return the units."""
    returned = space.arena.shrink()
    if returned:
        return returned
    victims = _cheapest(space)
    for node in leaf_first(victims):
        stack.primary.forget(node, Departure.DETACHED)
    return space.arena.shrink()


def _cheapest(space: PoolSpace) -> Iterable[PoolNode]:
    """Return the blocks that go with the cheapest extent; none where each has a slot that is in use.

    Its own blocks count, and those children of theirs that lie elsewhere: they would go with them.
    """
    extents = sorted(space.arena.extents, key=lambda extent: extent.start)
    starts = [extent.start for extent in extents]
    owned: list[list[PoolNode]] = [[] for _ in extents]
    where: dict[Link, int] = {}
    children: dict[Link, list[PoolNode]] = {}
    for node in space.blocks:
        index = bisect.bisect(starts, node.slot) - 1
        where[node.link] = index
        if not node.pins:
            owned[index].append(node)
        if node.parent is not None:
            children.setdefault(node.parent, []).append(node)
    cost = list(map(len, owned))
    for node in space.blocks:
        if node.parent is not None and where.get(node.parent, -1) not in (-1, where[node.link]):
            cost[where[node.parent]] += 1
    free = _free_by_extent(space, starts)
    whole = [
        index
        for index, extent in enumerate(extents)
        if free[index] + len(owned[index]) == extent.units // space.arena.slot_units
    ]
    return _with_descendants(owned[min(whole, key=cost.__getitem__)], children) if whole else ()


def _free_by_extent(space: PoolSpace, starts: list[int]) -> list[int]:
    free = [0] * len(starts)
    for slot in space.arena.free_list():
        free[bisect.bisect(starts, slot) - 1] += 1
    return free


def _with_descendants(nodes: Iterable[PoolNode], children: dict[Link, list[PoolNode]]) -> list[PoolNode]:
    """Return blocks and all that hang from them, but those in use."""
    found = dict.fromkeys(nodes)
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop().link, ()):
            if child not in found and not child.pins:
                found[child] = None
                waiting.append(child)
    return list(found)

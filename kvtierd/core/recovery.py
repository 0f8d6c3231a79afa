"""Goes on with a pool that an earlier daemon left: its blocks are hits at once, its copies stay safe.

What that daemon had reserved and not committed is lost. Slots that engines had been told of are quarantined,
as if their connections had just been lost: until every process of the engine has acknowledged or is dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.handover import Live, resume
from kvtierd.core.ladder import Ladder
from kvtierd.core.ledger import Held, PoolState, Shaped
from kvtierd.core.model import Block, BlockId, State, block_key
from kvtierd.core.residency import PoolNode
from kvtierd.core.slots import Extent
from kvtierd.core.spaces import make_space

AWAIT = 60.0
"""Seconds for which the blocks of engines that are not back yet are kept from other layouts."""

NO_KEY = block_key(b"\0")
"""Of a slot that holds no block, but may still be copied into or out of."""


class Inconsistent(Exception):
    """The state contradicts itself or the pool: nothing of it can be believed."""


def restore(ladder: Ladder, state: PoolState, now: float, live: Live | None = None) -> None:
    """Put the state into a ladder that nothing has happened to yet; its changes are noted from now on.

    The restored blocks wait in the primary's queue as stores: what readers know of already is not told to
    them again. ``live``: what goes on with connections that were handed over; only what is held beside it
    is quarantined.

    Raises:
        Inconsistent: the state cannot be right; the ladder is not to be used.
    """
    ladder.stack.generation = state.counters.generation
    ladder.sessions.resume(state.counters)
    ladder.stack.primary.ledger.on = True
    held = _known_holders(ladder, state)
    found = _nodes(state, held)
    for namespace, shaped in state.shapes.items():
        _shape(ladder, shaped, found[namespace], held)
    nodes = {slot: node for there in found.values() for slot, node in there.items()}
    ladder.stack.primary.restored(nodes.values())
    live = live or Live()
    for one in held:
        _stand_in(ladder, one, nodes, {slot for job in live.jobs for slot, _, _ in job.blocks})
    resume(ladder, live, nodes, now)
    going_on = {job.number for job in live.jobs} | {lease.number for lease in live.leases}
    for one in held:
        if one.number not in going_on:
            _quarantine(ladder, one, nodes)
    connected = {session.process for session in live.sessions}
    for (_, process), attaches in state.mapped.items():
        for namespace, _ in attaches:
            space = ladder.stack.primary.spaces.get(namespace)
            if space is not None and process not in connected:
                space.awaited.add(process)
    ladder.awaits_until = now + AWAIT


def _known_holders(ladder: Ladder, state: PoolState) -> list[Held]:
    """Know the engines' processes again; return what is held by engines that have any."""
    sessions = ladder.sessions
    for (engine, process), attaches in state.mapped.items():
        sessions.await_back(engine, process, attaches)
    for number in [number for number, one in state.held.items() if one.engine not in sessions.mapped]:
        sessions.let_go(number)
    return [one for one in state.held.values() if one.engine in sessions.mapped]


def _nodes(state: PoolState, held: Sequence[Held]) -> dict[str, dict[int, PoolNode]]:
    """Return each namespace's blocks by slot, in the order in which they came."""
    found: dict[str, dict[int, PoolNode]] = {namespace: {} for namespace in state.shapes}
    try:
        for slot, generation, block in state.blocks.values():
            found[block.common.namespace][slot] = PoolNode(
                block, State.RESIDENT, slot=slot, generation=generation
            )
        for one in held:
            found[one.namespace]
    except KeyError as error:
        raise Inconsistent(f"a slot belongs to namespace {error}, which has no room") from None
    return found


def _shape(ladder: Ladder, shaped: Shaped, nodes: dict[int, PoolNode], held: Sequence[Held]) -> None:
    space = make_space(ladder.stack, shaped.layout)
    kept = {slot for one in held if one.namespace == space.namespace for slot in one.slots}
    if not space.arena.restore([Extent(*extent) for extent in shaped.extents], nodes.keys() | kept):
        raise Inconsistent(f"the slots of namespace {space.namespace} do not fit into the pool")
    ladder.stack.primary.spaces[space.namespace] = space
    try:
        space.blocks.fill(space.namespace, nodes.values())
    except KeyError:
        raise Inconsistent(f"a block of namespace {space.namespace} is in two slots") from None


def _stand_in(ladder: Ladder, held: Held, nodes: dict[int, PoolNode], reserved: set[int]) -> None:
    """Have a node for every held slot: where nothing is visible, one that only keeps the slot out of use."""
    space = ladder.stack.primary.spaces[held.namespace]
    for slot in held.slots:
        if slot not in nodes and slot not in reserved:
            node = PoolNode(Block.of(BlockId(space.namespace, NO_KEY), 0), State.GONE, slot=slot)
            nodes[slot] = node
            space.leaving.add(node)


def _quarantine(ladder: Ladder, held: Held, nodes: dict[int, PoolNode]) -> None:
    """Keep slots out of use until the engine's processes have spoken; tell those that are connected."""
    space = ladder.stack.primary.spaces[held.namespace]
    own = [nodes[slot] for slot in dict.fromkeys(held.slots)]
    for node in own:
        space.blocks.pin(node)
    ladder.custody.quarantine(held.number, 0, held.engine, own)

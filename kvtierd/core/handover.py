"""A running ladder as plain values, for the daemon that takes over from this one without anybody noticing.

After a crash engines connect again and what they held is quarantined. In a takeover their connections go on,
so their sessions, jobs and leases do, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtierd.core.ladder import Ladder
from kvtierd.core.ledger import Counters, Placed, PoolState
from kvtierd.core.model import BlockKey, State
from kvtierd.core.residency import PoolNode
from kvtierd.core.sessions import Job, Lease, Session


@dataclass(slots=True)
class HandedJob:
    """A store between reservation and commit; ``seconds`` are left of its time.

    ``gone``: slots of blocks that were taken away meanwhile; they are reserved until the job ends.
    """

    number: int
    session: int
    engine: str
    generation: int
    seconds: float
    blocks: list[Placed]
    store_to: tuple[str, ...] | None
    failed: list[BlockKey]
    gone: list[int]


@dataclass(slots=True)
class HandedLease:
    """Pins on the blocks in these slots; ``seconds`` are left of its time."""

    number: int
    session: int
    engine: str
    namespace: str
    seconds: float
    slots: list[int]
    exposed: bool


@dataclass(slots=True)
class Live:
    """What goes on with the engines' connections."""

    sessions: list[Session] = field(default_factory=list)
    jobs: list[HandedJob] = field(default_factory=list)
    leases: list[HandedLease] = field(default_factory=list)


def pool_counters(ladder: Ladder) -> Counters:
    """Return the last numbers that were given out."""
    sessions = ladder.sessions
    return Counters(sessions.fence, sessions.last_number, ladder.stack.generation)


def pool_state(ladder: Ladder) -> PoolState:
    """Return what the slot table of this ladder would say."""
    stack, sessions = ladder.stack, ladder.sessions
    state = PoolState(pool_counters(ladder))
    state.apply(space.shape() for space in stack.primary.spaces.values())
    state.apply([*sessions.mappings(), *sessions.holds()])
    state.apply(
        Placed(node.slot, node.generation, node.block)
        for node in stack.primary.nodes()
        if node.state is State.RESIDENT
    )
    return state


def live(ladder: Ladder, now: float) -> Live:
    """Return what goes on."""
    sessions = ladder.sessions
    return Live(
        sessions=list(sessions.open.values()),
        jobs=[_job(job, now) for job in sessions.jobs.values()],
        leases=[_lease(lease, now) for lease in sessions.leases.values() if lease.nodes],
    )


def _job(job: Job, now: float) -> HandedJob:
    blocks = [Placed(node.slot, node.generation, node.block) for node in job.nodes.values()]
    return HandedJob(
        number=job.number,
        session=job.session,
        engine=job.engine,
        generation=job.generation,
        seconds=max(0.0, job.deadline - now),
        blocks=blocks,
        store_to=job.store_to,
        failed=list(job.failed),
        gone=[node.slot for node in job.nodes.values() if node.state is State.GONE],
    )


def _lease(lease: Lease, now: float) -> HandedLease:
    return HandedLease(
        number=lease.number,
        session=lease.session,
        engine=lease.engine,
        namespace=lease.nodes[0].block.namespace,
        seconds=max(0.0, lease.deadline - now),
        slots=[node.slot for node in lease.nodes],
        exposed=lease.exposed,
    )


def resume(ladder: Ladder, handed: Live, nodes: dict[int, PoolNode], now: float) -> None:
    """Go on with sessions, jobs and leases; ``nodes`` by slot are those that are there already."""
    sessions = ladder.sessions
    for session in handed.sessions:
        sessions.attach(session)
        space = ladder.stack.primary.spaces.get(session.namespace)
        if space is not None:
            space.sessions.add(session.number)
    for job in handed.jobs:
        _resume_job(ladder, job, nodes, now)
    for lease in handed.leases:
        space = ladder.stack.primary.spaces[lease.namespace]
        own = [nodes[slot] for slot in lease.slots]
        for node in own:
            space.blocks.pin(node)
        sessions.leases[lease.number] = Lease(
            lease.number, lease.session, lease.engine, now + lease.seconds, own, lease.exposed
        )


def _resume_job(ladder: Ladder, job: HandedJob, nodes: dict[int, PoolNode], now: float) -> None:
    own: dict[BlockKey, PoolNode] = {}
    for slot, generation, block in job.blocks:
        space = ladder.stack.primary.spaces[block.namespace]
        node = PoolNode(block, State.RESERVED, slot=slot, generation=generation)
        node.pins = 1
        if slot in job.gone:
            node.state = State.GONE
            space.leaving.add(node)
        else:
            space.blocks.add(node)
        nodes[slot] = own[block.key] = node
    ladder.sessions.jobs[job.number] = Job(
        number=job.number,
        session=job.session,
        engine=job.engine,
        generation=job.generation,
        deadline=now + job.seconds,
        nodes=own,
        store_to=job.store_to,
        failed=set(job.failed),
    )

"""Who is attached, what each holds, and which freed slots may still be under somebody's DMA.

A copy cannot be called back. When a job or a load's lease ends without the word of its holder (deadline,
lost connection), its slots are *quarantined*: they stay pinned until every process of that engine that had
mapped the pool at that moment has acknowledged the fence or is dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvtierd.core.holdings import Holdings
from kvtierd.core.ledger import Counters, Ended, Held, Ledger, Mapped, Unmapped
from kvtierd.core.model import BlockKey
from kvtierd.core.residency import PoolNode
from kvtierd.core.stimuli import Role


@dataclass(slots=True)
class Job:
    """A store between its reservation and its commit. ``failed``: keys that a worker gave up."""

    number: int
    session: int
    engine: str
    generation: int
    deadline: float
    nodes: dict[BlockKey, PoolNode]
    store_to: tuple[str, ...] | None
    failed: set[BlockKey] = field(default_factory=set)


@dataclass(slots=True)
class Lease:
    """Pins on blocks. ``exposed``: slots were told to the engine, so expiry needs a quarantine."""

    number: int
    session: int
    engine: str
    deadline: float
    nodes: list[PoolNode]
    exposed: bool


@dataclass(slots=True)
class Quarantine:
    """Slots that stay pinned until ``waiting`` (process names) is empty."""

    number: int
    engine: str
    session: int
    fence: int
    nodes: list[PoolNode]
    waiting: set[bytes]


@dataclass(slots=True)
class Session:
    """One attached connection."""

    number: int
    engine: str
    process: bytes
    namespace: str
    role: Role
    rank: int
    dp_rank: int


@dataclass(slots=True)
class Sessions:
    """All sessions, jobs, leases and quarantines; numbers of the three come from one counter."""

    open: dict[int, Session] = field(default_factory=dict)
    jobs: Holdings[Job] = field(default_factory=Holdings)
    leases: Holdings[Lease] = field(default_factory=Holdings)
    quarantines: dict[int, Quarantine] = field(default_factory=dict)
    mapped: dict[str, set[bytes]] = field(default_factory=dict)
    """Engine id to the living processes that mapped the pool for it."""
    failed_copies: Counter[int] = field(default_factory=Counter)
    """Rank of every worker that came, to the blocks that it could not copy."""
    fence: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    _number: int = 0
    _attaches: dict[tuple[str, bytes], set[tuple[str, int]]] = field(default_factory=dict)
    """Engine and process to the (namespace, dp rank) pairs of their attaches."""
    _ranks: dict[bytes, set[int]] = field(default_factory=dict)
    """Process to the dp ranks that it attached with."""

    def next_number(self) -> int:
        """Return a fresh job or lease number, never 0."""
        self._number += 1
        return self._number

    @property
    def last_number(self) -> int:
        """The last number that a job or lease got."""
        return self._number

    def resume(self, counters: Counters) -> None:
        """Go on counting where an earlier daemon stopped."""
        self.fence, self._number = counters.fence, counters.number

    def hold(self, number: int, engine: str, nodes: Sequence[PoolNode]) -> None:
        """Note that an engine was told the slots of nodes, under the number of a job or lease."""
        if self.ledger.on and nodes:
            self.ledger.note(_held(number, engine, nodes))

    def let_go(self, number: int) -> None:
        """Note that nobody copies under this number any more."""
        self.ledger.note(Ended(number))

    def attach(self, session: Session) -> None:
        """Note a session and that its process maps the pool."""
        self.open[session.number] = session
        if session.role is Role.WORKER:
            self.failed_copies[session.rank] += 0
        self.await_back(session.engine, session.process, [(session.namespace, session.dp_rank)])
        self.ledger.note(Mapped(session.engine, session.process, session.namespace, session.dp_rank))

    def await_back(self, engine: str, process: bytes, attaches: Collection[tuple[str, int]]) -> None:
        """Know a process that maps the pool, with its (namespace, dp rank) pairs, also without a session."""
        self._ranks.setdefault(process, set()).update(dp_rank for _, dp_rank in attaches)
        self._attaches.setdefault((engine, process), set()).update(attaches)
        self.mapped.setdefault(engine, set()).add(process)

    def mappings(self) -> list[Mapped]:
        """Return who maps the pool, as the ledger notes it."""
        return [Mapped(*who, *how) for who, attaches in self._attaches.items() for how in attaches]

    def holds(self) -> list[Held]:
        """Return what engines may be copying into or out of, as the ledger notes it."""
        nodes: list[tuple[int, str, list[PoolNode]]] = [
            *((job.number, job.engine, list(job.nodes.values())) for job in self.jobs.values()),
            *((lease.number, lease.engine, lease.nodes) for lease in self.leases.values() if lease.exposed),
            *((held.number, held.engine, held.nodes) for held in self.quarantines.values()),
        ]
        return [_held(*item) for item in nodes if item[2]]

    def leave(self, session: Session) -> None:
        """Note a goodbye: its dp rank is gone, unless another session of this process has it."""
        others = (other for other in self.open.values() if other.process == session.process)
        if all(other.dp_rank != session.dp_rank for other in others):
            self._ranks.get(session.process, set()).discard(session.dp_rank)

    def dp_ranks(self) -> set[int]:
        """Return the dp ranks that are attached, or whose process lives and may come back."""
        return {rank for ranks in self._ranks.values() for rank in ranks}

    def of_engine(self, engine: str) -> list[Session]:
        """Return the open sessions of an engine."""
        return [session for session in self.open.values() if session.engine == engine]

    def quarantine(self, number: int, session: int, engine: str, nodes: list[PoolNode]) -> Quarantine | None:
        """Hold nodes for the engine's processes; ``None`` when none of them lives: nothing is held."""
        waiting = set(self.mapped.get(engine, ()))
        if not waiting:
            self.let_go(number)
            return None
        self.fence += 1
        held = Quarantine(number, engine, session, self.fence, nodes, waiting)
        self.quarantines[number] = held
        return held

    def acknowledged(self, engine: str, process: bytes, fence: int) -> list[Quarantine]:
        """Take a process's word up to ``fence``; return (and forget) quarantines that ended with it."""
        ended = []
        for held in self.quarantines.values():
            if held.engine == engine and held.fence <= fence:
                held.waiting.discard(process)
                if not held.waiting:
                    ended.append(held)
        return self._forget(ended)

    def process_gone(self, process: bytes, engines: Collection[str] | None = None) -> list[Quarantine]:
        """Note that a process no longer touches the pool (for the engines, ``None``: all of them)."""
        ended: list[Quarantine] = []
        self.ledger.note(Unmapped(process, None if engines is None else tuple(engines)))
        for engine in list(self.mapped) if engines is None else engines:
            processes = self.mapped.get(engine)
            if processes is None:
                continue
            processes.discard(process)
            self._attaches.pop((engine, process), None)
            if not processes:
                del self.mapped[engine]
            ended += self.acknowledged(engine, process, self.fence)
        if not any(process in processes for processes in self.mapped.values()):
            self._ranks.pop(process, None)
        return ended

    def _forget(self, ended: list[Quarantine]) -> list[Quarantine]:
        for held in ended:
            self.forget(held)
        return ended

    def forget(self, held: Quarantine) -> None:
        """End a quarantine."""
        del self.quarantines[held.number]
        self.let_go(held.number)


def _held(number: int, engine: str, nodes: Sequence[PoolNode]) -> Held:
    return Held(number, engine, nodes[0].block.namespace, tuple(node.slot for node in nodes))

"""Leases: blocks that an engine was told it may read stay until it gives them back, or its time is over."""

from __future__ import annotations

from kvtierd.core.custody import Custody
from kvtierd.core.effects import Done
from kvtierd.core.residency import PoolNode
from kvtierd.core.sessions import Lease, Session, Sessions
from kvtierd.core.stack import Stack
from kvtierd.core.stimuli import Release, Role


class Leases:
    """Leases from their beginning to their release, expiry or quarantine; ``ttl`` in seconds."""

    def __init__(self, stack: Stack, sessions: Sessions, custody: Custody, ttl: float) -> None:
        self._stack = stack
        self._sessions = sessions
        self._custody = custody
        self._ttl = ttl

    def retune(self, ttl: float) -> None:
        """Give leases from now on at most so many seconds."""
        self._ttl = ttl

    def on_hits(self, session: Session, nodes: list[PoolNode], seconds: float) -> int:
        """Keep blocks where they are for a load to come; returns the lease's number."""
        pin = self._stack.primary.spaces[session.namespace].blocks.pin
        for node in nodes:
            pin(node)
        return self._begin(session, nodes, min(seconds, self._ttl), exposed=False)

    def on_slots(self, session: Session, nodes: list[PoolNode]) -> int:
        """Lease blocks, pinned already, whose slots the engine is told; returns the lease's number."""
        number = self._begin(session, nodes, self._ttl, exposed=True)
        self._sessions.hold(number, session.engine, nodes)
        return number

    def _begin(self, session: Session, nodes: list[PoolNode], seconds: float, *, exposed: bool) -> int:
        number, deadline = self._sessions.next_number(), self._stack.now + seconds
        self._sessions.leases[number] = Lease(
            number, session.number, session.engine, deadline, nodes, exposed
        )
        return number

    def release(self, session: Session, request: Release) -> None:
        """End a lease on its holder's word, also when it had expired into quarantine."""
        lease = self._sessions.leases.get(request.lease)
        if lease is not None and lease.session == session.number:
            del self._sessions.leases[lease.number]
            if lease.exposed:
                self._sessions.let_go(lease.number)
            self._stack.primary.unpin(lease.nodes)
        elif session.role is Role.SCHEDULER:
            self._custody.resolve(request.lease, session.engine)
        self._stack.answer(session.number, Done(id=request.id))

    def revoke(self, lease: Lease) -> None:
        """End a lease without its holder's word."""
        del self._sessions.leases[lease.number]
        if not lease.exposed:  # no slot was told to anybody
            self._stack.primary.unpin(lease.nodes)
            return
        self._stack.primary.counters["leases_revoked"] += 1
        self._custody.quarantine(lease.number, lease.session, lease.engine, lease.nodes)

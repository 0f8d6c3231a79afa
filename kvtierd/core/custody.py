"""The rule that keeps DMA out of reused slots: what an engine holds ends only on its word or its death."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvtierd.core.effects import Revoked
from kvtierd.core.residency import PoolNode
from kvtierd.core.sessions import Quarantine, Sessions
from kvtierd.core.stack import Stack


class Custody:
    """Moves the nodes of revoked jobs and leases into quarantine and lets them go again."""

    def __init__(self, stack: Stack, sessions: Sessions) -> None:
        self._stack = stack
        self._sessions = sessions

    def quarantine(self, number: int, session: int, engine: str, nodes: list[PoolNode]) -> None:
        """Hold pinned nodes until the engine's processes have spoken, and tell its sessions so."""
        held = self._sessions.quarantine(number, session, engine, nodes)
        if held is None:
            self._stack.primary.unpin(nodes)
            return
        for other in self._sessions.of_engine(engine):
            self._stack.answer(other.number, Revoked(id=0, fence=held.fence))

    def resolve(self, number: int, engine: str) -> None:
        """End the quarantine of a job or lease on a late word of its engine's scheduler, if there is one."""
        held = self._sessions.quarantines.get(number)
        if held is not None and held.engine == engine:
            self._sessions.forget(held)
            self._stack.primary.unpin(held.nodes)

    def acknowledged(self, engine: str, process: bytes, fence: int) -> None:
        """Take a process's word that it copies nothing that was revoked up to ``fence``."""
        self._end(self._sessions.acknowledged(engine, process, fence))

    def process_gone(self, process: bytes, engines: Collection[str] | None = None) -> None:
        """Note that a process died, or said goodbye to some engines."""
        self._end(self._sessions.process_gone(process, engines))
        if engines is None:
            for space in self._stack.primary.spaces.values():
                space.awaited.discard(process)

    def _end(self, ended: Iterable[Quarantine]) -> None:
        for held in ended:
            self._stack.primary.unpin(held.nodes)

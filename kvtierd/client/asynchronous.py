"""The asyncio client (asyncio and uvloop): the verbs of :mod:`kvtierd.client.blocking`, to be awaited.

Requests are pipelined: any number of tasks may use one session at a time. It belongs to the loop it runs on.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from kvtierd.client import _verbs
from kvtierd.client._async_line import AsyncLine
from kvtierd.client._base import SessionBase, attach_request, must_raise, unanswered
from kvtierd.client._link import Backoff, Miss
from kvtierd.client._verbs import Flow, JobData, LoadData, LookupData
from kvtierd.core.effects import InventoryEntry
from kvtierd.core.model import BlockKey, BlockMeta, Layout, Scope
from kvtierd.core.stimuli import Request, Role

T = TypeVar("T")


class AsyncLookup(LookupData["AsyncSession"], eq=False):
    """Result of :meth:`AsyncSession.lookup`; a context manager that releases the lease."""

    async def release(self, *, wait: bool = True) -> None:
        """Give the lease back, if there is one; ``wait``: until the daemon has said so."""
        await self.session._end(_verbs.release_lookup(self), wait)

    async def __aenter__(self) -> AsyncLookup:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncJob(JobData, kw_only=True, eq=False):
    """Result of :meth:`AsyncSession.prepare_store`; as a context manager: commit, or abort on an error."""

    session: AsyncSession

    async def commit(self, failed: Iterable[BlockKey] = ()) -> tuple[BlockKey, ...]:
        """Make the blocks visible, but for the ``failed`` ones; returns the keys that are visible now."""
        return await self.session._run(_verbs.commit(self, failed))

    async def abort(self) -> None:
        """Give the slots back; no copy into them may be running."""
        await self.session._run(_verbs.abort(self))

    async def __aenter__(self) -> AsyncJob:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.commit()
        else:
            await self.abort()


class AsyncLoaded(LoadData, kw_only=True, eq=False):
    """Result of :meth:`AsyncSession.load`; a context manager that releases the lease."""

    session: AsyncSession

    async def release(self, *, wait: bool = True) -> None:
        """Give the slots back; no copy out of them may be running. ``wait``: until the daemon has said so."""
        await self.session._end(_verbs.release_load(self), wait)

    async def __aenter__(self) -> AsyncLoaded:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncSession(SessionBase):
    """A blocking session. Verbs are described at their counterparts in :mod:`kvtierd.client._verbs`.

    Every verb raises :class:`kvtierd.errors.RequestRefused` for a mistake of the caller and for nothing else
    that the daemon does.
    """

    def __init__(self, line: AsyncLine, layout: Layout) -> None:
        super().__init__(line.channel, layout)
        self._line = line

    async def lookup(
        self,
        keys: Iterable[BlockKey],
        promote: bool = False,
        lease: float | None = None,
        *,
        touch: bool = False,
    ) -> AsyncLookup:
        """Ask for the state of keys, as :meth:`kvtierd.client.Session.lookup` does."""
        make = partial(AsyncLookup, self)
        return await self._run(_verbs.lookup(make, keys, promote, lease, self, touch=touch))

    async def prepare_store(
        self,
        keys: Iterable[BlockKey],
        meta: Sequence[BlockMeta | None] | None = None,
        scope: Scope | None = None,
        *,
        traceparent: str | None = None,
    ) -> AsyncJob:
        """Reserve a slot for each key that is not there yet; ``traceparent``: the caller's span."""
        make = partial(AsyncJob, session=self)
        return await self._run(_verbs.prepare_store(make, keys, meta, scope, self, traceparent))

    async def fail(self, job: int, keys: Iterable[BlockKey]) -> bool:
        """Report a worker's failed copies before the scheduler commits the job."""
        return await self._run(_verbs.fail(job, keys))

    async def load(
        self,
        keys: Iterable[BlockKey],
        deadline: float = 0.5,
        scope: Scope | None = None,
        *,
        traceparent: str | None = None,
    ) -> AsyncLoaded:
        """Lease the slots of the leading keys that can be had within ``deadline`` seconds."""
        make = partial(AsyncLoaded, session=self)
        return await self._run(_verbs.load(make, keys, deadline, scope, self, traceparent))

    async def put(self, key: BlockKey, data: bytes | memoryview, meta: BlockMeta | None = None) -> bool:
        """Store one block (the ranks' parts one after another); True when it is in the pool."""
        return await self._run(_verbs.put(key, data, meta, self))

    async def get(self, key: BlockKey, deadline: float = 0.5) -> bytes | None:
        """Return a copy of one block (the ranks' parts one after another), None when it cannot be had."""
        return await self._run(_verbs.get(key, deadline, self))

    async def evict(self, keys: Iterable[BlockKey], tiers: Sequence[str] | None = None) -> int:
        """Remove keys from tiers (None: all); returns the number of blocks removed."""
        return await self._run(_verbs.evict(keys, tiers))

    async def reset(self, tiers: Sequence[str] | None = None) -> int:
        """Remove everything of this namespace from tiers (None: all); returns the number removed."""
        return await self._run(_verbs.reset(tiers))

    async def prefetch(self, keys: Iterable[BlockKey]) -> int:
        """Start promoting keys into the pool; returns how many were started."""
        return await self._run(_verbs.prefetch(keys))

    async def renew(self, *held: _verbs.JobData | _verbs.LoadData | _verbs.LookupData[Any]) -> int:
        """Give jobs and leases that take longer their whole time again; returns how many were still held."""
        return await self._run(_verbs.renew(held))

    async def touch(self, keys: Iterable[BlockKey]) -> int:
        """Mark keys as just used, in every tier."""
        return await self._run(_verbs.touch(keys))

    async def inventory(self, tier: str | None = None) -> list[InventoryEntry]:
        """Return every residency of this namespace, of one tier or of all."""
        return await self._run(_verbs.inventory(tier))

    def poll(self) -> int | None:
        """Take in notices without waiting; returns the fence to be acknowledged, if any."""
        self._line.poll()
        return self._link.pending_fence(polled=True)

    async def acknowledge(self) -> bool:
        """Say that no copy of what was revoked up to the last polled fence is running in this process."""
        fence = await self._run(_verbs.acknowledge(self._link.acknowledgeable(), self._link.epoch))
        if fence is not None:
            self._link.acknowledged(fence)
        return fence is not None

    async def close(self) -> None:
        """Say goodbye (within the deadline) and close; later verbs are misses."""
        if self.connected:
            await self._run(_verbs.goodbye())
        self._line.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        answer: Any = None
        try:
            while True:
                answer = await self._line.ask(flow.send(answer))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _end(self, flow: Flow[None], wait: bool) -> None:
        """Give something back."""
        if wait:
            await self._run(flow)
        else:
            for verb in flow:
                self._line.tell(verb)


class AsyncClient:
    """A daemon's address. Each attach has a connection of its own.

    ``deadline``: seconds that a verb may wait for the daemon. ``clock`` and ``rng`` time the reconnects only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        deadline: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.deadline = deadline
        self._clock, self._rng = clock, rng or random.Random()  # noqa: S311 - jitter
        self._sessions: list[AsyncSession] = []

    async def attach(
        self,
        layout: Layout,
        *,
        engine_id: str,
        dp_rank: int = 0,
        role: str | Role = Role.SCHEDULER,
        rank: int = 0,
    ) -> AsyncSession:
        """Bind a new connection to a layout; with no daemon there, the session connects as soon as there is.

        Raises:
            RequestRefused: the daemon is there and does not take this attach.
        """
        line = self._line(attach_request(layout, engine_id, dp_rank, role, rank))
        session = AsyncSession(line, layout)
        if not await line.connect(self.deadline) and must_raise(session.refused):
            line.close()
            assert session.refused is not None
            raise session.refused
        self._sessions = [known for known in self._sessions if not known._line.closed]
        self._sessions.append(session)
        return session

    async def status(self) -> dict[str, Any]:
        """Return the daemon's status.

        Raises:
            Unavailable: no daemon answers within the deadline.
            RequestRefused: it does not speak this client's protocol version.
        """
        line = self._line(None)
        try:
            if await line.connect(self.deadline):
                reply = await line.ask(_verbs.STATUS)
                if not isinstance(reply, Miss):
                    return reply.body
            elif line.link.refused is not None:
                raise line.link.refused
            raise unanswered(str(self.path))
        finally:
            line.close()

    async def close(self) -> None:
        """Close all sessions, each within the deadline."""
        for session in self._sessions:
            await session.close()
        self._sessions.clear()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _line(self, attach: Callable[..., Request] | None) -> AsyncLine:
        return AsyncLine(self.path, self.deadline, attach, Backoff(self._clock, self._rng))

"""The blocking client. Thread-safe; no thread of its own: it reconnects inside its verbs and ``poll``.

A verb waits at most the client's deadline (plus a load's own), and hardly at all for a daemon that is away or
already late: then it is a miss at once.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from kvtierd.client import _verbs
from kvtierd.client._base import SessionBase, attach_request, must_raise, unanswered
from kvtierd.client._blocking_line import Line
from kvtierd.client._link import Backoff, Miss, R, Verb
from kvtierd.client._verbs import Flow, JobData, LoadData, LookupData
from kvtierd.core.effects import InventoryEntry
from kvtierd.core.model import BlockKey, BlockMeta, Layout, Scope
from kvtierd.core.stimuli import Request, Role
from kvtierd.errors import Unavailable
from kvtierd.wire.messages import Level, SurveyPage

T = TypeVar("T")


class Lookup(LookupData["Session"], eq=False):
    """Result of :meth:`Session.lookup`; a context manager that releases the lease."""

    def release(self, *, wait: bool = True) -> None:
        """Give the lease back, if there is one; ``wait``: until the daemon has said so."""
        self.session._end(_verbs.release_lookup(self), wait)

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Job(JobData, kw_only=True, eq=False):
    """Result of :meth:`Session.prepare_store`; as a context manager: commit, or abort on an error."""

    session: Session

    def commit(self, failed: Iterable[BlockKey] = ()) -> tuple[BlockKey, ...]:
        """Make the blocks visible, but for the ``failed`` ones; returns the keys that are visible now."""
        return self.session._run(_verbs.commit(self, failed))

    def abort(self) -> None:
        """Give the slots back; no copy into them may be running."""
        self.session._run(_verbs.abort(self))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


class Loaded(LoadData, kw_only=True, eq=False):
    """Result of :meth:`Session.load`; a context manager that releases the lease."""

    session: Session

    def release(self, *, wait: bool = True) -> None:
        """Give the slots back; no copy out of them may be running. ``wait``: until the daemon has said so."""
        self.session._end(_verbs.release_load(self), wait)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Session(SessionBase):
    """A blocking session. Verbs are described at their counterparts in :mod:`kvtierd.client._verbs`.

    Every verb raises :class:`kvtierd.errors.RequestRefused` for a mistake of the caller and for nothing else
    that the daemon does.
    """

    def __init__(self, line: Line, layout: Layout) -> None:
        super().__init__(line.channel, layout)
        self._line = line
        self._found = partial(Lookup, self)

    def lookup(
        self,
        keys: Iterable[BlockKey],
        promote: bool = False,
        lease: float | None = None,
        *,
        touch: bool = False,
    ) -> Lookup:
        """Ask for the state of keys; ``lease`` seconds pin the leading HITs, ``promote`` starts loading.

        ``touch``: they are about to be used. With it or ``promote``, unknown keys are PENDING while the tiers
        that other daemons write to are asked for them.
        """
        verb = _verbs.asked_states(
            keys, promote, lease, touch=touch
        )  # without a generator, which takes a tenth of it all
        return _verbs.found_states(self._found, verb, self._line.ask(verb), self._link.epoch)

    def prepare_store(
        self,
        keys: Iterable[BlockKey],
        meta: Sequence[BlockMeta | None] | None = None,
        scope: Scope | None = None,
        *,
        traceparent: str | None = None,
    ) -> Job:
        """Reserve a slot for each key that is not there yet; ``traceparent``: the caller's span."""
        make = partial(Job, session=self)
        return self._run(_verbs.prepare_store(make, keys, meta, scope, self, traceparent))

    def fail(self, job: int, keys: Iterable[BlockKey]) -> bool:
        """Report a worker's failed copies before the scheduler commits the job."""
        return self._run(_verbs.fail(job, keys))

    def load(
        self,
        keys: Iterable[BlockKey],
        deadline: float = 0.5,
        scope: Scope | None = None,
        *,
        traceparent: str | None = None,
    ) -> Loaded:
        """Lease the slots of the leading keys that can be had within ``deadline`` seconds."""
        make = partial(Loaded, session=self)
        return self._run(_verbs.load(make, keys, deadline, scope, self, traceparent))

    def put(self, key: BlockKey, data: bytes | memoryview, meta: BlockMeta | None = None) -> bool:
        """Store one block (the ranks' parts one after another); True when it is in the pool."""
        return self._run(_verbs.put(key, data, meta, self))

    def get(self, key: BlockKey, deadline: float = 0.5) -> bytes | None:
        """Return a copy of one block (the ranks' parts one after another), None when it cannot be had."""
        return self._run(_verbs.get(key, deadline, self))

    def evict(self, keys: Iterable[BlockKey], tiers: Sequence[str] | None = None) -> int:
        """Remove keys from tiers (None: all); returns the number of blocks removed."""
        return self._run(_verbs.evict(keys, tiers))

    def reset(self, tiers: Sequence[str] | None = None) -> int:
        """Remove everything of this namespace from tiers (None: all); returns the number removed."""
        return self._run(_verbs.reset(tiers))

    def prefetch(self, keys: Iterable[BlockKey]) -> int:
        """Start promoting keys into the pool; returns how many were started."""
        return self._run(_verbs.prefetch(keys))

    def renew(self, *held: _verbs.JobData | _verbs.LoadData | _verbs.LookupData[Any]) -> int:
        """Give jobs and leases that take longer their whole time again; returns how many were still held."""
        return self._run(_verbs.renew(held))

    def touch(self, keys: Iterable[BlockKey]) -> int:
        """Mark keys as just used, in every tier."""
        return self._run(_verbs.touch(keys))

    def inventory(self, tier: str | None = None) -> list[InventoryEntry]:
        """Return every residency of this namespace, of one tier or of all."""
        return self._run(_verbs.inventory(tier))

    def poll(self) -> int | None:
        """Take in notices without waiting; returns the fence to be acknowledged, if any."""
        self._line.poll()
        return self._link.pending_fence(polled=True)

    def acknowledge(self) -> bool:
        """Say that no copy of what was revoked up to the last polled fence is running in this process."""
        fence = self._run(_verbs.acknowledge(self._link.acknowledgeable(), self._link.epoch))
        if fence is not None:
            self._link.acknowledged(fence)
        return fence is not None

    def close(self) -> None:
        """Say goodbye (within the deadline) and close; later verbs are misses."""
        if self.connected:
            self._run(_verbs.goodbye())
        self._line.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        answer: Any = None
        try:
            while True:
                answer = self._line.ask(flow.send(answer))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _end(self, flow: Flow[None], wait: bool) -> None:
        """Give something back."""
        if wait:
            self._run(flow)
        else:
            for verb in flow:
                self._line.tell(verb)


class Client:
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
        self._sessions: list[Session] = []

    def attach(
        self,
        layout: Layout,
        *,
        engine_id: str,
        dp_rank: int = 0,
        role: str | Role = Role.SCHEDULER,
        rank: int = 0,
        wait: float | None = None,
        patient: bool = False,
    ) -> Session:
        """Bind a new connection to a layout; with no daemon there, the session connects as soon as there is.

        ``wait``: seconds that a daemon which is there may take to answer (default: the deadline).
        ``patient``: a refusal is left in :attr:`Session.refused`, and the session goes on trying.

        Raises:
            RequestRefused: the daemon is there and does not take this attach, or this process cannot map its
                pool (code ``cannot_map``).
        """
        line = self._line(attach_request(layout, engine_id, dp_rank, role, rank))
        session = Session(line, layout)
        connected = line.connect(self.deadline if wait is None else wait)
        if not connected and not patient and must_raise(session.refused):
            line.close()
            assert session.refused is not None
            raise session.refused
        self._sessions = [known for known in self._sessions if not known._line.closed]
        self._sessions.append(session)
        return session

    def status(self) -> dict[str, Any]:
        """Return the daemon's status.

        Raises:
            Unavailable: no daemon answers within the deadline.
            RequestRefused: it does not speak this client's protocol version.
        """
        return self._once(_verbs.STATUS).body

    def log_level(self, level: Level | None = None) -> str:
        """Change the level of the daemon's log, if one is given; return the level in force.

        Raises:
            Unavailable: no daemon answers within the deadline.
            RequestRefused: this is not the control socket, or there is no such level.
        """
        return self._once(_verbs.log_level(level)).level

    def order(self, request: type[Request], reply: type[R], **fields: Any) -> R:
        """Have an operator's request with these fields carried out; return the answer.

        Raises:
            Unavailable: no daemon answers within the deadline.
            RequestRefused: this is not the control socket, or the daemon says why not.
        """
        return self._once(_verbs.order(request, reply, **fields))

    def _once(self, verb: Verb[R]) -> R:
        """Ask what needs no session, on a connection of its own."""
        line = self._line(None)
        try:
            if line.connect(self.deadline):
                reply = line.ask(verb)
                if not isinstance(reply, Miss):
                    return reply
            elif line.link.refused is not None:
                raise line.link.refused
            raise unanswered(str(self.path))
        finally:
            line.close()

    def survey(self, tier: str | None = None) -> Iterator[SurveyPage]:
        """Yield all residencies of all namespaces, or of one tier, page by page; on the control socket only.

        Raises:
            Unavailable: no daemon answers within the deadline, for each page.
            RequestRefused: there is no such tier, or this is not the control socket.
        """
        line = self._line(None)
        try:
            if not line.connect(self.deadline):
                raise line.link.refused or unanswered(str(self.path))
            cursor = 0
            while True:
                page = line.ask(_verbs.survey(tier, cursor))
                if isinstance(page, Miss):
                    raise Unavailable(f"the daemon at {self.path} stopped answering ({page.reason})")
                yield page
                cursor = page.cursor
                if cursor == 0:
                    return
        finally:
            line.close()

    def close(self) -> None:
        """Close all sessions, each within the deadline."""
        for session in self._sessions:
            session.close()
        self._sessions.clear()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, attach: Callable[..., Request] | None) -> Line:
        return Line(self.path, self.deadline, attach, Backoff(self._clock, self._rng))

"""Several verbs on their way at once, over a blocking session: sent now, answered when somebody looks.

For a caller that must not wait, such as an engine's scheduler: it queues verbs, has them written in one go,
waits at most once for all answers that it needs now, and finds the others at a later :meth:`Pipeline.poll`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from kvtierd.client import _verbs
from kvtierd.client._link import AWAY, LATE, Miss, Verb, outcome
from kvtierd.client._verbs import Flow
from kvtierd.client.blocking import Job, Loaded, Lookup, Session
from kvtierd.core.effects import ErrorCode, Reply
from kvtierd.core.model import BlockKey, BlockMeta, Scope
from kvtierd.errors import RemoteProtocolError, RequestRefused

T = TypeVar("T")

# The caller gave the answer up, for no fault of the daemon's.
DROPPED = "dropped"

# More verbs than this without an answer are misses, but for those that give something back.
MAX_IN_FLIGHT = 1024


class Call(Generic[T]):
    """One verb on its way; ``miss`` says why it ended without the daemon's word ("": it did not)."""

    __slots__ = ("_error", "_flow", "_result", "_verb", "done", "epoch", "miss", "request")

    def __init__(self, flow: Flow[T], verb: Verb[Any] | None) -> None:
        self.done = False
        self.miss = ""
        self.request = 0
        self.epoch = 0
        self._flow = flow
        self._verb = verb
        self._error: RequestRefused | None = None
        self._result: T | None = None

    @property
    def result(self) -> T:
        """What the verb of the session returns.

        Raises:
            RequestRefused: the daemon found a mistake of the caller.
        """
        assert self.done, "not answered yet"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set with `done`


class Pipeline:
    """The verbs of a session as :class:`Call`; used by one thread.

    ``round_trips`` counts the calls of :meth:`wait` that had to wait and ``waited`` their seconds;
    ``misses`` counts verbs that ended without the daemon's word, by reason.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.round_trips = 0
        self.waited = 0.0
        self.misses: Counter[str] = Counter()
        self._line = session._line
        self._calls: dict[int, Call[Any]] = {}

    # -- verbs -----------------------------------------------------------------------------------------

    def lookup(
        self,
        keys: Iterable[BlockKey],
        promote: bool = False,
        lease: float | None = None,
        *,
        everywhere: bool = False,
        touch: bool = False,
        scope: Scope | None = None,
    ) -> Call[Lookup]:
        """Begin :meth:`Session.lookup`."""
        make = partial(Lookup, self.session)
        return self._begin(
            _verbs.lookup(
                make, keys, promote, lease, self.session, everywhere=everywhere, touch=touch, scope=scope
            )
        )

    def prepare_store(
        self,
        keys: Iterable[BlockKey],
        meta: Sequence[BlockMeta | None] | None = None,
        scope: Scope | None = None,
        *,
        traceparent: str | None = None,
    ) -> Call[Job]:
        """Begin :meth:`Session.prepare_store`."""
        make = partial(Job, session=self.session)
        return self._begin(_verbs.prepare_store(make, keys, meta, scope, self.session, traceparent))

    def commit(self, job: Job, failed: Iterable[BlockKey] = ()) -> Call[tuple[BlockKey, ...]]:
        """Begin :meth:`Job.commit`."""
        return self._begin(_verbs.commit(job, failed))

    def abort(self, job: Job) -> Call[None]:
        """Begin :meth:`Job.abort`."""
        return self._begin(_verbs.abort(job))

    def load(
        self,
        keys: Iterable[BlockKey],
        deadline: float = 0.0,
        scope: Scope | None = None,
        *,
        traceparent: str | None = None,
    ) -> Call[Loaded]:
        """Begin :meth:`Session.load`."""
        make = partial(Loaded, session=self.session)
        return self._begin(_verbs.load(make, keys, deadline, scope, self.session, traceparent))

    def release(self, held: Lookup | Loaded) -> Call[None]:
        """Begin :meth:`Lookup.release` or :meth:`Loaded.release`."""
        if isinstance(held, Lookup):
            return self._begin(_verbs.release_lookup(held))
        return self._begin(_verbs.release_load(held))

    def reset(self, tiers: Sequence[str] | None = None) -> Call[int]:
        """Begin :meth:`Session.reset`."""
        return self._begin(_verbs.reset(tiers))

    # -- on their way ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was queued; never waits."""
        self._line.gather((), 0.0)

    def poll(self) -> None:
        """Write what was queued and take in the answers that have come; never waits."""
        self._line.poll()
        self._settle()

    def notices(self) -> int | None:
        """As :meth:`poll` and :meth:`Session.poll` in one: returns the fence to be acknowledged, if any."""
        fence = self.session.poll()
        self._settle()
        return fence

    def wait(self, calls: Iterable[Call[Any]], seconds: float | None = None) -> bool:
        """Wait for the answers to all ``calls`` at once, at most the session's deadline; False when too late.

        A call that is late is still on its way: :meth:`poll` may find its answer, :meth:`drop` gives it up.
        """
        self._settle()
        late = [call for call in calls if not call.done]
        if not late:
            self.flush()
            return True
        began = time.monotonic()
        until = began + (self._line.deadline if seconds is None else seconds)
        self.round_trips += 1
        self._line.gather([call.request for call in late], until)
        self._settle()
        self.waited += time.monotonic() - began
        return all(call.done for call in late)

    def drop(self, call: Call[Any], *, late: bool = True) -> None:
        """Give up an answer that has not come; what it hands out goes back by itself.

        ``late``: it came not in time. Until the daemon says a word, nothing is asked of it then.
        """
        self._settle()
        if not call.done:
            del self._calls[call.request]
            self._line.abandon(call.request, late=late)
            self._end(call, Miss(LATE) if late else Miss(DROPPED))

    def _begin(self, flow: Flow[T]) -> Call[T]:
        try:
            verb = flow.send(None)
        except StopIteration as stop:  # there was nothing to ask
            call = Call(flow, None)
            call.done, call._result = True, stop.value
            return call
        call = Call(flow, verb)
        if len(self._calls) >= MAX_IN_FLIGHT and not verb.ends:
            self._end(call, Miss(ErrorCode.BUSY))
            return call
        request = self._line.begin(verb)
        if isinstance(request, Miss):
            self._end(call, request)
        else:
            call.request, call.epoch = request, self.session.epoch
            self._calls[request] = call
        return call

    def _settle(self) -> None:
        """End the calls whose answers came, and those whose connection is gone."""
        for reply in self._line.take(self._calls):
            call = self._calls.pop(reply.id)
            assert call._verb is not None
            self._judge(call, call._verb, reply)
        if self._calls:
            epoch = self.session.epoch if self.session.connected else -1
            for request in [number for number, call in self._calls.items() if call.epoch != epoch]:
                self._end(self._calls.pop(request), Miss(AWAY))

    def _judge(self, call: Call[Any], verb: Verb[Any], reply: Reply) -> None:
        try:
            self._end(call, outcome(verb, reply))
        except RequestRefused as refused:
            self.misses[refused.code] += 1
            call.done, call._error, call.miss = True, refused, refused.code
        except RemoteProtocolError:
            self._line.lose()
            self._end(call, Miss(AWAY))

    def _end(self, call: Call[Any], answer: Reply | Miss) -> None:
        if isinstance(answer, Miss):
            call.miss = answer.reason
            if answer.reason != DROPPED:
                self.misses[answer.reason] += 1
        call.done = True
        try:
            call._flow.send(answer)
        except StopIteration as stop:
            call._result = stop.value

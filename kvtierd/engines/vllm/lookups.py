# mypy: disable-error-code="import-not-found,import-untyped"
"""Answers to vLLM's lookups: one question per request, at most one wait per engine step, else dict look-ups.

What the daemon shows to have nowhere (:meth:`Session.may_hold`) is a miss at once. Of a request that may have
a hit the whole chain is asked for when it arrives, without waiting; the first lookup of a step waits once for
everything that is still unanswered. A request that can have none waits for nothing: the daemon is told of it
in the next step, for its figures. While a request waits for a promotion the engine steps as fast as it
can and asks for every key again in every step: its keys are answered from what is known, and the daemon is
asked again now and then, again without waiting. A hit is held by a lease; when that has run half its time the
next lookup asks anew. Blocks that are not in the pool by the promotion deadline are misses from then on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState
from kvtierd.engines.guard import Guard
from kvtierd.engines.vllm.chain import Chain
from kvtierd.engines.vllm.scope import RequestScope
from kvtierd.errors import RequestRefused

HIT, MISS, PENDING, RETRY = (
    LookupResult.HIT,
    LookupResult.MISS,
    LookupResult.HIT_PENDING,
    LookupResult.RETRY,
)

POLL_INTERVAL = 0.001  # between two questions about a promotion; an eighth of the wait so far when longer
POLL_INTERVAL_MOST = 0.02
LEASE_SHARE = 0.5  # an answer is used for this share of its lease, the rest is for the load that follows
# Requests beyond this that wait their turn are asked for without a lease, so that a long queue pins no pool.
MOST_LEASED = 64

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """Blocks that must come from below, or be leased, before they are hits: a question asked repeatedly."""

    keys: list[BlockKey]
    asked_at: float = 0.0
    call: Any = None
    answer: Any = None
    pending: bool = True


@dataclass(slots=True)
class _Open:
    """What is known for one request. ``results`` has every key that needs no more asking."""

    chain: Chain
    wish: RequestScope
    leased: bool
    keys: list[BlockKey] = field(default_factory=list)
    results: dict[bytes, Any] = field(default_factory=dict)
    resident: set[bytes] = field(default_factory=set)
    loose: set[bytes] = field(default_factory=set)
    runs: list[_Run] = field(default_factory=list)
    sources: dict[bytes, str] = field(default_factory=dict)
    call: Any = None
    answer: Any = None
    asked: bool = False
    asked_at: float = 0.0
    waits_since: float | None = None
    turn: int = -1
    problem: str = ""


class Lookups:
    """The lookup side of the manager; ``turn`` is advanced once per scheduler step."""

    def __init__(
        self,
        lease: float,
        promotion_deadline: float,
        guard: Guard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease = lease
        self._promotion_deadline = promotion_deadline
        self._guard = guard
        self._clock = clock
        self._pipeline: Any = None
        self._open: dict[str, _Open] = {}
        self._asking: dict[int, _Open] = {}
        self._untold: deque[tuple[int, _Open]] = deque()
        self._may_hold: Callable[[Iterable[Any]], bool] = lambda keys: True
        self._waited_turn = -1
        self.turn = 0
        self.given_up = 0
        self.deferred = 0

    def bind(self, pipeline: Any) -> None:
        """Use this pipeline (:class:`kvtierd.client.pipeline.Pipeline`)."""
        self._pipeline = pipeline
        self._may_hold = pipeline.session.may_hold

    def begin(self, request: str, chain: Chain, wish: RequestScope, *, reads: bool = True) -> None:
        """A request arrived: ask for its chain and mark it as used, without waiting.

        vLLM asks only beyond its own hits and never touches, so without the touch the root of a hot prefix
        would age first. ``reads``: whether the request may load at all.
        """
        leased = reads and len(self._open) < MOST_LEASED
        self._open[request] = opened = _Open(chain, wish, leased)
        opened.keys = chain.all(wish.max_tokens)
        if wish.scope is not None or self._may_hold(opened.keys):  # a scope may be wrong, the caller is told
            self._ask(opened)
            self._pipeline.flush()
        elif opened.keys:
            self._untold.append((self.turn, opened))

    def find(self, request: str, key: bytes) -> Any:
        """Return vLLM's ``LookupResult`` for one key of a request."""
        opened = self._open.get(request)
        if opened is None:
            return MISS
        if opened.wish.scope is None and key not in opened.results and not self._may_hold((key,)):
            return MISS  # nobody has it: no reason to wait for what was asked
        if opened.turn != self.turn:
            opened.turn = self.turn
            self._refresh(opened)
        result = opened.results.get(key)
        return result if result is not None else self._find_out(opened, key)

    def tell(self) -> None:
        """Queue what the daemon need not answer: the lookups of earlier steps that could have no hit."""
        while self._untold and self._untold[0][0] < self.turn - 1:
            opened = self._untold.popleft()[1]
            if not opened.asked:
                ask = partial(self._pipeline.lookup, opened.keys, everywhere=True)
                self._guard.call("lookup", ask, None)

    def source(self, request: str, key: bytes) -> str:
        """Return the tier that a key had to come from for this request; "" where it was in the pool."""
        opened = self._open.get(request)
        return "" if opened is None else opened.sources.get(key, "")

    def is_resident(self, request: str, keys: Sequence[bytes]) -> bool:
        """Whether the daemon said of all these keys that they were in the pool when the request came."""
        opened = self._open.get(request)
        return opened is not None and opened.resident.issuperset(keys)

    def problem(self, request: str) -> str:
        """Return what the daemon found wrong with the request's scope; "" when nothing."""
        opened = self._open.get(request)
        return "" if opened is None else opened.problem

    def consumed(self, request: str) -> None:
        """The request's load holds its blocks by itself: give the leases back, ask anew next time."""
        if (opened := self._open.get(request)) is not None:
            self._give_back(opened)
            opened.results, opened.loose, opened.asked = {}, set(), False
            opened.turn, opened.waits_since = -1, None

    def forget(self, request: str) -> None:
        """The request is over."""
        if (opened := self._open.pop(request, None)) is not None:
            self._give_back(opened)

    def forget_all(self) -> None:
        """Nothing that was said is true any more; the namespace was reset."""
        for request, opened in self._open.items():
            self.consumed(request)
            opened.resident = set()

    # -- the question about a whole request ------------------------------------------------------------

    def _ask(self, opened: _Open) -> None:
        opened.keys = opened.chain.all(opened.wish.max_tokens)
        call = self._guard.call("lookup", lambda: self._lookup(opened), None)
        self._give_back(opened)  # after the new question, so that no hit is without a lease in between
        opened.results, opened.loose = {}, set()
        opened.asked, opened.asked_at, opened.call = True, self._clock(), call
        if call is not None:
            self._asking[id(opened)] = opened
        else:
            opened.results = dict.fromkeys(opened.keys, MISS)

    def _lookup(self, opened: _Open) -> Any:
        if not opened.keys or opened.problem:
            return None
        return self._pipeline.lookup(
            opened.keys,
            lease=self._lease if opened.leased else None,
            everywhere=True,
            touch=True,
            scope=opened.wish.scope,
        )

    def _refresh(self, opened: _Open) -> None:
        """Once per request and step: take answers in, ask again what is old."""
        old = self._clock() - opened.asked_at >= self._lease * LEASE_SHARE
        if not opened.asked or (old and opened.call is None):
            opened.leased = True
            self._ask(opened)
        if opened.call is not None:
            self._collect()
        for run in opened.runs:
            self._refresh_run(opened, run)

    def _collect(self) -> None:
        """Wait, once in a step, for the answers to all questions that are on their way."""
        calls = [opened.call for opened in self._asking.values()]
        if self._waited_turn != self.turn:
            if not all(call.done for call in calls):
                self._waited_turn = self.turn
            self._guard.call("lookup", lambda: self._pipeline.wait(calls), None)
            for call in calls:
                if not call.done:
                    self._guard.call("lookup", partial(self._pipeline.drop, call), None)
        for opened in [opened for opened in self._asking.values() if opened.call.done]:
            del self._asking[id(opened)]
            self._settle(opened)

    def _settle(self, opened: _Open) -> None:
        call, opened.call = opened.call, None
        answer = self._result(opened, call)
        if answer is None or answer.reason:
            opened.results = dict.fromkeys(opened.keys, MISS)
            return
        opened.answer = answer
        if not any(answer.states):
            opened.results = dict.fromkeys(opened.keys, MISS)
            return
        held = answer.lease is not None
        for key, state in zip(opened.keys, answer.states, strict=True):
            if state is KeyState.MISS:
                opened.results[key] = MISS
            elif state is KeyState.HIT and held:
                opened.results[key] = HIT
            else:
                opened.loose.add(key)
            if state is KeyState.HIT:
                opened.resident.add(key)

    def _result(self, opened: _Open, call: Any) -> Any:
        try:
            return call.result
        except RequestRefused as refused:  # the request names a tier that there is not
            opened.problem = str(refused)
            return None

    # -- the blocks that have to come from below -------------------------------------------------------

    def _find_out(self, opened: _Open, key: bytes) -> Any:
        """A key without a result: not answered yet, below the pool, or one that was not asked for."""
        if opened.call is not None:
            self.deferred += 1
            return RETRY
        if opened.problem or opened.chain.is_beyond(key, opened.wish.max_tokens):
            opened.results[key] = MISS
            return MISS
        known = opened.results
        run = [BlockKey(key)]
        if key in opened.loose:
            run = opened.chain.run(key, lambda other: known.get(other) is not MISS)
        elif opened.chain.has(key):  # the request has grown since it was asked for
            return self._find_again(opened, key)
        if opened.waits_since is None:
            opened.waits_since = self._clock()
        started = _Run(run)
        opened.runs.append(started)
        self._ask_run(opened, started)
        known.update((each, PENDING) for each in run if each in opened.loose or each == key)
        opened.loose.difference_update(run)
        self._pipeline.flush()
        return known[key]

    def _find_again(self, opened: _Open, key: bytes) -> Any:
        self._ask(opened)
        self._collect()
        result = opened.results.get(key)
        return result if result is not None else self._find_out(opened, key)

    def _waited(self, opened: _Open) -> float:
        """Seconds that the request has waited for blocks from below."""
        return 0.0 if opened.waits_since is None else self._clock() - opened.waits_since

    def _ask_run(self, opened: _Open, run: _Run) -> None:
        run.asked_at = self._clock()
        run.call = self._guard.call(
            "lookup",
            lambda: self._pipeline.lookup(
                run.keys,
                promote=self._waited(opened) < self._promotion_deadline,
                lease=self._lease,
                scope=opened.wish.scope,
            ),
            None,
        )

    def _refresh_run(self, opened: _Open, run: _Run) -> None:
        if run.call is not None:
            if not run.call.done:
                if self._waited(opened) >= self._promotion_deadline:
                    self._end_run(opened, run)
                return
            call, run.call = run.call, None
            self._settle_run(opened, run, self._result(opened, call))
        elif not run.pending:
            return
        interval = min(max(POLL_INTERVAL, self._waited(opened) / 8), POLL_INTERVAL_MOST)
        if run.pending and self._clock() - run.asked_at >= interval:
            self._ask_run(opened, run)

    def _settle_run(self, opened: _Open, run: _Run, answer: Any) -> None:
        """Translate the states. Only the run of keys before the first miss is promoted, so only it pends."""
        old, run.answer = run.answer, answer
        if old is not None:
            self._release(old)
        if answer is None or answer.reason:
            self._end_run(opened, run)
            return
        leading = answer.states[: answer.prefix]
        # A block that is still cold after it was asked up had no room. While others are on their way it may
        # get some; when none is, waiting for it would be in vain.
        waits = self._waited(opened) < self._promotion_deadline
        run.pending = waits and KeyState.PENDING in leading
        for place, (key, state) in enumerate(zip(run.keys, answer.states, strict=True)):
            if state is KeyState.HIT and place < answer.leased:
                opened.results[key] = HIT
            elif opened.results.get(key) is not HIT:
                opened.results[key] = PENDING if run.pending and place < answer.prefix else MISS
        for key, source in zip(run.keys, answer.sources, strict=False):
            if source:
                opened.sources[key] = source
        if not run.pending and answer.leased < answer.prefix:
            self.given_up += 1

    def _end_run(self, opened: _Open, run: _Run) -> None:
        run.pending = False
        if run.call is not None:
            call, run.call = run.call, None
            self._guard.call("lookup", lambda: self._pipeline.drop(call), None)
        self.given_up += 1
        opened.results.update((key, MISS) for key in run.keys if opened.results.get(key) is not HIT)

    # -- leases ----------------------------------------------------------------------------------------

    def _give_back(self, opened: _Open) -> None:
        self._asking.pop(id(opened), None)
        for call in (opened.call, *(run.call for run in opened.runs)):
            if call is not None:
                self._guard.call("lookup", partial(self._forsake, opened, call), None)
        for answer in (opened.answer, *(run.answer for run in opened.runs)):
            if answer is not None:
                self._release(answer)
        opened.call = opened.answer = None
        opened.runs = []

    def _forsake(self, opened: _Open, call: Any) -> None:
        self._pipeline.drop(call, late=False)
        if (answer := self._result(opened, call)) is not None:
            self._release(answer)

    def _release(self, answer: Any) -> None:
        if answer.lease is not None:
            self._guard.call("release", lambda: self._pipeline.release(answer), None)

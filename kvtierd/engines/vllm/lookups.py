# mypy: disable-error-code="import-not-found,import-untyped"
"""Answers to vLLM's lookups: one round trip per request, dictionary look-ups for the thousands that follow.

While a request waits for a promotion the engine steps as fast as it can and asks for every key again in
every step. So answers are kept per request and group; a pending one is asked again at most once per step
and not more often than ``POLL_INTERVAL``. A hit is only as good as its lease: when that has run most of its
time the next lookup asks again. Nothing waits: blocks that are not in the pool by the promotion deadline
are misses from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState
from kvtierd.engines.vllm.chain import GROUP_BYTES, Chain, to_block_key
from kvtierd.engines.vllm.guard import Guard

POLL_INTERVAL = 0.001
LEASE_SHARE = 0.5  # an answer is used for this share of its lease, the rest is for the load that follows

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """What ``Session.lookup`` returns."""

    @property
    def states(self) -> Sequence[KeyState]:
        """One state per key."""

    @property
    def prefix(self) -> int:
        """How many leading keys are not a miss."""

    def release(self) -> None:
        """End the lease, if there is one."""


class Asker(Protocol):
    """The verb of a session that this module needs."""

    def lookup(self, keys: Sequence[BlockKey], promote: bool = ..., lease: float | None = ...) -> Answer:
        """Ask the daemon."""


@dataclass(slots=True)
class _Asked:
    """One group's question of a request, with the daemon's latest answer to it."""

    keys: list[bytes]
    results: dict[bytes, Any] = field(default_factory=dict)
    answer: Answer | None = None
    pending: bool = False
    turn: int = -1
    asked_at: float = 0.0
    waiting_since: float | None = None


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
        self._open: dict[str, dict[bytes, _Asked]] = {}
        self._promoted: dict[str, set[bytes]] = {}
        self.turn = 0
        self.round_trips = 0
        self.given_up = 0

    def find(self, session: Asker, request: str, chain: Chain, key: bytes) -> Any:
        """Return vLLM's ``LookupResult`` for one key of a request."""
        groups = self._open.get(request)
        if groups is None:
            groups = self._open[request] = {}
        asked = groups.get(key[-GROUP_BYTES:])
        if asked is not None and key in asked.results:
            if asked.turn != self.turn:
                asked.turn = self.turn
                self._refresh(session, request, asked)
        else:
            asked = self._ask_anew(session, request, groups, chain, key)
        return asked.results[key]

    def came_from_below(self, request: str, key: bytes) -> bool:
        """Whether this request waited for the key to come from a tier below the pool."""
        return key in self._promoted.get(request, ())

    def consumed(self, request: str) -> None:
        """The request's load is leased by itself: give the lookups' leases back, ask anew next time."""
        for asked in self._open.pop(request, {}).values():
            self._release(asked)

    def forget(self, request: str) -> None:
        """The request is over."""
        self.consumed(request)
        self._promoted.pop(request, None)

    def forget_all(self) -> None:
        """Drop every answer; the namespace was reset."""
        for request in list(self._open):
            self.forget(request)

    def _ask_anew(
        self, session: Asker, request: str, groups: dict[bytes, _Asked], chain: Chain, key: bytes
    ) -> _Asked:
        old = groups.get(key[-GROUP_BYTES:])
        asked = groups[key[-GROUP_BYTES:]] = _Asked(keys=chain.asked_with(key), turn=self.turn)
        if old is not None:  # a longer or later question of the same wait: its deadline goes on
            asked.waiting_since = old.waiting_since
        self._ask(session, request, asked)
        if old is not None:
            self._release(old)
        return asked

    def _refresh(self, session: Asker, request: str, asked: _Asked) -> None:
        age = self._clock() - asked.asked_at
        if (asked.pending and age >= POLL_INTERVAL) or age >= self._lease * LEASE_SHARE:
            old = asked.answer
            self._ask(session, request, asked)
            if old is not None:
                self._guard.call("release", old.release, None)

    def _ask(self, session: Asker, request: str, asked: _Asked) -> None:
        now = asked.asked_at = self._clock()
        waited = 0.0 if asked.waiting_since is None else now - asked.waiting_since
        wait_more = waited < self._promotion_deadline
        wanted = tuple(to_block_key(key) for key in asked.keys)
        self.round_trips += 1
        asked.answer = self._guard.call(
            "lookup", lambda: session.lookup(wanted, promote=wait_more, lease=self._lease), None
        )
        self._settle(request, asked, wait_more)
        if asked.pending and asked.waiting_since is None:
            asked.waiting_since = now

    def _settle(self, request: str, asked: _Asked, wait_more: bool) -> None:
        """Translate the states. Only the run of keys before the first miss is promoted, so only it pends."""
        answer = asked.answer
        if answer is None:
            asked.results, asked.pending = dict.fromkeys(asked.keys, LookupResult.MISS), False
            return
        leading = answer.states[: answer.prefix]
        # A block that is still cold after it was asked up had no room. While others are on their way it may
        # get some; when none is, waiting for it would be in vain.
        coming = wait_more and KeyState.PENDING in leading
        results = {
            key: LookupResult.HIT if state is KeyState.HIT else LookupResult.MISS
            for key, state in zip(asked.keys, answer.states, strict=True)
        }
        below = [key for key, state in zip(asked.keys, leading, strict=False) if state is not KeyState.HIT]
        if coming:
            results.update(dict.fromkeys(below, LookupResult.HIT_PENDING))
            self._promoted.setdefault(request, set()).update(below)
        elif below:
            self.given_up += 1
        asked.results, asked.pending = results, coming

    def _release(self, asked: _Asked) -> None:
        if asked.answer is not None:
            self._guard.call("release", asked.answer.release, None)
            asked.answer = None

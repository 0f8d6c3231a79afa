"""A request trace through the real ladder, without bytes: what each tier would have served.

Each request is what an engine does: touch the chain, load the leading blocks that are there, compute the
others and store them. Storage takes no time, or the same ``latency`` for every operation. Pure and
deterministic; :func:`best_possible` gives the figure that no policy can beat.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvtierd.core import effects, stimuli
from kvtierd.core.geometry import UNIT
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import BlockKey, BlockMeta, Group, Layout, Medium, block_key, event_hash
from kvtierd.core.policies import POLICIES
from kvtierd.core.stimuli import Finished, Outcome, Status
from kvtierd.core.tier import Tier, TierSpec
from kvtierd.testing.trace import Asked, Id

ReplyT = TypeVar("ReplyT", bound=effects.Reply)

_SESSION = 1
_PATIENCE = 3600.0
"""Seconds that a load waits, so that a slow tier is slow and not a miss."""


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """A tier of the simulation, the primary first. ``blocks`` it has room for; ``None``: no limit."""

    name: str
    blocks: int | None
    policy: str = "auto"


@dataclass(slots=True)
class TierResult:
    """What one tier did, in blocks: served, stored and evicted in all, and resident at the end."""

    name: str
    policy: str
    capacity: int | None
    hits: int = 0
    stored: int = 0
    evicted: int = 0
    resident: int = 0


@dataclass(slots=True)
class Result:
    """What became of a trace. ``blocks``: all that was asked for; ``waited``: seconds spent on storage."""

    requests: int = 0
    blocks: int = 0
    waited: float = 0.0
    tiers: list[TierResult] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Blocks that some tier served."""
        return sum(tier.hits for tier in self.tiers)


class Simulation:
    """One ladder and one engine on simulated time."""

    def __init__(
        self, tiers: Sequence[SimulatedTier], *, block_bytes: int = UNIT, latency: float = 0.0
    ) -> None:
        primary, *secondaries = tiers
        if primary.blocks is None:
            raise ValueError("the primary tier needs a limit")
        slot = -(-block_bytes // UNIT) * UNIT
        self._tiers = tiers
        self._latency = latency
        self._now = 0.0
        self._numbers = itertools.count(1)
        self._order = itertools.count()
        self._answers: dict[int, effects.LadderReply] = {}
        self._running: list[tuple[float, int, Finished]] = []
        self._blocks: dict[Id, tuple[BlockKey, BlockMeta]] = {}
        self._result = Result()
        self._hits: Counter[str] = Counter()
        self.ladder = Ladder(
            pool_id="simulation",
            pool_bytes=primary.blocks * slot,
            primary=_spec(primary, Medium.CPU, block_bytes),
            secondaries=[_spec(tier, Medium.STORAGE, block_bytes) for tier in secondaries],
        )
        for tier in secondaries:
            self._feed(stimuli.Found(tier.name, (), last=True))
        group = Group(tokens_per_block=1, block_bytes=block_bytes)
        layout = Layout(model="simulation", dtype="", layout="", groups=(group,))
        attach = stimuli.Attach(id=next(self._numbers), layout=layout, engine_id="engine", process=b"engine")
        self._ask(attach, effects.Attached)

    def run(self, requests: Sequence[Asked], seen: Callable[[int], None] = lambda blocks: None) -> Result:
        """Replay a trace to its end and return what became of it; ``seen`` gets each request's blocks."""
        for request in requests:
            self._request(request)
            seen(len(request.blocks))
        self._wait(float("inf"))
        primary, *secondaries = [self.ladder.stack.primary, *self.ladder.stack.secondaries]
        sizes = [sum(1 for _ in primary.nodes()), *(len(tier.blocks) for tier in secondaries)]
        tiers: list[Tier] = [primary, *secondaries]
        self._result.tiers = [
            TierResult(
                name=spec.name,
                policy=spec.policy,
                capacity=spec.blocks,
                hits=self._hits[spec.name],
                stored=tier.counters["stored"],
                evicted=tier.counters["evictions"],
                resident=size,
            )
            for spec, tier, size in zip(self._tiers, tiers, sizes, strict=True)
        ]
        return self._result

    def _request(self, request: Asked) -> None:
        self._wait(request.at)
        self._now = max(self._now, request.at)
        chain = self._chain(request.blocks)
        keys = tuple(key for key, _ in chain)
        self._ask(stimuli.Touch(id=next(self._numbers), keys=keys), effects.Done)
        began = self._now
        loaded = self._ask(
            stimuli.Load(id=next(self._numbers), keys=keys, deadline=_PATIENCE), effects.Loaded
        )
        self._result.waited += self._now - began
        self._result.requests += 1
        self._result.blocks += len(keys)
        self._hits.update(loaded.sources)
        if len(loaded.keys) < len(keys):
            self._store(chain[len(loaded.keys) :])
        if loaded.lease:
            self._ask(stimuli.Release(id=next(self._numbers), lease=loaded.lease), effects.Done)

    def _store(self, chain: Sequence[tuple[BlockKey, BlockMeta]]) -> None:
        """Store what was computed, while the blocks before it are still under the load's lease."""
        keys, metas = tuple(key for key, _ in chain), tuple(meta for _, meta in chain)
        prepare = stimuli.PrepareStore(id=next(self._numbers), keys=keys, meta=metas)
        job = self._ask(prepare, effects.Prepared)
        if job.keys:
            commit = stimuli.Commit(
                id=next(self._numbers), job=job.job, generation=job.generation, pool_id=job.pool_id
            )
            self._ask(commit, effects.Committed)

    def _chain(self, ids: Sequence[Id]) -> list[tuple[BlockKey, BlockMeta]]:
        chain: list[tuple[BlockKey, BlockMeta]] = []
        parent: int | bytes | None = None
        for block in ids:
            entry = self._blocks.get(block)
            if entry is None:
                key = block_key(hashlib.blake2b(repr(block).encode(), digest_size=16).digest())
                entry = self._blocks[block] = key, BlockMeta(hashes=(event_hash(key),), parent=parent)
            chain.append(entry)
            parent = entry[1].hashes[-1]
        return chain

    def _ask(self, request: stimuli.LadderRequest, kind: type[ReplyT]) -> ReplyT:
        """Send a request and return its answer, letting time pass until there is one."""
        self._feed(stimuli.Asked(_SESSION, request))
        while request.id not in self._answers and self._running:
            self._wait(self._running[0][0])
        answer = self._answers.pop(request.id)
        assert isinstance(answer, kind), answer
        return answer

    def _wait(self, until: float) -> None:
        """End the operations that are due by then."""
        while self._running and self._running[0][0] <= until:
            at, _, finished = heapq.heappop(self._running)
            self._now = max(self._now, at)
            self._feed(finished)

    def _feed(self, stimulus: stimuli.Stimulus) -> None:
        queue: deque[stimuli.Stimulus] = deque([stimulus])
        while queue:
            for effect in self.ladder.handle(queue.popleft(), self._now):
                if isinstance(effect, effects.Answer):
                    self._answers[effect.reply.id] = effect.reply
                    continue
                finished = self._carry_out(effect)
                if self._latency:
                    due = self._now + self._latency
                    heapq.heappush(self._running, (due, next(self._order), finished))
                else:
                    queue.append(finished)
        self.ladder.take_events()

    def _carry_out(self, effect: effects.Write | effects.Read | effects.Delete | effects.Probe) -> Finished:
        assert not isinstance(effect, effects.Probe), "no simulated tier is shared"
        if isinstance(effect, effects.Delete):
            outcomes = [Outcome(block_id, Status.OK) for block_id in effect.ids]
        else:
            outcomes = [
                Outcome(at.block.id, Status.OK, stored_bytes=at.block.payload_bytes) for at in effect.blocks
            ]
        return Finished(effect.op, outcomes, self._latency)


def _spec(tier: SimulatedTier, medium: Medium, block_bytes: int) -> TierSpec:
    return TierSpec(
        name=tier.name,
        medium=medium,
        events=False,
        policy=POLICIES[tier.policy],
        capacity=None if tier.blocks is None or medium is Medium.CPU else tier.blocks * block_bytes,
    )


def best_possible(requests: Sequence[Asked], capacity: int | None) -> int:
    """Return the hits of an oracle that evicts the block whose next request is farthest away (Belady).

    A hit counts only as part of the contiguous prefix. No next request of a block is ever later than that of
    the blocks behind it, so the farthest one, the deepest of equals, is always a leaf.
    """
    if capacity is None:
        capacity = sum(len(request.blocks) for request in requests)
    never = len(requests)
    next_use: dict[Id, int] = {}
    upcoming: list[list[int]] = [[]] * len(requests)
    for index in range(len(requests) - 1, -1, -1):
        upcoming[index] = [next_use.get(block, never) for block in requests[index].blocks]
        next_use.update(dict.fromkeys(requests[index].blocks, index))
    cache: dict[Id, tuple[int, int]] = {}
    heap: list[tuple[int, int, int, Id]] = []
    order = itertools.count()
    hits = 0
    for request, due in zip(requests, upcoming, strict=True):
        hits += sum(1 for _ in itertools.takewhile(cache.__contains__, request.blocks))
        for depth, (block, at) in enumerate(zip(request.blocks, due, strict=True)):
            cache[block] = (at, depth)
            heapq.heappush(heap, (-at, -depth, next(order), block))
        while len(cache) > capacity:
            farthest, deepest, _, block = heapq.heappop(heap)
            if cache.get(block) == (-farthest, -deepest):
                del cache[block]
    return hits

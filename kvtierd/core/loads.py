"""Lookups and loads: state of many keys at once, promotions that a load waits for."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtierd.core.effects import Done, Loaded, LookedUp
from kvtierd.core.glance import all_resident
from kvtierd.core.leases import Leases
from kvtierd.core.model import BlockId, BlockKey, KeyState, Scope, State, block_ids, group_of
from kvtierd.core.probing import Probing
from kvtierd.core.promotion import Promotion, Readable
from kvtierd.core.residency import PoolNode
from kvtierd.core.scope import select
from kvtierd.core.sessions import Session, Sessions
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import Load, Lookup, Outcome, Prefetch
from kvtierd.core.tier import PoolSpace

MISS, HIT, COLD, PENDING = KeyState
RESIDENT, LOADING = State.RESIDENT, State.LOADING


@dataclass(slots=True)
class Waiting:
    """A load under way; ``nodes`` are pinned, in the order of the request, ``rest`` is not obtained yet."""

    number: int
    session: Session
    request: int
    deadline: float
    space: PoolSpace
    scope: tuple[str, ...] | None
    keys: tuple[BlockKey, ...]
    rest: deque[BlockKey]
    nodes: list[PoolNode] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


class Loads:
    """Everything that reads."""

    def __init__(self, stack: Stack, sessions: Sessions, leases: Leases) -> None:
        self._stack = stack
        self._sessions = sessions
        self._leases = leases
        self.promotion = Promotion(stack, self._node_settled)
        self.probing = Probing(stack)
        self.waiting: dict[int, Waiting] = {}
        self._waiters: dict[PoolNode, list[int]] = {}
        """Which loads wait for a block that is being promoted."""
        self._touched: set[int] = set()
        self._unfilled: set[int] = set()
        """Loads that wait for room to promote more; entries can be stale."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap over the waiting loads; entries can be stale."""

    # -- lookup -------------------------------------------------------------------------------------

    def lookup(self, session: Session, request: Lookup) -> None:
        """Answer the state of each key; promote and lease the leading ones where asked."""
        space = self._stack.primary.spaces[session.namespace]
        ids = block_ids(session.namespace, request.keys)
        scope = self._sources(request.scope)
        below = self.promotion.readable(session.namespace, scope)
        fresh: list[PoolNode] = []
        if all_resident(space, request.keys):
            states = [HIT] * len(ids)
        else:
            states = self._states(space, request.keys, below, fresh)
        if request.touch:
            self._stack.touch(session.namespace, request.keys)
        looks = request.everywhere and not request.promote
        probed = 0
        if (request.promote or request.touch) and self.probing:
            probed = self._probe(ids, states, scope)
        counted = self._count(states, below, fresh, looks=looks, probed=probed)
        prefix = _until(states, MISS)
        sources: list[str] = []
        if request.promote:
            if COLD in states[:prefix]:
                self._promote(space, ids, prefix, states, scope, counted=counted)
            if PENDING in states:
                sources = [_source(space, key) for key in request.keys[:prefix]]
        lease, nodes = None, self._held(space, ids, states, request) if request.lease is not None else []
        if request.lease is not None and nodes:
            lease = self._leases.on_hits(session, nodes, request.lease)
            if self.promotion.grace:
                for node in nodes:
                    self.promotion.claim(node)
        self._stack.answer(
            session.number,
            LookedUp(
                id=request.id,
                found=bytes(states),
                prefix=prefix,
                lease=lease,
                leased=len(nodes),
                sources=tuple(sources),
            ),
        )

    def _sources(self, scope: Scope | None) -> tuple[str, ...] | None:
        return select(scope.load_from if scope is not None else None, self._stack.secondaries)

    @staticmethod
    def _held(
        space: PoolSpace, ids: Sequence[BlockId], states: list[KeyState], request: Lookup
    ) -> list[PoolNode]:
        """Return the HITs that the lookup's lease covers."""
        end = len(ids) if request.everywhere else _leading(state is HIT for state in states)
        index, keys = space.index, request.keys[:end]
        return [index[key] for key, state in zip(keys, states, strict=False) if state is HIT]

    def prefetch(self, session: Session, request: Prefetch) -> None:
        """Start promotions of the leading loadable keys and answer at once."""
        space = self._stack.primary.spaces[session.namespace]
        ids = block_ids(session.namespace, request.keys)
        states = self._states(space, request.keys, self.promotion.readable(session.namespace, None), [])
        count = self._promote(space, ids, _until(states, MISS), states, None)
        self._stack.answer(session.number, Done(id=request.id, count=count))

    def _states(
        self, space: PoolSpace, keys: Iterable[BlockKey], below: Sequence[Readable], fresh: list[PoolNode]
    ) -> list[KeyState]:
        """Return each block's state; the hottest loop of the daemon, so it calls next to nothing.

        ``below`` counts what each tier has of them, ``fresh`` gets the HITs that were promoted and not used
        yet.
        """
        find, sizes, unread = space.index.get, space.geometry.payload_bytes, space.unread
        only = sizes[0] if len(sizes) == 1 else 0
        states = []
        for key in keys:
            node = find(key)
            state = MISS
            if node is None:
                for place in below:
                    held = place.find(key)
                    if held is None or held.state is not RESIDENT:
                        continue
                    size = held.block.payload_bytes
                    if size != (only or sizes[group_of(key)]):
                        continue
                    if place.room >= size:
                        place.room -= size
                        place.cold += 1
                        state = COLD
                        break
                    place.tier.counters["declined_slow"] += 1
            elif node.state is RESIDENT:
                state = HIT
                if unread and key in unread:
                    fresh.append(node)
            elif node.state is LOADING:
                state = PENDING
            states.append(state)
        return states

    def _probe(self, ids: Sequence[BlockId], states: list[KeyState], scope: tuple[str, ...] | None) -> int:
        """Ask the shared tiers for the keys behind the known prefix; stops at the first that is not there.

        Returns how many keys wait for that.
        """
        count = 0
        for index, block_id in enumerate(ids):
            if states[index] is MISS:
                if not self.probing.wonder(block_id, scope):
                    break
                states[index] = PENDING
                count += 1
        self.probing.flush()
        return count

    def _promote(
        self,
        space: PoolSpace,
        ids: Sequence[BlockId],
        prefix: int,
        states: list[KeyState],
        scope: tuple[str, ...] | None,
        *,
        counted: bool = False,
    ) -> int:
        # The room for one of these blocks must not cost another, not even a later one: it is told as a HIT.
        held = [
            space.index[block_id.key] for block_id, state in zip(ids, states, strict=False) if state is HIT
        ]
        for node in held:
            space.blocks.pin(node)
        count = 0
        for index, block_id in enumerate(ids[:prefix]):
            if states[index] is COLD:
                if space.blocks.get(block_id) is None:  # a request may name a key twice
                    tier = self.promotion.source(space, block_id, scope)
                    started = None if tier is None else self.promotion.start(space, block_id, tier)
                    if started is None:
                        break
                    count += 1
                    if counted:
                        self.promotion.counted.add(started)
                states[index] = PENDING
        for node in held:
            space.unpin(node)
        self.promotion.flush()
        return count

    def _count(
        self,
        states: list[KeyState],
        below: Iterable[Readable],
        fresh: Sequence[PoolNode],
        *,
        looks: bool,
        probed: int,
    ) -> bool:
        """Count what was found where, once for each question; whether it is one.

        Who asks while a block is PENDING asks again, and so does who asks for what was promoted for a lookup.
        Who only ``looks`` everywhere asks again for what it wants of the COLD blocks, and of those that are
        ``probed`` for in shared tiers. A promoted block counts for the tier that it came from, only there.
        """
        counters = self._stack.primary.counters
        counts = Counter(map(id, states))  # by identity: an enum's members are slow to compare and to hash
        later = counts[id(COLD)] + probed if looks else 0
        if counts[id(PENDING)] > (probed if looks else 0) or any(
            node in self.promotion.counted for node in fresh
        ):
            counters["lookup_repeats"] += len(states)
            return False
        counters["lookup_blocks"] += len(states) - later
        counters["lookup_misses"] += counts[id(MISS)]
        counters["lookup_hits"] += counts[id(HIT)] - len(fresh)
        for place in below:
            if place.cold and not looks:
                place.tier.counters["lookup_hits"] += place.cold
        for node in fresh:
            source = self._stack.primary.space_of(node).unread.get(node.block.key)
            tier = self._stack.by_name[source] if source else self._stack.primary  # named twice: told already
            tier.counters["lookup_hits"] += 1
            self.promotion.told(node)
        return True

    # -- load ---------------------------------------------------------------------------------------

    def load(self, session: Session, request: Load) -> None:
        """Pin the leading keys, promote what is below, answer when all are there or the deadline is."""
        load = Waiting(
            number=self._sessions.next_number(),
            session=session,
            request=request.id,
            deadline=self._stack.now + request.deadline,
            space=self._stack.primary.spaces[session.namespace],
            scope=self._sources(request.scope),
            keys=request.keys,
            rest=deque(request.keys),
        )
        self._advance(load)
        if request.deadline and not self._settled(load):
            self.waiting[load.number] = load
            heapq.heappush(self._deadlines, (load.deadline, load.number))
            if load.rest:
                self._unfilled.add(load.number)
        else:
            self._finish(load)

    def _advance(self, load: Waiting) -> None:
        """Obtain the next blocks, in waves as the promotion budget has room; drop what cannot be had."""
        space, rest, primary = load.space, load.rest, self._stack.primary.name
        while rest:
            node = space.index.get(rest[0])
            if node is None:
                block_id = BlockId(space.namespace, rest[0])
                tier = self.promotion.source(space, block_id, load.scope)
                if tier is not None and self.promotion.full(space):
                    break  # the next wave, when some of this one is there
                node = None if tier is None else self.promotion.start(space, block_id, tier)
                if tier is None and self._wonders(load):
                    break  # until the shared tiers have said whether they have it
            if node is None or node.state is State.RESERVED:
                rest.clear()
                break
            rest.popleft()
            space.blocks.pin(node)
            if self.promotion.grace:
                self.promotion.claim(node)
            load.nodes.append(node)
            if node.state is LOADING:
                load.sources.append(space.unread[node.block.key])
                self._waiters.setdefault(node, []).append(load.number)
            else:
                load.sources.append(primary)
        self.promotion.flush()

    def _wonders(self, load: Waiting) -> bool:
        """Have the shared tiers asked for the rest of a load; whether they are for its next block."""
        if not self.probing or load.deadline <= self._stack.now:
            return False
        waits, secondaries = False, self._stack.secondaries
        for key in load.rest:
            block_id = BlockId(load.space.namespace, key)
            if key in load.space.index or any(tier.resident(block_id) for tier in secondaries):
                continue
            if not self.probing.wonder(block_id, load.scope):
                break
            waits = True
        self.probing.flush()
        return waits

    def probed(self) -> None:
        """Go on with the loads that waited for a look at the shared tiers."""
        self._answer_settled()

    @staticmethod
    def _settled(load: Waiting) -> bool:
        """Whether no better answer can come: a leading node failed, or all are there."""
        for node in load.nodes:
            if node.state is State.GONE:
                return True
            if node.state is LOADING:
                return False
        return not load.rest

    def _node_settled(self, node: PoolNode) -> None:
        self._touched.update(self._waiters.pop(node, ()))

    def read(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        """Take a read's outcomes and answer the loads that waited for it."""
        self.promotion.read(operation, outcomes)
        self._answer_settled()

    def stalled(self, operation: Operation) -> None:
        """Answer the loads that wait for a read which is past its deadline."""
        self.promotion.stalled(operation)
        self._answer_settled()

    def cancelled(self) -> None:
        """Answer loads whose blocks a reset took away."""
        self._touched.update(
            number for number, load in self.waiting.items() if any(n.state is State.GONE for n in load.nodes)
        )
        self._answer_settled()

    def _answer_settled(self) -> None:
        touched, self._touched = self._touched, set()
        for number in sorted(touched | self._unfilled):  # in the order in which they came
            load = self.waiting.get(number)
            if load is None:
                self._unfilled.discard(number)
                continue
            if load.rest:
                self._advance(load)
            if self._settled(load):
                self._finish(load)

    def _finish(self, load: Waiting) -> None:
        """Answer with the leading nodes that are there; unpin the rest."""
        self.waiting.pop(load.number, None)
        self._unfilled.discard(load.number)
        primary = self._stack.primary
        count = _leading([node.state is RESIDENT for node in load.nodes])
        nodes, sources = load.nodes[:count], load.sources[:count]
        primary.unpin(load.nodes[count:])
        touch, unread = load.space.blocks.touch, load.space.unread
        for node in reversed(nodes):  # so that the root ends as the most recent
            touch(node)
            if unread:
                self.promotion.told(node)
        for source in set(sources):
            primary.counters[f"load_from_{source}"] += sources.count(source)
        lease = self._leases.on_slots(load.session, nodes) if nodes else 0
        self._stack.answer(
            load.session.number,
            Loaded(
                id=load.request,
                lease=lease,
                pool_id=self._stack.pool_id,
                keys=load.keys[:count],
                slots=tuple([node.slot for node in nodes]),
                generations=tuple([node.generation for node in nodes]),
                sources=tuple(sources),
            ),
        )

    # -- time and ends -------------------------------------------------------------------------------

    def expire(self) -> None:
        """Answer loads whose deadline has come with what is there; end what nobody read."""
        self.promotion.expire()
        self._answer_settled()
        while (due := self.next_deadline()) is not None and due <= self._stack.now:
            self._stack.primary.counters["load_deadline"] += 1
            self._finish(self.waiting[self._deadlines[0][1]])

    def next_deadline(self) -> float | None:
        """Return when the next waiting load is due."""
        while self._deadlines and self._deadlines[0][1] not in self.waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def forget_session(self, number: int) -> None:
        """Drop the waiting loads of a closed session."""
        for load in [load for load in self.waiting.values() if load.session.number == number]:
            del self.waiting[load.number]
            self._stack.primary.unpin(load.nodes)

    def finish_all(self) -> None:
        """Answer every waiting load now."""
        for load in list(self.waiting.values()):
            self._finish(load)


def _source(space: PoolSpace, key: BlockKey) -> str:
    """Return the tier that a block is being promoted from, if it is."""
    node = space.index.get(key)
    return space.unread[key] if node is not None and node.state is LOADING else ""


def _until(states: list[KeyState], stop: KeyState) -> int:
    """Return how many leading states differ from ``stop``."""
    return states.index(stop) if stop in states else len(states)


def _leading(flags: Iterable[bool]) -> int:
    """Return how many leading flags are true."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count

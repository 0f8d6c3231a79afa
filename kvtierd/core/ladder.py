"""The ladder: stimuli in, effects out, events in the contract's order.

Synchronous and without a clock: ``now`` (seconds, any origin, never falling) comes with every turn. The
ladder owns all state of the tiers; edges see slots and blocks, never the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvtierd.core import inventory, statistics, stimuli
from kvtierd.core import scope as scopes
from kvtierd.core.cascade import Cascade
from kvtierd.core.custody import Custody
from kvtierd.core.effects import Attached, Done, Effect, ErrorCode, LookedUp, Refused
from kvtierd.core.geometry import UNIT
from kvtierd.core.glance import glance
from kvtierd.core.holdings import Limit
from kvtierd.core.leases import Leases
from kvtierd.core.ledger import Change, Counters
from kvtierd.core.loads import Loads
from kvtierd.core.model import GROUP_BYTES, BlockKey, Departure, TierEvent, block_ids
from kvtierd.core.operator import Operator
from kvtierd.core.presence import Presence
from kvtierd.core.refusal import Refusal, check_meta, check_tiers
from kvtierd.core.resets import Resets
from kvtierd.core.residency import leaf_first
from kvtierd.core.sessions import Session, Sessions
from kvtierd.core.spaces import PoolExhausted, open_space
from kvtierd.core.stack import Stack
from kvtierd.core.stimuli import Role
from kvtierd.core.stores import Stores
from kvtierd.core.tier import SecondaryTier, TierSpec
from kvtierd.core.upkeep import Upkeep

Handler = Callable[[Session, Any], None]

SCHEDULER_ONLY = (
    stimuli.PrepareStore,
    stimuli.Commit,
    stimuli.Abort,
    stimuli.Load,
    stimuli.Evict,
    stimuli.Reset,
)
NUMBERS_ONLY = (stimuli.Commit, stimuli.Abort, stimuli.Release, stimuli.Renew, stimuli.Acknowledge)
"""Requests that name neither groups nor tiers."""


class Ladder:
    """The stack of tiers with everything that engines may ask of it."""

    def __init__(
        self,
        *,
        pool_id: str,
        pool_bytes: int,
        primary: TierSpec,
        secondaries: Sequence[TierSpec] = (),
        job_ttl: float = 60.0,
        lease_ttl: float = 60.0,
        max_leases: int = 16384,
        tenants: Sequence[str] = (),
        presence: Presence | None = None,
    ) -> None:
        self.pool_bytes = pool_bytes
        self.stack = Stack(pool_id, pool_bytes // UNIT, primary, secondaries, tenants, presence)
        self.sessions = Sessions(ledger=self.stack.primary.ledger)
        self.custody = Custody(self.stack, self.sessions)
        self.upkeep = Upkeep(self.stack)
        self.cascade = Cascade(self.stack, self.upkeep)
        self.stores = Stores(self.stack, self.sessions, self.custody, self.cascade, job_ttl)
        self.leases = Leases(self.stack, self.sessions, self.custody, lease_ttl)
        self.loads = Loads(self.stack, self.sessions, self.leases)
        self.limit = Limit(
            self.stack, self.sessions, max_leases=max_leases, job_ttl=job_ttl, lease_ttl=lease_ttl
        )
        self.inventory = inventory.Pages(self.stack)
        self.resets = Resets(self.stack)
        self.operator = Operator(self.stack, self.resets)
        self.takes_stores = True
        self.stopping = False
        self.awaits_until = math.inf
        """When blocks of engines that did not come back to their pool may give way to other layouts."""
        self._handlers: dict[type, Handler] = {
            stimuli.Lookup: self.loads.lookup,
            stimuli.PrepareStore: self.stores.prepare,
            stimuli.Commit: self.stores.commit,
            stimuli.Abort: self.stores.abort,
            stimuli.Fail: self.stores.fail,
            stimuli.Load: self.loads.load,
            stimuli.Release: self.leases.release,
            stimuli.Renew: self.limit.renew,
            stimuli.Touch: self._touch,
            stimuli.Evict: self._evict,
            stimuli.Reset: self._reset,
            stimuli.Prefetch: self.loads.prefetch,
            stimuli.Inventory: self.inventory.page,
            stimuli.Acknowledge: self._acknowledge,
            stimuli.Goodbye: self._goodbye,
        }

    # -- turns --------------------------------------------------------------------------------------

    def handle(self, stimulus: stimuli.Stimulus, now: float) -> list[Effect]:
        """Take one stimulus and return what the edges have to do, in order."""
        self.stack.now = now
        match stimulus:
            case stimuli.Asked(session, request):
                self._asked(session, request)
            case stimuli.Ordered(session, order):
                self._ordered(session, order)
            case stimuli.SessionClosed(session):
                self._close(session)
            case stimuli.ProcessDied(process):
                self.custody.process_gone(process)
            case stimuli.Tick():
                self._tick()
            case stimuli.Drain() | stimuli.Resume() | stimuli.Retune():
                self._steer(stimulus)
            case stimuli.Stop():
                self._stop(stimulus)
            case _:
                self._worked(stimulus)
        self.cascade.demote_all()
        effects, self.stack.effects = self.stack.effects, []
        return effects

    def glance(self, number: int, request: stimuli.Request) -> LookedUp | None:
        """Answer a request at once, if it changes nothing; ``None``: it needs a turn."""
        if type(request) is not stimuli.Lookup or self.stopping:
            return None
        session = self.sessions.open.get(number)
        return None if session is None else glance(self.stack, session.namespace, request)

    def take_events(self) -> list[TierEvent]:
        """Drain the primary's queue, then each secondary's in the order of the tier file."""
        events = self.stack.primary.take_events()
        for tier in self.stack.secondaries:
            events += tier.take_events()
        return events

    def take_changes(self) -> tuple[Counters, list[Change]]:
        """Return what has to be written down of the pool before any effect of this turn is carried out."""
        ledger = self.stack.primary.ledger
        for space in self.stack.primary.spaces.values():
            if space.arena.resized:
                space.arena.resized = False
                ledger.note(space.shape())
        counters = Counters(self.sessions.fence, self.sessions.last_number, self.stack.generation)
        return counters, ledger.take()

    def next_deadline(self) -> float | None:
        """Return when a waiting load has to be answered by a Tick, or ``None``.

        Jobs and leases may end a little late; ticking now and then is enough for them. What an operator began
        goes on with the next Tick.
        """
        return self.stack.now if self.operator.busy else self.loads.next_deadline()

    def statistics(self) -> dict[str, Any]:
        """Return plain values for status and metrics."""
        return statistics.collect(self)

    # -- requests -----------------------------------------------------------------------------------

    def _asked(self, number: int, request: stimuli.LadderRequest) -> None:
        try:
            if self.stopping and not isinstance(request, stimuli.Goodbye):
                raise Refusal(ErrorCode.STOPPING, "the daemon is stopping")
            if isinstance(request, stimuli.Attach):
                self._attach(number, request)
                return
            session = self.sessions.open.get(number)
            if session is None:
                raise Refusal(ErrorCode.NOT_ATTACHED, f"{type(request).__name__} needs an attach first")
            if type(request) is stimuli.Lookup:
                found = glance(self.stack, session.namespace, request)
                if found is not None:
                    self.stack.answer(number, found)
                    return
            self._check(session, request)
            if not self.takes_stores and isinstance(request, stimuli.PrepareStore):
                raise Refusal(ErrorCode.STOPPING, "the daemon is being drained and takes no stores")
            if problem := self.limit.problem(session, request):
                raise Refusal(ErrorCode.BUSY, problem)
            self._handlers[type(request)](session, request)
        except Refusal as refusal:
            self.stack.answer(number, Refused(id=request.id, code=refusal.code, message=str(refusal)))

    def _check(self, session: Session, request: stimuli.LadderRequest) -> None:
        """Refuse what the codec cannot see is wrong, before anything changes."""
        if session.role is Role.WORKER and isinstance(request, SCHEDULER_ONLY):
            raise Refusal(ErrorCode.NOT_ALLOWED, f"{type(request).__name__} is for the scheduler session")
        if type(request) in NUMBERS_ONLY:
            return
        keys: Sequence[BlockKey] = getattr(request, "keys", ())
        groups = len(self.stack.primary.spaces[session.namespace].layout.groups)
        group = int.from_bytes(max([key[-GROUP_BYTES:] for key in keys], default=b""), "big")
        if group >= groups:
            raise Refusal(ErrorCode.BAD_REQUEST, f"group {group}: the layout has {groups} groups")
        self._check_tiers(request)
        if isinstance(request, stimuli.PrepareStore):
            check_meta(request)

    def _check_tiers(self, request: stimuli.LadderRequest) -> None:
        named: tuple[str, ...] = getattr(request, "tiers", None) or ()
        if isinstance(request, stimuli.Inventory) and request.tier is not None:
            named = (request.tier,)
        if named:
            check_tiers(named, self.stack.names)
        scope = getattr(request, "scope", None)
        if scope is not None:
            for pattern in (*(scope.load_from or ()), *(scope.store_to or ())):
                if wrong := scopes.problem(pattern, self.stack.tiers):
                    raise Refusal(ErrorCode.UNKNOWN_TIER, f"scope: {wrong}")

    def _ordered(self, number: int, request: stimuli.OperatorRequest) -> None:
        if self.stopping:
            message = "the daemon is stopping"
            self.stack.answer(number, Refused(id=request.id, code=ErrorCode.STOPPING, message=message))
            return
        self.operator.ordered(number, request)
        self.loads.cancelled()

    def _attach(self, number: int, request: stimuli.Attach) -> None:
        if number in self.sessions.open:
            raise Refusal(ErrorCode.NOT_ALLOWED, "the connection is attached already")
        layout = request.layout
        if request.rank >= layout.ranks:
            raise Refusal(ErrorCode.BAD_REQUEST, f"rank {request.rank}: the layout has {layout.ranks} ranks")
        namespace = layout.namespace()
        try:
            space = open_space(self.stack, namespace, layout)
        except PoolExhausted as error:
            raise Refusal(ErrorCode.POOL_EXHAUSTED, str(error)) from None
        space.sessions.add(number)
        space.awaited.discard(request.process)
        self.sessions.attach(
            Session(
                number=number,
                engine=request.engine_id,
                process=request.process,
                namespace=namespace,
                role=request.role,
                rank=request.rank,
                dp_rank=request.dp_rank,
            )
        )
        geometry = space.geometry
        self.stack.answer(
            number,
            Attached(
                id=request.id,
                session=number,
                namespace=namespace,
                pool_id=self.stack.pool_id,
                pool_bytes=self.pool_bytes,
                unit_bytes=UNIT,
                slot_bytes=geometry.slot_bytes,
                payload_bytes=geometry.payload_bytes,
                rank_offsets=geometry.rank_offsets,
                fence=self.sessions.fence,
                tiers=self.stack.names,
            ),
        )

    def _touch(self, session: Session, request: stimuli.Touch) -> None:
        count = self.stack.touch(session.namespace, request.keys)
        self.stack.answer(session.number, Done(id=request.id, count=count))

    def _evict(self, session: Session, request: stimuli.Evict) -> None:
        tiers = self.stack.names if request.tiers is None else request.tiers
        ids = block_ids(session.namespace, request.keys)
        count = self.stack.evict(ids, tiers)
        self.loads.cancelled()
        self.stack.answer(session.number, Done(id=request.id, count=count))

    def _reset(self, session: Session, request: stimuli.Reset) -> None:
        tiers = self.stack.names if request.tiers is None else request.tiers
        self.resets.begin(
            session.number,
            frozenset((session.namespace,)),
            tiers,
            lambda gone: Done(id=request.id, count=gone.blocks.total()),
        )
        self.loads.cancelled()

    def _acknowledge(self, session: Session, request: stimuli.Acknowledge) -> None:
        self.custody.acknowledged(session.engine, session.process, request.fence)
        self.stack.answer(session.number, Done(id=request.id))

    def _goodbye(self, session: Session, request: stimuli.Goodbye) -> None:
        self._close(session.number)
        self.sessions.leave(session)
        others = self.sessions.of_engine(session.engine)
        if all(other.process != session.process for other in others):
            self.custody.process_gone(session.process, [session.engine])
        self.stack.answer(session.number, Done(id=request.id))

    # -- ends ---------------------------------------------------------------------------------------

    def _close(self, number: int) -> None:
        session = self.sessions.open.pop(number, None)
        if session is None:
            return
        self.inventory.forget(number)
        self.resets.forget_session(number)
        self.loads.forget_session(number)
        for job in [job for job in self.sessions.jobs.values() if job.session == number]:
            self.stores.revoke(job)
        for lease in [lease for lease in self.sessions.leases.values() if lease.session == number]:
            self.leases.revoke(lease)
        space = self.stack.primary.spaces.get(session.namespace)
        if space is not None:
            space.sessions.discard(number)

    def _tick(self) -> None:
        now = self.stack.now
        self.operator.go_on()
        if now >= self.awaits_until:
            for space in self.stack.primary.spaces.values():
                space.awaited.clear()
        self.loads.expire()
        for job in [job for job in self.sessions.jobs.values() if job.deadline <= now]:
            self.stores.revoke(job)
        for lease in [lease for lease in self.sessions.leases.values() if lease.deadline <= now]:
            self.leases.revoke(lease)
        for tier in self.stack.secondaries:
            self.upkeep.tick(tier)
            self.cascade.pump(tier)  # a breaker may be half open by now

    # -- workers ------------------------------------------------------------------------------------

    def _worked(self, stimulus: stimuli.Worked) -> None:
        match stimulus:
            case stimuli.Finished(op, outcomes, seconds):
                self._finished(op, outcomes, seconds)
            case stimuli.Stalled(op):
                self._stalled(op)
            case stimuli.Probed(op, found, failed):
                self._probed(op, found, failed=failed)
            case stimuli.Found(tier, blocks, last, tenants):
                for namespace, tenant in tenants.items():
                    self.stack.tenants.learn(namespace, tenant)
                self._found(self.stack.by_name[tier], blocks, last=last)
            case stimuli.Usable(tier, reason, stalled):
                gate = self.stack.by_name[tier].gate
                gate.outage, gate.hangs = reason, stalled
                self.cascade.pump(self.stack.by_name[tier])

    def _finished(self, op: int, outcomes: Sequence[stimuli.Outcome], seconds: float) -> None:
        operation = self.stack.operations.pop(op)
        operation.tier.gate.stalled.discard(op)
        if operation.kind == "write":
            self.cascade.wrote(operation, outcomes, seconds)
        elif operation.kind == "read":
            self.loads.read(operation, outcomes)
        else:
            self.upkeep.deleted(operation, outcomes)
        self.resets.finished(operation.tier, (outcome.id for outcome in outcomes))
        self._trim(operation.tier)
        self.cascade.pump(operation.tier)

    def _stalled(self, op: int) -> None:
        operation = self.stack.operations.get(op)
        if operation is None:
            return
        operation.tier.gate.stalled.add(op)
        operation.tier.counters["stalls"] += 1
        if operation.kind == "read":
            self.loads.stalled(operation)
        elif operation.kind == "probe":
            self.loads.probing.give_up(op, operation.tier)
            self.loads.probed()

    def _probed(self, op: int, found: Sequence[stimuli.FoundBlock], *, failed: bool) -> None:
        tier = self.stack.operations.pop(op).tier
        tier.gate.stalled.discard(op)
        self.loads.probing.probed(op, tier, found, failed=failed)
        self.loads.probed()
        self._trim(tier)

    def _found(self, tier: SecondaryTier, blocks: Sequence[stimuli.FoundBlock], *, last: bool) -> None:
        self.upkeep.found(tier, blocks)
        if last:
            self.upkeep.scanned(tier)
            self.resets.scanned(tier)
            self.cascade.pump(tier)

    def _trim(self, tier: SecondaryTier) -> None:
        """Evict what could not be evicted when the tier went over its capacity."""
        if tier.spec.capacity is not None and not tier.scanning:
            self.upkeep.trim(tier, tier.spec.capacity - tier.writing - tier.stuck_bytes)

    def _steer(self, stimulus: stimuli.Steering) -> None:
        match stimulus:
            case stimuli.Drain(stores):
                self.takes_stores = self.takes_stores and stores
                self.cascade.write_down()
            case stimuli.Resume():
                self.takes_stores = True
            case stimuli.Retune():
                self._retune(stimulus)

    def _retune(self, wanted: stimuli.Retune) -> None:
        self.stores.retune(wanted.job_ttl)
        self.leases.retune(wanted.lease_ttl)
        self.limit.retune(wanted.max_leases, wanted.job_ttl, wanted.lease_ttl)
        for name, limits in wanted.tiers.items():
            tier = self.stack.by_name[name]
            tier.retune(limits)
            self._trim(tier)
            self.cascade.pump(tier)

    def _stop(self, stop: stimuli.Stop) -> None:
        """Answer what waits and announce that the pool's blocks go away with the process, if they do."""
        self.stopping = True
        self.loads.finish_all()
        self.operator.finish_all()
        if stop.keep_pool:
            return
        for space in self.stack.primary.spaces.values():
            for node in leaf_first(space.blocks):
                self.stack.primary.forget(node, Departure.STOPPED)

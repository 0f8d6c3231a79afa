# mypy: disable-error-code="import-not-found,import-untyped"
"""The scheduler's copy jobs: handed out empty, their slots filled in when the daemon has answered.

A load starts in the step that prepares it, so at the step's end the scheduler waits, once, for the slots of
all its loads. A store need not: vLLM's workers begin it a step later anyway. It is asked for in the next
step, and its slots travel with the metadata of the step in which they are there; only a flush of its blocks
is waited for. A block that got no slot travels on as ``NO_SLOT``: a load of it is recomputed, a store of it
skipped.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvtierd.core.model import BlockKey, BlockMeta, Scope, SkipReason
from kvtierd.engines.guard import Guard
from kvtierd.engines.vllm.identity import Identity
from kvtierd.engines.vllm.transfer import NO_SLOT, PoolSpec, Slots, WorkerReport

logger = logging.getLogger(__name__)

_REFUSED = (SkipReason.NO_ROOM, SkipReason.PARENT_REFUSED)

NOBODY = SimpleNamespace(done=True, miss="away", result=None)
"""The call of a job that nobody could be asked for."""

Name = tuple[str, frozenset[bytes]]
"""What vLLM tells a completed job by: the request and the job's keys."""


# A store waits this long for its slots. Nobody waits for it, but vLLM steps on while it has one.
STORE_PATIENCE = 1.0


@dataclass(slots=True, eq=False)
class Transfer:
    """One job. ``ask`` begins its call, ``grant`` is the client's ``Job`` or ``Loaded`` once it is there."""

    spec: PoolSpec
    is_store: bool
    ask: Callable[[], Any]
    call: Any = None
    asked_at: float = 0.0
    fences: dict[str, int] = field(default_factory=dict)
    grant: Any = None
    failed: set[bytes] = field(default_factory=set)


class Jobs:
    """Loads and stores between their preparation and their completion.

    ``crowded``: the last store that was answered found no room for some of its blocks.
    """

    def __init__(self, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self.crowded = False
        self._guard = guard
        self._clock = clock
        self._pipeline: Any = None
        self._namespace = ""
        self._ranks = 1
        self._tickets = itertools.count(1)
        self._loads: list[Transfer] = []
        self._waiting: dict[int, Transfer] = {}
        self._tickets_of_jobs: dict[int, int] = {}
        self._unwanted: list[Any] = []
        self._open: dict[Name, list[Transfer]] = {}
        self._orphans: dict[int, tuple[int, Transfer]] = {}
        self._fences: dict[str, int] = {}

    def bind(self, pipeline: Any, identity: Identity) -> None:
        """Use this pipeline (:class:`kvtierd.client.pipeline.Pipeline`)."""
        self._pipeline = pipeline
        self._namespace, self._ranks = identity.layout.namespace(), identity.layout.ranks

    def empty(self, keys: Collection[bytes] = ()) -> PoolSpec:
        """Return a job without slots."""
        none = (NO_SLOT,) * len(keys)
        return PoolSpec(next(self._tickets), "", self._namespace, 0, tuple(keys), none, (0,) * len(keys))

    # -- preparation -----------------------------------------------------------------------------------

    def load(
        self, request: str, keys: Collection[bytes], scope: Scope | None, trace: str | None = None
    ) -> PoolSpec:
        """Ask for the slots of blocks that were hits; all of them that are still there are leased.

        ``trace`` here and below: the span of the caller's that the request came with.
        """
        wanted = [BlockKey(key) for key in keys]
        made = Transfer(
            self.empty(keys), False, lambda: self._pipeline.load(wanted, 0.0, scope, traceparent=trace)
        )
        self._remember(request, made)
        self._loads.append(made)
        self._ask(made)
        return made.spec

    def store(
        self,
        request: str,
        keys: Collection[bytes],
        describe: Callable[[], Sequence[BlockMeta | None]],
        scope: Scope | None,
        trace: str | None = None,
    ) -> PoolSpec:
        """Note what is to be stored; :meth:`ask` asks for its slots. ``describe`` makes the metadata then."""
        spec = self.empty(keys)
        spec.pending = True
        made = Transfer(
            spec,
            True,
            lambda: self._pipeline.prepare_store(
                [BlockKey(k) for k in spec.keys], describe(), scope, traceparent=trace
            ),
        )
        self._remember(request, made)
        self._waiting[spec.ticket] = made
        return spec

    def offer(self, keys: Collection[bytes], scope: Scope | None) -> None:
        """Let blocks that are surely in the pool go down to other tiers; nobody waits for the answer."""
        wanted = [BlockKey(key) for key in keys]
        call = self._guard.call(
            "prepare_store", lambda: self._pipeline.prepare_store(wanted, None, scope), None
        )
        if call is not None:
            self._unwanted.append(call)

    def _remember(self, request: str, transfer: Transfer) -> None:
        self._open.setdefault((request, frozenset(transfer.spec.keys)), []).append(transfer)

    # -- slots -----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for the slots of the stores that were noted."""
        for transfer in self._waiting.values():
            if transfer.call is None:
                self._ask(transfer)

    def _ask(self, transfer: Transfer) -> None:
        # What was revoked until now; the slots are given later, so that a worker never takes them for newer.
        transfer.fences, transfer.asked_at = self._fences, self._clock()
        verb = "prepare_store" if transfer.is_store else "load"
        transfer.call = self._guard.call(verb, transfer.ask, None) or NOBODY

    def fill(self, store_jobs: Mapping[int, Any], flushed: Collection[int]) -> dict[int, Slots]:
        """End a step; returns the slots of stores by ticket, as far as they are there.

        Waits once, at most the deadline, where the step has loads or flushes stores that have no slots yet.
        ``store_jobs``: vLLM's jobs of this step by number; ``flushed``: the numbers of those to be flushed.
        """
        self.give_back_unwanted()
        for number, job in store_jobs.items():
            if job.dst_spec.ticket in self._waiting:
                self._tickets_of_jobs[number] = job.dst_spec.ticket
        loads, self._loads = self._loads, []
        urgent = loads + [
            self._waiting[self._tickets_of_jobs[number]]
            for number in flushed
            if self._tickets_of_jobs.get(number) in self._waiting
        ]
        if urgent:
            self._await(urgent)
        elif any(transfer.call is not None for transfer in self._waiting.values()):
            self._guard.call("poll", self._pipeline.poll, None)
        for transfer in loads:
            self._fill(transfer)
        return {transfer.spec.ticket: self._fill(transfer) for transfer in self._answered()}

    def fill_now(self, spec: PoolSpec) -> bool:
        """Fill one store at once; whether any of its blocks got a slot."""
        transfer = self._waiting[spec.ticket]
        self._await([transfer])
        self._fill(transfer)
        return transfer.grant is not None

    def withdraw(self, request: str, spec: PoolSpec) -> None:
        """Forget a job of which nothing came: vLLM is not told of it."""
        name = (request, frozenset(spec.keys))
        for transfer in [each for each in self._open.get(name, ()) if each.spec is spec]:
            self._close(name, transfer)

    def _await(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.call is None:
                self._ask(transfer)
        calls = [transfer.call for transfer in transfers]
        self._guard.call("slots", lambda: self._pipeline.wait(calls), None)
        for call in calls:
            self._drop(call)

    def _drop(self, call: Any) -> None:
        if not call.done:
            self._guard.call("slots", lambda: self._pipeline.drop(call), None)

    def _answered(self) -> list[Transfer]:
        """Return the stores whose slots are there, or will never be."""
        for transfer in self._waiting.values():
            if transfer.call is not None and self._clock() - transfer.asked_at > STORE_PATIENCE:
                self._drop(transfer.call)
        return [each for each in self._waiting.values() if each.call is not None and each.call.done]

    def _fill(self, transfer: Transfer) -> Slots:
        spec = transfer.spec
        grant = self._guard.call("slots", partial(getattr, transfer.call, "result"), None)
        if transfer.is_store:
            self._waiting.pop(spec.ticket, None)
            if not self._waiting:
                self._tickets_of_jobs.clear()
            if grant is not None:
                self.crowded = any(skipped.reason in _REFUSED for skipped in grant.skipped)
        slots = Slots("", 0, spec.slots, spec.generations, 0)
        if grant is not None and grant.keys:
            transfer.grant = grant
            slots = self._slots(transfer, grant)
        spec.fill(slots)
        if not transfer.is_store and (missing := spec.slots.count(NO_SLOT)):
            self._guard.report("load", f"{missing} of {len(spec.keys)} blocks were gone, they are recomputed")
        return slots

    @staticmethod
    def _slots(transfer: Transfer, grant: Any) -> Slots:
        is_store = transfer.is_store
        generations = (grant.generation,) * len(grant.keys) if is_store else grant.generations
        given = {
            key: (slot, generation)
            for key, slot, generation in zip(grant.keys, grant.slots, generations, strict=True)
        }
        places = [given.get(key, (NO_SLOT, 0)) for key in transfer.spec.keys]
        return Slots(
            grant.pool_id,
            transfer.fences.get(grant.pool_id, 0),
            tuple(slot for slot, _ in places),
            tuple(generation for _, generation in places),
            grant.job if is_store else 0,
        )

    def give_back_unwanted(self) -> None:
        """Abort what was granted though nobody is going to write it."""
        waiting = []
        for call in self._unwanted:
            if not call.done:
                waiting.append(call)
                continue
            job = self._guard.call("prepare_store", partial(getattr, call, "result"), None)
            if job is not None and job.keys:
                self._guard.call("abort", partial(self._pipeline.abort, job), None)
        self._unwanted = waiting

    # -- completion ------------------------------------------------------------------------------------

    def complete(self, request: str, keys: Collection[bytes], *, success: bool = True) -> PoolSpec | None:
        """All workers have reported: make stored blocks visible, end a load's lease. Nobody waits for it."""
        name = (request, frozenset(keys))
        transfers = self._open.get(name)
        if not transfers:
            return None
        transfer = transfers[0]
        self._close(name, transfer)
        self._give_up(transfer)
        if transfer.grant is not None:
            if not success:
                transfer.failed.update(transfer.spec.keys)
            self._guard.call("commit" if transfer.is_store else "release", lambda: self._end(transfer), None)
        return transfer.spec

    def _close(self, name: Name, transfer: Transfer) -> None:
        transfers = self._open.get(name, [])
        if transfer in transfers:
            transfers.remove(transfer)
        if not transfers:
            self._open.pop(name, None)

    def _give_up(self, transfer: Transfer) -> None:
        """Nobody is going to write a store that has no slots yet."""
        if self._waiting.pop(transfer.spec.ticket, None) is not None and transfer.call is not None:
            self._unwanted.append(transfer.call)

    def _end(self, transfer: Transfer) -> None:
        if transfer.is_store:
            void = [BlockKey(key) for key in transfer.failed]
            self._pipeline.commit(transfer.grant, void)
        else:
            self._pipeline.release(transfer.grant)

    def revoked(self, pool_id: str, fence: int) -> None:
        """The daemon took back what it had given until then. The mapping is replaced, never changed."""
        self._fences = {pool_id: max(self._fences.get(pool_id, 0), fence)}

    def note(self, report: WorkerReport, pool_id: str) -> None:
        """Take the workers' failed keys; called before vLLM completes the jobs of the same report."""
        if pool_id in report.fences:
            self.revoked(pool_id, report.fences[pool_id])
        if not report.failed:
            return
        for transfer in [transfer for transfers in self._open.values() for transfer in transfers]:
            if keys := report.failed.get(transfer.spec.ticket):
                transfer.failed.update(keys)
                self._guard.report("copy", f"{len(keys)} blocks could not be copied, they are not stored")

    # -- reset -----------------------------------------------------------------------------------------

    def orphan_all(self) -> None:
        """Part with jobs that vLLM forgets: its workers still end them, and their slots stay until then."""
        for transfer in [transfer for transfers in self._open.values() for transfer in transfers]:
            self._give_up(transfer)
            if transfer.grant is not None:
                self._orphans[transfer.spec.ticket] = (self._ranks, transfer)
        self._open.clear()
        self._loads.clear()

    def settle_orphans(self, report: WorkerReport) -> None:
        """End what a reset left behind as soon as every worker is done with it."""
        for ticket, count in report.tickets.items() if self._orphans else ():
            if ticket not in self._orphans:
                continue
            left, transfer = self._orphans[ticket]
            if left > count:
                self._orphans[ticket] = (left - count, transfer)
                continue
            del self._orphans[ticket]
            end = self._pipeline.abort if transfer.is_store else self._pipeline.release
            self._guard.call("abort", partial(end, transfer.grant), None)

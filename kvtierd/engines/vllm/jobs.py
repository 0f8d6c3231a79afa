# mypy: disable-error-code="import-not-found,import-untyped"
"""The scheduler's copy jobs: slots asked for while vLLM schedules, filled in once when its step is built.

vLLM asks for the slots of a load or store within the step and sends them to its workers at the step's end.
So a job is handed out empty, the daemon works while vLLM goes on scheduling, and :meth:`Jobs.fill` waits once
for all of a step's jobs. A block that got no slot travels on as ``NO_SLOT``: a load of it is recomputed, a
store of it skipped.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtierd.core.model import BlockKey, BlockMeta, Scope, SkipReason
from kvtierd.engines.guard import Guard
from kvtierd.engines.vllm.identity import Identity
from kvtierd.engines.vllm.transfer import NO_SLOT, PoolSpec, WorkerReport

logger = logging.getLogger(__name__)

_REFUSED = (SkipReason.NO_ROOM, SkipReason.PARENT_REFUSED)

Name = tuple[str, frozenset[bytes]]
"""What vLLM tells a completed job by: the request and the job's keys."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One job. ``grant`` is the client's ``Job`` or ``Loaded``, once it is there."""

    spec: PoolSpec
    call: Any
    is_store: bool
    fences: dict[str, int]
    grant: Any = None
    failed: set[bytes] = field(default_factory=set)


class Jobs:
    """Loads and stores between their preparation and their completion.

    ``crowded``: the last store that was answered found no room for some of its blocks.
    """

    def __init__(self, guard: Guard) -> None:
        self.crowded = False
        self._guard = guard
        self._pipeline: Any = None
        self._namespace = ""
        self._ranks = 1
        self._tickets = itertools.count(1)
        self._unfilled: list[Transfer] = []
        self._unwanted: list[Any] = []
        self._open: dict[Name, list[Transfer]] = {}
        self._orphans: dict[int, tuple[int, Transfer]] = {}
        self._fences: dict[str, int] = {}

    def bind(self, pipeline: Any, identity: Identity) -> None:
        """Use this pipeline (:class:`kvtierd.client.pipeline.Pipeline`)."""
        self._pipeline = pipeline
        self._namespace, self._ranks = identity.layout.namespace(), identity.layout.ranks

    def empty(self, keys: Collection[bytes] = ()) -> PoolSpec:
        """A job without slots."""
        none = (NO_SLOT,) * len(keys)
        return PoolSpec(next(self._tickets), "", self._namespace, 0, tuple(keys), none, (0,) * len(keys))

    # -- preparation -----------------------------------------------------------------------------------

    def load(self, request: str, keys: Collection[bytes], scope: Scope | None) -> PoolSpec:
        """Ask for the slots of blocks that were hits; all of them that are still there are leased."""
        wanted = list(map(BlockKey, keys))
        return self._begin(request, keys, False, lambda: self._pipeline.load(wanted, 0.0, scope)).spec

    def store(
        self, request: str, keys: Collection[bytes], metas: Sequence[BlockMeta | None], scope: Scope | None
    ) -> Transfer | None:
        """Ask for slots for what is not there yet; ``None`` when nobody can be asked."""
        wanted = list(map(BlockKey, keys))
        made = self._begin(request, keys, True, lambda: self._pipeline.prepare_store(wanted, metas, scope))
        if made.call is not None and not made.call.miss:
            return made
        self._unfilled.remove(made)
        self.withdraw(request, made)
        return None

    def offer(self, keys: Collection[bytes], metas: Sequence[BlockMeta | None], scope: Scope | None) -> None:
        """Let blocks that are surely in the pool go down to other tiers; nobody waits for the answer."""
        wanted = list(map(BlockKey, keys))
        call = self._guard.call(
            "prepare_store", lambda: self._pipeline.prepare_store(wanted, metas, scope), None
        )
        if call is not None:
            self._unwanted.append(call)

    def _begin(
        self, request: str, keys: Collection[bytes], is_store: bool, ask: Callable[[], Any]
    ) -> Transfer:
        call = self._guard.call("prepare_store" if is_store else "load", ask, None)
        # What was revoked until now; the slots are given later, so that a worker never takes them for newer.
        made = Transfer(self.empty(keys), call, is_store, self._fences)
        self._open.setdefault((request, frozenset(keys)), []).append(made)
        self._unfilled.append(made)
        return made

    # -- slots -----------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Write the daemon's answers into the jobs of this step; waits once, at most the deadline."""
        self._give_back_unwanted()
        if self._unfilled:
            transfers, self._unfilled = self._unfilled, []
            self._await(transfers)
            for transfer in transfers:
                self._fill(transfer)

    def fill_now(self, transfer: Transfer) -> list[bytes]:
        """Fill one job at once; returns the keys that got a slot."""
        self._unfilled.remove(transfer)
        self._await([transfer])
        self._fill(transfer)
        return [key for key, slot in zip(transfer.spec.keys, transfer.spec.slots, strict=True) if slot >= 0]

    def withdraw(self, request: str, transfer: Transfer) -> None:
        """A job of which nothing came: vLLM is not told of it."""
        self._close((request, frozenset(transfer.spec.keys)), transfer)

    def _await(self, transfers: Sequence[Transfer]) -> None:
        calls = [transfer.call for transfer in transfers if transfer.call is not None]
        self._guard.call("slots", lambda: self._pipeline.wait(calls), None)
        for call in calls:
            if not call.done:
                self._guard.call("slots", partial(self._pipeline.drop, call), None)

    def _fill(self, transfer: Transfer) -> None:
        call, spec = transfer.call, transfer.spec
        verb = "prepare_store" if transfer.is_store else "load"
        grant = None if call is None else self._guard.call(verb, lambda: call.result, None)
        if grant is not None and transfer.is_store:
            self.crowded = any(skipped.reason in _REFUSED for skipped in grant.skipped)
        if grant is not None and grant.keys:
            transfer.grant = grant
            self._write(spec, grant, transfer.is_store)
            spec.fence = transfer.fences.get(grant.pool_id, 0)
        if transfer.is_store:
            return
        if missing := spec.slots.count(NO_SLOT):
            self._guard.report("load", f"{missing} of {len(spec.keys)} blocks were gone, they are recomputed")

    def _write(self, spec: PoolSpec, grant: Any, is_store: bool) -> None:
        generations = (grant.generation,) * len(grant.keys) if is_store else grant.generations
        given = {
            key: (slot, generation)
            for key, slot, generation in zip(grant.keys, grant.slots, generations, strict=True)
        }
        places = [given.get(key, (NO_SLOT, 0)) for key in spec.keys]
        spec.pool_id = grant.pool_id
        spec.slots = tuple(slot for slot, _ in places)
        spec.generations = tuple(generation for _, generation in places)
        spec.job = grant.job if is_store else 0

    def _give_back_unwanted(self) -> None:
        """A block that was thought to be there had gone meanwhile: its slot is not going to be written."""
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

    def _end(self, transfer: Transfer) -> None:
        if transfer.is_store:
            void = list(map(BlockKey, transfer.failed))
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
            if transfer.grant is not None:
                self._orphans[transfer.spec.ticket] = (self._ranks, transfer)
        self._open.clear()

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

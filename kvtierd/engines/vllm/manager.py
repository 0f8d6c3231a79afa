# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""The scheduler side: vLLM's ``OffloadingManager`` over one session with the daemon.

Runs in the scheduler's thread. Every call has the client's deadline and no exception of the daemon's gets
out; without a daemon everything is a miss and nothing is stored. Events are the daemon's to publish, so
``take_events`` stays empty.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvtierd.engines.vllm.chain import Chain, to_block_key, to_offload_key
from kvtierd.engines.vllm.guard import Guard
from kvtierd.engines.vllm.identity import GroupShape, Identity
from kvtierd.engines.vllm.lookups import Lookups
from kvtierd.engines.vllm.settings import Settings
from kvtierd.engines.vllm.transfer import NO_SLOT, PoolSpec, WorkerReport
from kvtierd.engines.vllm.versions import CacheHitSource
from kvtierd.engines.vllm.worker import workers_of_this_process

logger = logging.getLogger(__name__)

STORE_RETRIES = 3


@dataclass(slots=True)
class _Store:
    """A daemon job between ``prepare_store`` and its commit."""

    ticket: int
    job: Any
    keys: tuple[bytes, ...]
    failed: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Request:
    chain: Chain
    refused: int = 0


class KvtierdManager(OffloadingManager):
    """One engine's scheduler session. Inert (all misses) until :class:`KvtierdConnector` binds it.

    The plain ``OffloadingConnector`` cannot report blocks that failed to load, so it must not use this.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        settings: Settings = spec.settings
        self._guard = Guard(logger)
        self._lookups = Lookups(settings.lease, settings.promotion_deadline, self._guard)
        self._session: Any = None
        self._namespace = ""
        self._ranks = 1
        self._shapes: tuple[GroupShape, ...] = ()
        self._tickets = itertools.count(1)
        self._requests: dict[str, _Request] = {}
        self._stores: dict[bytes, _Store] = {}
        self._loads: dict[str, tuple[int, Any]] = {}
        self._orphans: dict[int, tuple[int, Callable[[], object]]] = {}
        self._fences: dict[str, int] = {}
        self._reset_owed = False

    def bind(self, session: Any, identity: Identity) -> None:
        """Start to use a client session; it is closed at shutdown."""
        self._session = session
        self._namespace, self._ranks = identity.layout.namespace(), identity.layout.ranks
        self._shapes = identity.shapes

    @property
    def failures(self) -> dict[str, int]:
        """Calls that the daemon or the connection failed, per verb."""
        return dict(self._guard.failures)

    # -- requests -----------------------------------------------------------------------------------------

    def track(self, request: Any) -> None:
        """Learn of a vLLM ``Request``: its keys, its metadata; mark its whole chain as used.

        vLLM asks only beyond its own hits and never touches, so without this the root of a hot prefix would
        age first.
        """
        if self._session is None:
            return
        chain = Chain(request, self._shapes)
        self._requests[request.request_id] = _Request(chain)
        self._guard.call("touch", lambda: self._touch(chain), None)

    def _touch(self, chain: Chain) -> None:
        if keys := tuple(to_block_key(key) for key in chain.all()):
            self._session.touch(keys)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Nothing to do: :meth:`track` has what is needed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Give unused leases back. Copies may still run; they are known by their keys."""
        self._lookups.forget(req_context.req_id)
        self._requests.pop(req_context.req_id, None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A scheduler step ends: answers may be asked for again, notices are read."""
        self._lookups.turn += 1
        if self._session is not None:
            self._guard.call("poll", self._answer_notices, None)
            if self._reset_owed and self._session.connected:
                self._pay_reset()

    def _answer_notices(self) -> None:
        """Note what the daemon revoked; speak for this process only where no worker does it."""
        if fence := self._session.poll():
            self._revoked_up_to(self._session.pool_id, fence)
            if not workers_of_this_process():
                self._session.acknowledge()

    def _revoked_up_to(self, pool_id: str, fence: int) -> None:
        self._fences = {pool_id: max(self._fences.get(pool_id, 0), fence)}

    # -- loads --------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Say whether a block is in the pool, on its way there, or not to be had."""
        request = self._requests.get(req_context.req_id)
        if request is None or self._reset_owed:
            return LookupResult.MISS
        return self._lookups.find(self._session, req_context.req_id, request.chain, key)

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        """Host memory, or the disk when the request waited for the block to come from below."""
        below = self._lookups.came_from_below(req_context.req_id, key)
        return CacheHitSource.DISK if below else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> PoolSpec:
        """Lease the slots. vLLM allows no failure here: a block that is gone travels on as ``NO_SLOT``."""
        wanted = tuple(to_block_key(key) for key in keys)
        got = self._guard.call("load", lambda: self._session.load(wanted, deadline=0.0), None)
        self._lookups.consumed(req_context.req_id)
        ticket = next(self._tickets)
        slots: dict[bytes, tuple[int, int]] = {}
        if got is not None:
            slots = {
                to_offload_key(key): place
                for key, place in zip(got.keys, zip(got.slots, got.generations, strict=True), strict=True)
            }
            self._loads[req_context.req_id] = (ticket, got)
        places = [slots.get(key, (NO_SLOT, 0)) for key in keys]
        if missing := sum(slot == NO_SLOT for slot, _ in places):
            self._guard.report("load", f"{missing} of {len(places)} blocks were gone, they are recomputed")
        return self._spec(ticket, got.pool_id if slots else "", tuple(keys), places)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """All workers have copied: end the lease."""
        _, got = self._loads.pop(req_context.req_id, (0, None))
        if got is not None:
            self._guard.call("release", got.release, None)

    # -- stores -------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """Reserve slots for what is not there yet.

        ``None`` makes vLLM offer the blocks again in its next step; after ``STORE_RETRIES`` refusals of a
        request, and while the daemon is away, they are skipped for good instead.
        """
        request = self._requests.get(req_context.req_id)
        if self._session is None or self._reset_owed:
            return self._stored_nothing()
        metas: tuple[Any, ...] = ()
        if request is not None:  # without metadata the block's events are placeholders
            metas = self._guard.call("metadata", lambda: tuple(map(request.chain.meta, keys)), ())
        wanted = tuple(to_block_key(key) for key in keys)
        job = self._guard.call("prepare_store", lambda: self._session.prepare_store(wanted, meta=metas), None)
        if job is None or not job.keys:
            return self._refused(job, request)
        given = {
            to_offload_key(key): (slot, job.generation) for key, slot in zip(job.keys, job.slots, strict=True)
        }
        chosen = tuple(key for key in keys if key in given)
        store = _Store(next(self._tickets), job, chosen)
        self._stores.update(dict.fromkeys(chosen, store))
        spec = self._spec(store.ticket, job.pool_id, chosen, [given[key] for key in chosen], job.job)
        return PrepareStoreOutput(keys_to_store=list(chosen), store_spec=spec, evicted_keys=[])

    def _refused(self, job: Any, request: _Request | None) -> PrepareStoreOutput | None:
        no_room = (
            job is not None
            and self._session.connected
            and any(skipped.reason not in ("resident", "pending") for skipped in job.skipped)
        )
        if no_room and request is not None and request.refused < STORE_RETRIES:
            request.refused += 1
            return None
        return self._stored_nothing()

    def _stored_nothing(self) -> PrepareStoreOutput:
        return PrepareStoreOutput(keys_to_store=[], store_spec=self._spec(0, "", (), []), evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """All workers have reported: make the blocks visible, but for those that one of them failed."""
        stores = {store.ticket: store for key in keys if (store := self._stores.pop(key, None)) is not None}
        for store in stores.values():
            failed = store.keys if not success else tuple(store.failed)
            void = tuple(to_block_key(key) for key in failed)
            self._guard.call("commit", lambda store=store, void=void: store.job.commit(failed=void), None)

    def note_failures(self, report: WorkerReport) -> None:
        """Take the workers' failed keys; called before vLLM completes the jobs of the same report."""
        for pool_id, fence in report.fences.items():
            if pool_id == self._session.pool_id:
                self._revoked_up_to(pool_id, fence)
        by_ticket = {store.ticket: store for store in self._stores.values()} if report.failed else {}
        for ticket, keys in report.failed.items():
            self._guard.report("copy", f"{len(keys)} blocks could not be copied, they are not stored")
            if ticket in by_ticket:
                by_ticket[ticket].failed.update(keys)

    # -- reset and end ------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Forget everything, in the daemon too: vLLM asks for this when the weights have changed.

        vLLM drops its running jobs here but its workers still end them: their slots stay reserved until
        every worker has said so. A daemon that cannot be reached is owed the reset; until it is done there
        are no hits and no stores.
        """
        for store in {store.ticket: store for store in self._stores.values()}.values():
            self._orphans[store.ticket] = (self._ranks, store.job.abort)
        for ticket, got in self._loads.values():
            self._orphans[ticket] = (self._ranks, got.release)
        self._stores.clear()
        self._loads.clear()
        self._lookups.forget_all()
        if self._session is not None:
            self._pay_reset()

    def _pay_reset(self) -> None:
        self._reset_owed = not self._guard.call("reset", self._reset, False)

    def _reset(self) -> bool:
        # `connected` on both sides of the call: an answer given while the daemon is away means nothing.
        epoch = self._session.epoch
        self._session.reset()
        return bool(self._session.connected and self._session.epoch == epoch)

    def settle_orphans(self, report: WorkerReport) -> None:
        """End what a reset left behind as soon as every worker is done with it."""
        for ticket, count in report.tickets.items() if self._orphans else ():
            if ticket in self._orphans:
                left, end = self._orphans[ticket]
                if left > count:
                    self._orphans[ticket] = (left - count, end)
                else:
                    del self._orphans[ticket]
                    self._guard.call("abort", end, None)

    def shutdown(self) -> None:
        """Say goodbye to the daemon."""
        for request in list(self._requests):
            self._lookups.forget(request)
        if self._session is not None:
            self._guard.call("close", self._session.close, None)

    def _spec(
        self,
        ticket: int,
        pool_id: str,
        keys: tuple[bytes, ...],
        places: Sequence[tuple[int, int]],
        job: int = 0,
    ) -> PoolSpec:
        slots = tuple(slot for slot, _ in places)
        generations = tuple(generation for _, generation in places)
        fence = self._fences.get(pool_id, 0)
        return PoolSpec(ticket, pool_id, self._namespace, fence, keys, slots, generations, job)

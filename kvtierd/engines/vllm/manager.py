# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""The scheduler side: vLLM's ``OffloadingManager`` over one pipelined session with the daemon.

Runs in the scheduler's thread. A step waits for the daemon at most twice, each time at most the deadline:
once for all lookups, once for the slots of all its loads. Stores wait for nothing. No exception of the
daemon's gets out; without a daemon everything is a miss and nothing is stored. Events are the daemon's to
publish, so ``take_events`` stays empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvtierd.engines.guard import Guard
from kvtierd.engines.vllm.chain import Chain
from kvtierd.engines.vllm.identity import GroupShape, Identity
from kvtierd.engines.vllm.jobs import Jobs
from kvtierd.engines.vllm.lookups import Lookups
from kvtierd.engines.vllm.scope import RequestScope
from kvtierd.engines.vllm.settings import Settings
from kvtierd.engines.vllm.stats import Stats
from kvtierd.engines.vllm.transfer import PoolSpec, Slots, WorkerReport
from kvtierd.engines.vllm.versions import CacheHitSource
from kvtierd.engines.vllm.worker import workers_of_this_process

logger = logging.getLogger(__name__)

STORE_RETRIES = 3
MOST_TRACE = 128
"""Characters; the daemon refuses a request with more."""
SALT_PROBLEM = "this vLLM cannot tell a salt from an adapter's name (0.31 and later can)"
MISS = LookupResult.MISS


@dataclass(slots=True)
class _Request:
    chain: Chain
    wish: RequestScope
    trace: str | None = None
    refused: int = 0
    loading: bool = False
    lost: bool = False


class KvtierdManager(OffloadingManager):
    """One engine's scheduler session. Inert (all misses) until :class:`KvtierdConnector` binds it.

    The plain ``OffloadingConnector`` cannot report blocks that failed to load, so it must not use this.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        settings: Settings = spec.settings
        self._guard = Guard(logger)
        self._lookups = Lookups(settings.lease, settings.promotion_deadline, self._guard)
        self._jobs = Jobs(self._guard)
        self._stats = Stats()
        self._pipeline: Any = None
        self._shapes: tuple[GroupShape, ...] = ()
        self._salts_collide = False
        self._requests: dict[str, _Request] = {}
        self._reset_call: Any = None
        self._reset_owed = False
        self._missed = 0

    def bind(self, pipeline: Any, identity: Identity) -> None:
        """Start to use a client's pipeline; its session is closed at shutdown."""
        self._pipeline = pipeline
        self._shapes, self._salts_collide = identity.shapes, identity.salts_collide
        self._lookups.bind(pipeline)
        self._jobs.bind(pipeline, identity)
        self._stats.bind(pipeline, identity)

    @property
    def _session(self) -> Any:
        return None if self._pipeline is None else self._pipeline.session

    @property
    def failures(self) -> dict[str, int]:
        """Calls that the daemon or the connection failed, per verb, and blocks that were lost."""
        return dict(self._guard.failures)

    # -- requests --------------------------------------------------------------------------------------

    def track(self, request: Any) -> None:
        """Learn of a vLLM ``Request``: its keys, its metadata, its wishes; ask the daemon for its chain."""
        if self._pipeline is None:
            return
        wish = RequestScope.of(request.kv_transfer_params)
        if self._salts_collide and request.cache_salt and not request.lora_request:
            wish = RequestScope(problem=SALT_PROBLEM)
        chain = Chain(request, self._shapes)
        self._requests[request.request_id] = _Request(chain, wish, _trace(request))
        if wish.problem:
            self._reject(request.request_id, wish.problem)
        elif not self._reset_owed:
            reads = not getattr(request, "skip_reading_prefix_cache", False)
            self._lookups.begin(request.request_id, chain, wish, reads=reads)

    def _reject(self, request: str, problem: str) -> None:
        self._guard.report("request", f"{request}: {problem}; it is served without the cache")

    def problem(self, request: str) -> str:
        """Return why a request is served without the cache; "" when nothing is wrong with it."""
        known = self._requests.get(request)
        return "" if known is None else known.wish.problem or self._lookups.problem(request)

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
        for request in context.preempted_req_ids:  # looked up anew when they come back
            self._lookups.consumed(request)
        if self._pipeline is not None:
            self._guard.call("poll", self._poll, None)

    def _poll(self) -> None:
        self._lookups.tell()
        self._jobs.ask()
        # Note what the daemon revoked; speak for this process only where no worker does it.
        if fence := self._pipeline.notices():
            self._jobs.revoked(self._session.pool_id, fence)
            if not workers_of_this_process():
                self._session.acknowledge()
        if self._reset_owed:
            self._pay_reset()
        missed = self._pipeline.misses.total()
        if missed != self._missed:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._pipeline.misses.items())
            self._guard.report("call", f"no answer to {missed - self._missed} calls (so far: {reasons})")
            self._missed = missed

    def fill(self, meta: Any) -> dict[int, Slots]:
        """End the building of a step: its loads get their slots, and stores those that are there by now."""
        if self._pipeline is None:
            return {}
        return self._jobs.fill(meta.store_jobs, meta.jobs_to_flush or ())

    def flush(self) -> None:
        """Send what was queued."""
        if self._pipeline is not None:
            self._guard.call("flush", self._pipeline.flush, None)

    # -- loads -----------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Say whether a block is in the pool, on its way there, or not to be had."""
        known = self._requests.get(req_context.req_id)
        if self._reset_owed or (known is not None and known.lost):
            return MISS
        found: LookupResult = self._lookups.find(req_context.req_id, key)
        return found

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        """Host memory, or the disk when the request waited for the block to come from below."""
        below = self._lookups.source(req_context.req_id, key)
        return CacheHitSource.DISK if below else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> PoolSpec:
        """Ask for the slots; vLLM allows no failure here."""
        request = req_context.req_id
        if self._pipeline is None:
            return self._jobs.empty(keys)
        known = self._requests.get(request)
        if known is not None:
            known.loading = True
        wished = (known.wish.scope, known.trace) if known else (None, None)
        spec = self._jobs.load(request, keys, *wished)
        self._stats.load((key, self._lookups.source(request, key)) for key in keys)
        self._lookups.consumed(request)
        return spec

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """All workers have copied: end the lease."""
        if (known := self._requests.get(req_context.req_id)) is not None:
            known.loading = False
        self._jobs.complete(req_context.req_id, keys)

    def loads_failed(self) -> None:
        """Some load under way failed: its request computes, and is offered no block any more.

        vLLM asks anew for a request that lost its first block. Where a worker cannot copy at all, the same
        hit would be loaded, lost and asked for again without an end.
        """
        for request in self._requests.values():
            request.lost |= request.loading

    # -- stores ----------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """Note that blocks are to be stored; the daemon is asked in the next step.

        While the pool has room its answer is not waited for. When it had none, ``None`` makes vLLM offer the
        blocks again in its next step; after ``STORE_RETRIES`` refusals of a request, and while the daemon is
        away, they are skipped for good instead.
        """
        name = req_context.req_id
        request = self._requests.get(name)
        if self._pipeline is None or self._reset_owed or not self._session.connected or self.problem(name):
            return self._stored_nothing()
        chosen, scope, trace = list(keys), None, None
        describe: Callable[[], Sequence[Any]] = tuple  # the block's events are placeholders then
        if request is not None:
            chain, wish = request.chain, request.wish
            scope, trace = wish.scope, request.trace
            if wish.max_tokens is not None:
                chosen = [key for key in keys if not chain.is_beyond(key, wish.max_tokens)]
            describe = partial(self._describe, chain, chosen)
        if not chosen:
            return self._stored_nothing()
        if self._lookups.is_resident(name, chosen):
            self._jobs.offer(chosen, scope)
            return self._stored_nothing()
        spec = self._jobs.store(name, chosen, describe, scope, trace)
        if self._jobs.crowded and not self._jobs.fill_now(spec):
            self._jobs.withdraw(name, spec)
            return self._refused(request)
        return PrepareStoreOutput(keys_to_store=chosen, store_spec=spec, evicted_keys=[])

    def _describe(self, chain: Chain, keys: Sequence[bytes]) -> Sequence[Any]:
        nothing: Sequence[Any] = ()
        return self._guard.call("metadata", lambda: tuple(map(chain.meta, keys)), nothing)

    def _refused(self, request: _Request | None) -> PrepareStoreOutput | None:
        if self._jobs.crowded and request is not None and request.refused < STORE_RETRIES:
            request.refused += 1
            return None
        return self._stored_nothing()

    def _stored_nothing(self) -> PrepareStoreOutput:
        return PrepareStoreOutput(keys_to_store=[], store_spec=self._jobs.empty(), evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """All workers have reported: make the blocks visible, but for those that one of them failed."""
        self._jobs.complete(req_context.req_id, keys, success=success)

    def note_failures(self, report: WorkerReport) -> None:
        """Take what the workers say beside their completions, before vLLM completes those jobs."""
        if self._pipeline is not None:
            self._jobs.note(report, self._session.pool_id or "")
            self._stats.reported(report)

    # -- reset and end ---------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Forget everything, in the daemon too: vLLM asks for this when the weights have changed.

        vLLM drops its running jobs here but its workers still end them: their slots stay reserved until
        every worker has said so. A daemon that has not said it is done is owed the reset; until then there
        are no hits and no stores.
        """
        self._jobs.orphan_all()
        if self._pipeline is not None:
            self._lookups.forget_all()
            self._reset_owed, self._reset_call = True, None
            self._guard.call("reset", self._pay_reset, None)
            if self._reset_call is not None:
                self._guard.call("reset", lambda: self._pipeline.wait([self._reset_call]), None)
                self._guard.call("reset", self._pay_reset, None)
            self._jobs.give_back_unwanted()
            self.flush()

    def _pay_reset(self) -> None:
        """See to it that the daemon carries a reset out; a connection that was lost meanwhile means again."""
        call = self._reset_call
        if call is not None and call.done:
            self._reset_owed, self._reset_call = bool(call.miss), None
        if self._reset_owed and self._reset_call is None and self._session.connected:
            self._reset_call = self._pipeline.reset()
            self._pipeline.flush()

    def settle_orphans(self, report: WorkerReport) -> None:
        """End what a reset left behind as soon as every worker is done with it."""
        self._jobs.settle_orphans(report)

    def get_stats(self) -> Any:
        """Return what happened since the last call, for vLLM's own metrics."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Say goodbye to the daemon."""
        if self._pipeline is not None:
            for request in list(self._requests):
                self._lookups.forget(request)
            self._guard.call("close", self._session.close, None)


def _trace(request: Any) -> str | None:
    """Return the caller's span that came with a request, as W3C Trace Context writes it."""
    trace = (getattr(request, "trace_headers", None) or {}).get("traceparent")
    return trace if isinstance(trace, str) and len(trace) <= MOST_TRACE else None

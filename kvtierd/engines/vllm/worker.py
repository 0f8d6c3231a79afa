# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""The worker side: vLLM's ``OffloadingWorker`` that copies between KV tensors and the daemon's pool.

vLLM asserts that every transfer succeeds, so success is always what it is told. What could not be copied
goes other ways: blocks of a load as block ids to recompute, keys of a store as failed keys that travel with
the completion to the scheduler (and to the daemon), which then leaves them out of the commit.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtierd.core.geometry import UNIT
from kvtierd.core.model import BlockKey
from kvtierd.engines.guard import Guard
from kvtierd.engines.vllm.copies import Copier, Piece, copier_for
from kvtierd.engines.vllm.identity import Identity
from kvtierd.engines.vllm.transfer import NO_SLOT, PoolSpec, Slots, WorkerReport

logger = logging.getLogger(__name__)
_workers: weakref.WeakSet[KvtierdWorker] = weakref.WeakSet()


def workers_of_this_process() -> int:
    """How many workers live here: they, not the scheduler, know when no copy of this process runs."""
    return len(_workers)


@dataclass(slots=True)
class _Job:
    """One of vLLM's transfers on its way; ``size`` in bytes, ``seconds`` once it is known.

    ``fail`` says what did not become of it.
    """

    job_id: int
    ticket: int
    size: int
    seconds: float | None
    fail: Callable[[], None]


class KvtierdWorker(OffloadingWorker):
    """One rank. ``session`` is ``None`` where no :class:`KvtierdConnector` bound the spec: it is inert."""

    def __init__(
        self,
        session: Any,
        identity: Identity | None,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        copier: Copier | None = None,
    ) -> None:
        self._session = session
        self._namespace = identity.layout.namespace() if identity is not None else ""
        self._rank = identity.rank if identity is not None else 0
        self._groups_by_index = (
            tuple(shape.group for shape in identity.shapes) if identity is not None else ()
        )
        self._blocks_per_chunk = blocks_per_chunk
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._pages = [cache.page_size_bytes for cache in kv_caches.tensors]
        self._starts = list(itertools.accumulate((p * blocks_per_chunk for p in self._pages), initial=0))
        self._parts = [_parts(refs) for refs in kv_caches.group_data_refs]
        self._copier = copier or copier_for(self._tensors[0].device)
        self._guard = Guard(logger)
        self._pool_id = ""
        self._rank_starts: list[int] = []
        self._acknowledged = 0
        self._running: dict[int, _Job] = {}
        self._held: dict[int, tuple[int, GPULoadStoreSpec, PoolSpec]] = {}
        self._fills: dict[int, Slots] = {}
        self._ended: list[_Job] = []
        self._bad_blocks: dict[int, set[int]] = {}
        self._load_errors: set[int] = set()
        self._failed_loads: set[int] = set()
        self._tickets: dict[int, int] = {}
        self._failed_keys: dict[int, set[bytes]] = {}
        self._recomputed = 0
        self._map()
        _workers.add(self)

    # -- vLLM's interface ---------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks into their slots; what cannot be copied is failed."""
        assert isinstance(dst_spec, PoolSpec)
        slots = self._fills.pop(dst_spec.ticket, None)
        if dst_spec.pending and slots is None:
            self._held[dst_spec.ticket] = (job_id, src_spec, dst_spec)
            return True
        if slots is not None:
            dst_spec.fill(slots)
        job = _Job(job_id, dst_spec.ticket, 0, 0.0, partial(self._fail_store, dst_spec))
        if all(slot == NO_SLOT for slot in dst_spec.slots):  # the daemon had them all, or had no room
            self._ended.append(job)
            return True
        plan = self._guard.call("store", lambda: self._plan(src_spec, dst_spec), None)
        self._start(job, None if plan is None else plan[0], self._copier.store)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy blocks out of their slots; what cannot be copied is reported for recomputing.

        ``expedited`` (vLLM 0.33) says that it is waited for within the step. Every load starts at once, so
        that changes nothing.
        """
        assert isinstance(src_spec, PoolSpec)
        whole = {int(block) for block in dst_spec.block_ids}
        job = _Job(job_id, src_spec.ticket, 0, 0.0, partial(self._bad_blocks.__setitem__, job_id, whole))
        plan = self._guard.call("load", lambda: self._plan(dst_spec, src_spec), None)
        if plan is not None and plan[1]:
            self._bad_blocks[job_id] = plan[1]
        self._start(job, None if plan is None else plan[0], self._copier.load)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Report ended transfers, always as a success."""
        nothing: Sequence[tuple[int, float, bool]] = ()
        for job_id, seconds, ok in self._guard.call("copy", self._copier.finished, nothing):
            job = self._running.pop(job_id)
            job.seconds = seconds
            if not ok:
                job.fail()
            self._ended.append(job)
        ended, self._ended = self._ended, []
        for job in ended:
            self._tickets[job.ticket] = self._tickets.get(job.ticket, 0) + 1
            if bad := self._bad_blocks.pop(job.job_id, None):
                self._load_errors |= bad
                self._recomputed += len(bad)
                self._failed_loads.add(job.job_id)
        if self._session is not None:
            self._guard.call("poll", self._answer_notices, None)
        return [TransferResult(job.job_id, True, job.size, job.seconds) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended; a store that has no slots yet is given up."""
        for job_id, _, spec in [held for held in self._held.values() if held[0] in job_ids]:
            del self._held[spec.ticket]
            self._failed_keys.setdefault(spec.ticket, set()).update(spec.keys)
            self._ended.append(_Job(job_id, spec.ticket, 0, 0.0, lambda: None))
        for job_id in job_ids & self._running.keys():
            self._guard.call("wait", lambda job_id=job_id: self._copier.wait(job_id), None)

    def shutdown(self) -> None:
        """End copies, let go of the pool, say goodbye."""
        _workers.discard(self)
        self._guard.call("unmap", self._copier.close, None)
        if self._session is not None:
            self._guard.call("close", self._session.close, None)

    # -- what the connector brings from the scheduler and takes to it -------------------------------------

    def take_fills(self, fills: dict[int, Slots]) -> None:
        """Begin stores whose slots have come; those of stores that vLLM has not submitted yet are kept."""
        for ticket, slots in fills.items():
            self._fills[ticket] = slots
            if (held := self._held.pop(ticket, None)) is not None:
                self.submit_store(*held)

    @property
    def has_failed_loads(self) -> bool:
        """Whether the next :meth:`get_finished` may have loads that failed."""
        return bool(self._bad_blocks or self._failed_loads)

    def take_load_errors(self) -> set[int]:
        """Block ids of ended loads that hold no loaded bytes; the last thing vLLM takes in a step."""
        errors, self._load_errors = self._load_errors, set()
        self._failed_loads.clear()
        return errors

    def take_failed_loads(self) -> set[int]:
        """Job ids of ended loads of which any block failed."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_report(self, base: OffloadingWorkerMetadata) -> WorkerReport:
        """Wrap vLLM's report: ended tickets, failed keys of stores, acknowledged revocations."""
        tickets, self._tickets = self._tickets, {}
        failed, self._failed_keys = self._failed_keys, {}
        recomputed, self._recomputed = self._recomputed, 0
        fences = {self._pool_id: self._acknowledged} if self._acknowledged else {}
        return WorkerReport(base.completed_jobs, base.transfer_stats, tickets, failed, fences, recomputed)

    # -- jobs ---------------------------------------------------------------------------------------------

    def _plan(self, engine: GPULoadStoreSpec, pool: PoolSpec) -> tuple[list[Piece], set[int]] | None:
        """Pair engine blocks with pool bytes; the second value are blocks without a slot.

        ``None``: the job is not for this worker's mapping, or its shape is not what was agreed on.
        """
        if not self._is_mapped(pool):
            return None
        pieces: list[Piece] = []
        missing: set[int] = set()
        slots = np.asarray(pool.slots, np.int64)
        used = 0
        for group, blocks, places in self._groups(engine):
            count = int(places[-1]) // self._blocks_per_chunk + 1
            own = slots[used : used + count]
            used += count
            if len(own) != count:
                return None
            of_block = own[places // self._blocks_per_chunk]
            there = of_block != NO_SLOT
            missing |= {int(block) for block in blocks[~there]}
            pieces += self._pieces(group, blocks[there], of_block[there], places[there])
        return (pieces, missing) if used == len(slots) else None

    def _groups(self, engine: GPULoadStoreSpec) -> Iterator[tuple[int, Any, Any]]:
        """Per cache group with blocks: its block ids, and each one's place counted from its first chunk."""
        ids, start = np.asarray(engine.block_ids, np.int64), 0
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if size:
                skip = first % self._blocks_per_chunk
                yield group, ids[start : start + size], np.arange(skip, skip + size)
            start += size

    def _pieces(self, group: int, blocks: Any, slots: Any, places: Any) -> Iterator[Piece]:
        within = places % self._blocks_per_chunk
        for sub in range(self._blocks_per_chunk):
            mask = within == sub
            if not mask.any():
                continue
            for tensor, nbytes in self._parts[group]:
                offset = self._rank_starts[group] + self._starts[tensor] + sub * self._pages[tensor]
                yield Piece(self._tensors[tensor], nbytes, blocks[mask], slots[mask] * UNIT + offset)

    def _start(
        self, job: _Job, pieces: Sequence[Piece] | None, copy: Callable[[int, Sequence[Piece]], None]
    ) -> None:
        """Begin a job's copies. Without pieces it has ended at once; ``None``: it is not for this mapping."""
        began = time.monotonic()

        def do() -> bool:
            if pieces:
                copy(job.job_id, pieces)
            return pieces is not None

        if not self._guard.call("copy", do, False):
            job.fail()
        elif pieces:
            job.size = sum(piece.nbytes * len(piece.blocks) for piece in pieces)
            job.seconds = time.monotonic() - began
            if self._copier.later:
                self._running[job.job_id] = job
                return
        self._ended.append(job)

    def _fail_store(self, spec: PoolSpec) -> None:
        given = [key for key, slot in zip(spec.keys, spec.slots, strict=True) if slot != NO_SLOT]
        self._failed_keys.setdefault(spec.ticket, set()).update(given)
        if self._session is not None:
            keys = tuple(map(BlockKey, given))
            self._guard.call("fail", lambda: self._session.fail(spec.job, keys), None)

    # -- the mapping --------------------------------------------------------------------------------------

    def _answer_notices(self) -> None:
        """Tell the daemon that nothing it revoked is being copied, once that is so."""
        if (fence := self._session.poll()) and not self._running:
            self._acknowledged = fence
            self._session.acknowledge()

    def _is_mapped(self, pool: PoolSpec) -> bool:
        """Whether a job's slots lie in the pool that this process maps now."""
        if self._session is None or not pool.pool_id or pool.namespace != self._namespace:
            return False
        if pool.pool_id != self._pool_id:
            self._map()
        return pool.pool_id == self._pool_id and pool.fence >= self._acknowledged

    def _map(self) -> None:
        """Follow the session to a new pool, if it has one (the daemon was restarted)."""
        if self._session is not None:
            self._guard.call("map", self._remap, None)

    def _remap(self) -> None:
        pool_id = self._session.pool_id
        if pool_id == self._pool_id:
            return
        self._pool_id = ""
        self._copier.unmap()
        if not pool_id:
            return
        offsets = self._session.rank_offsets
        self._rank_starts = [offsets[group][self._rank] for group in self._groups_by_index]
        self._copier.map(self._session.pool)
        self._pool_id, self._acknowledged = pool_id, 0


def _parts(refs: Sequence[Any]) -> list[tuple[int, int]]:
    """The (tensor index, bytes of a page) of one cache group; layers that share a tensor count once."""
    sizes: dict[int, int] = {}
    for ref in refs:
        sizes[ref.tensor_idx] = max(sizes.get(ref.tensor_idx, 0), ref.page_size_bytes)
    return list(sizes.items())

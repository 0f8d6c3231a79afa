# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""What travels between vLLM's scheduler and its workers about kvtierd's copy jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

NO_SLOT = -1


@dataclass
class PoolSpec(LoadStoreSpec):
    """Where the blocks of one copy job lie in the pool, in the order of the job's keys.

    ``slots[i]`` is a unit number, or ``NO_SLOT`` for a block that could not be had; ``generations[i]`` is
    its reservation. A worker copies only when ``pool_id`` and ``namespace`` are those of its own mapping.
    ``ticket`` is the scheduler's number of this job, ``job`` the daemon's (stores only). ``fence`` is the
    last revocation that the scheduler knew of when the slots were given: a worker that has acknowledged a
    later one has told the daemon that it copies nothing older, so it must not start this job any more.
    ``pending``: the slots follow in the metadata of a later step; until then nothing is copied.
    """

    ticket: int
    pool_id: str
    namespace: str
    fence: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    job: int = 0
    pending: bool = False

    def fill(self, slots: Slots) -> None:
        """Take the slots that the daemon gave."""
        self.pool_id, self.fence, self.job = slots.pool_id, slots.fence, slots.job
        self.slots, self.generations, self.pending = slots.slots, slots.generations, False


@dataclass
class Slots:
    """What a pending job was waiting for; fields as in :class:`PoolSpec`."""

    pool_id: str
    fence: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    job: int


@dataclass
class Metadata(OffloadingConnectorMetadata):
    """One step's metadata, with the slots of earlier steps' stores by ticket."""

    fills: dict[int, Slots] = field(default_factory=dict)

    @classmethod
    def of(cls, base: OffloadingConnectorMetadata, fills: dict[int, Slots]) -> Metadata:
        """Add fills to vLLM's own metadata, whatever fields that has."""
        return cls(**{each.name: getattr(base, each.name) for each in fields(base)}, fills=fills)


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """vLLM's own completion report, with what kvtierd's scheduler side must know beside it.

    ``tickets`` counts the workers that ended a job; ``failed`` names the keys of a store that any of them
    could not copy. It arrives together with the completions, so a commit never overtakes a failure, even
    when a worker's own connection to the daemon is gone. ``fences`` is the last acknowledged revocation by
    pool: slots that the scheduler is given from then on are newer than that. ``recomputed`` counts engine
    blocks that loads could not fill.
    """

    tickets: dict[int, int] = field(default_factory=dict)
    failed: dict[int, set[bytes]] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0

    def aggregate(self, other: OffloadingWorkerMetadata) -> WorkerReport:
        """Join the reports of two workers (or of two steps)."""
        joined = super().aggregate(other)
        tickets, fences, recomputed = dict(self.tickets), dict(self.fences), self.recomputed
        failed = {ticket: set(keys) for ticket, keys in self.failed.items()}
        if isinstance(other, WorkerReport):
            recomputed += other.recomputed
            for ticket, count in other.tickets.items():
                tickets[ticket] = tickets.get(ticket, 0) + count
            for ticket, keys in other.failed.items():
                failed.setdefault(ticket, set()).update(keys)
            for pool_id, fence in other.fences.items():
                fences[pool_id] = max(fences.get(pool_id, 0), fence)
        return WorkerReport(joined.completed_jobs, joined.transfer_stats, tickets, failed, fences, recomputed)

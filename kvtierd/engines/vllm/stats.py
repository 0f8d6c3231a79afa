# mypy: disable-error-code="import-not-found,import-untyped"
"""What kvtierd adds to vLLM's own metrics, through the stats that its connector reports anyway.

vLLM itself counts bytes, seconds and sizes of loads and stores (``vllm:kv_offload_*``). It turns what
:class:`Stats` reports into the metrics of :func:`definitions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvtierd.core.model import GROUP_BYTES
from kvtierd.engines.vllm.identity import Identity
from kvtierd.engines.vllm.transfer import WorkerReport

HIT_BLOCKS = "vllm:kvtierd_hit_blocks"
HIT_BYTES = "vllm:kvtierd_hit_bytes"
RECOMPUTED_BLOCKS = "vllm:kvtierd_recomputed_blocks"
UNSTORED_BLOCKS = "vllm:kvtierd_unstored_blocks"
ROUND_TRIPS = "vllm:kvtierd_round_trips"
WAIT_SECONDS = "vllm:kvtierd_wait_seconds"
UNANSWERED_CALLS = "vllm:kvtierd_unanswered_calls"
CONNECTED = "vllm:kvtierd_connected"


def definitions() -> dict[str, Any]:
    """Return vLLM's description of every metric."""
    counters = {
        HIT_BLOCKS: ("Blocks that loads asked for, by the tier that they came from.", ("tier",)),
        HIT_BYTES: ("Bytes of those blocks, over all ranks.", ("tier",)),
        RECOMPUTED_BLOCKS: ("Engine blocks that a load could not fill, counted by each worker.", ()),
        UNSTORED_BLOCKS: ("Blocks that a worker could not copy into the pool.", ()),
        ROUND_TRIPS: ("How often the scheduler waited for the daemon.", ()),
        WAIT_SECONDS: ("How long it waited in all.", ()),
        UNANSWERED_CALLS: ("Calls that ended without the daemon's answer.", ("reason",)),
    }
    made: dict[str, Any] = {
        name: OffloadingCounterMetadata(documentation=f"kvtierd: {text}", labelnames=labels)
        for name, (text, labels) in counters.items()
    }
    made[CONNECTED] = OffloadingGaugeMetadata(documentation="kvtierd: 1 while the daemon is connected.")
    return made


class Stats:
    """Counts until vLLM takes them; inert until bound."""

    def __init__(self) -> None:
        self._pipeline: Any = None
        self._block_bytes: tuple[int, ...] = ()
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._connected = -1
        self._glimpse: tuple[float, ...] = ()

    def bind(self, pipeline: Any, identity: Identity) -> None:
        """Report what this pipeline counts, too."""
        self._pipeline = pipeline
        layout = identity.layout
        self._block_bytes = tuple(group.block_bytes * layout.ranks for group in layout.groups)

    def load(self, sources: Iterable[tuple[bytes, str]]) -> None:
        """A load asks for these keys; beside each the tier that it came from, "" for the pool."""
        attached = self._pipeline.session.attached
        pool = attached.tiers[0] if attached is not None else "cpu"
        for key, source in sources:
            label = (source or pool,)
            self._counts[HIT_BLOCKS, label] += 1
            self._counts[HIT_BYTES, label] += self._block_bytes[int.from_bytes(key[-GROUP_BYTES:], "big")]

    def reported(self, report: WorkerReport) -> None:
        """Workers reported."""
        if report.recomputed:
            self._counts[RECOMPUTED_BLOCKS, ()] += report.recomputed
        if report.failed:
            self._counts[UNSTORED_BLOCKS, ()] += sum(map(len, report.failed.values()))

    def take(self) -> Any:
        """Return vLLM's stats since the last call, ``None`` when nothing happened."""
        if self._pipeline is None:
            return None
        pipeline, connected = self._pipeline, int(self._pipeline.session.connected)
        glimpse = (pipeline.round_trips, pipeline.waited, pipeline.misses.total(), connected)
        if glimpse == self._glimpse and not self._counts:
            return None  # asked in every step: most of them change nothing
        self._glimpse = glimpse
        counts, self._counts = self._counts, Counter()
        self._add_pipeline(counts)
        if not counts and connected == self._connected:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), value in counts.items():
            stats.increase_counter(name, value, labels)
        stats.set_gauge(CONNECTED, connected)
        self._connected = connected
        return stats

    def _add_pipeline(self, counts: Counter[tuple[str, tuple[str, ...]]]) -> None:
        """Add what the pipeline counted since the last time."""
        pipeline = self._pipeline
        now: Counter[tuple[str, tuple[str, ...]]] = Counter()
        now[ROUND_TRIPS, ()] = pipeline.round_trips
        now[WAIT_SECONDS, ()] = pipeline.waited
        for reason, count in pipeline.misses.items():
            now[UNANSWERED_CALLS, (str(reason),)] = count
        for name, total in now.items():
            if (grown := total - self._seen[name]) > 0:
                counts[name] += grown
        self._seen = now

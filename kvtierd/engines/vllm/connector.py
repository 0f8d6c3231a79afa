# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""The connector that vLLM loads: its own ``OffloadingConnector`` plus the four things that lacks.

vLLM's connector does the scheduling of loads and stores. This subclass lets the manager see the requests
(events must describe blocks), reports blocks that failed to load, and carries failed stores from the workers
to the manager.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtierd.client.pipeline import Pipeline
from kvtierd.core.stimuli import Role
from kvtierd.engines.vllm.identity import Identity
from kvtierd.engines.vllm.manager import KvtierdManager
from kvtierd.engines.vllm.spec import KvtierdOffloadingSpec, open_session
from kvtierd.engines.vllm.transfer import Metadata, WorkerReport
from kvtierd.engines.vllm.versions import KVConnectorTransferResults
from kvtierd.engines.vllm.worker import KvtierdWorker
from kvtierd.errors import ConfigError

logger = logging.getLogger(__name__)


class KvtierdConnector(OffloadingConnector):
    """KV offloading into a kvtierd daemon. ``kv_connector_extra_config`` needs ``kvtierd_socket``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_connector_extra_config.get("spec_name") != KvtierdOffloadingSpec.__name__:
            raise ConfigError(
                "kv_connector_extra_config: KvtierdConnector needs spec_name=KvtierdOffloadingSpec and"
                " spec_module_path=kvtierd.engines.vllm"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        if role == KVConnectorRole.SCHEDULER:
            self._bind_scheduler(vllm_config, kv_cache_config)
        else:
            self._bind_worker(vllm_config, kv_cache_config)

    def _bind_scheduler(self, vllm_config: Any, kv_cache_config: Any) -> None:
        # The scheduler reads this policy after it has made its connector. A cache that lost a block must cost
        # a recompute, and "fail" would end the request with an error.
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.info("kvtierd: setting kv_load_failure_policy=recompute")
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        spec = self._manager.spec
        identity = Identity.of(spec.settings, spec.config, vllm_config, kv_cache_config)
        self._manager.bind(Pipeline(open_session(spec.settings, identity, Role.SCHEDULER)), identity)

    def _bind_worker(self, vllm_config: Any, kv_cache_config: Any) -> None:
        assert self.connector_worker is not None
        spec = self.connector_worker.spec
        spec.bind(Identity.of(spec.settings, spec.config, vllm_config, kv_cache_config))

    @property
    def _manager(self) -> KvtierdManager:
        assert self.connector_scheduler is not None
        manager = self.connector_scheduler.manager
        assert isinstance(manager, KvtierdManager)
        return manager

    @property
    def _worker(self) -> KvtierdWorker | None:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        assert worker is None or isinstance(worker, KvtierdWorker)
        return worker

    # -- scheduler side -----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Let the manager see the request before vLLM asks about its blocks."""
        self._manager.track(request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Give the step's loads and stores their slots, which the daemon was asked for on the way."""
        meta = super().build_connector_meta(scheduler_output)
        return Metadata.of(meta, self._manager.fill(meta))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell the caller why its parameters were not followed."""
        return self._with_problem(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell the caller why its parameters were not followed."""
        return self._with_problem(request, super().request_finished_all_groups(request, block_ids))

    def _with_problem(
        self, request: Any, answer: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        if problem := self._manager.problem(request.request_id):
            return answer[0], {**(answer[1] or {}), "kvtierd_error": problem}
        return answer

    def update_connector_output(self, connector_output: Any) -> None:
        """Take failed keys before vLLM completes (and the manager commits) the jobs of the same report."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._manager.note_failures(report)
        if connector_output.invalid_block_ids or getattr(connector_output, "failed_recving", None):
            self._manager.loads_failed()
        super().update_connector_output(connector_output)
        if isinstance(report, WorkerReport):
            self._manager.settle_orphans(report)
            self._manager.flush()

    def reset_cache(self) -> bool | None:
        """Reset as often as one likes: vLLM asserts that it stepped since a reset that had jobs to flush."""
        scheduler = self.connector_scheduler
        assert scheduler is not None
        owed, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        try:
            done: bool | None = super().reset_cache()
        finally:
            scheduler._current_batch_jobs_to_flush |= owed
        return done

    # -- worker side --------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Take the slots that came with this step, before vLLM flushes jobs that waited for them."""
        self._take_fills(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the slots where no :meth:`handle_preemptions` was called first."""
        super().bind_connector_metadata(connector_metadata)
        self._take_fills(connector_metadata)

    def _take_fills(self, metadata: Any) -> None:
        worker = self._worker
        if worker is not None and isinstance(metadata, Metadata) and metadata.fills:
            fills, metadata.fills = metadata.fills, {}
            worker.take_fills(fills)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Add to vLLM's completion report what the manager must know."""
        report, worker = super().build_connector_worker_meta(), self._worker
        if report is None or worker is None:
            return report
        return worker.take_report(report)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to recompute. vLLM can place them only in models with one KV cache group."""
        worker = self._worker
        errors = worker.take_load_errors() if worker is not None else set()
        return errors if self._one_group else set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """With several cache groups a request with a failed block is recomputed as a whole."""
        worker = self._worker
        if worker is None or self._one_group or not worker.has_failed_loads:
            return super().get_transfer_results(finished_req_ids)
        assert self.connector_worker is not None
        requests = dict(self.connector_worker._load_jobs)  # vLLM forgets them in the call below
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {requests[job] for job in worker.take_failed_loads() if requests.get(job)}
        return results

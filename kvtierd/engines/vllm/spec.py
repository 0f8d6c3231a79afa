# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""vLLM's ``OffloadingSpec``: makes the scheduler's manager and each worker's copier."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker

from kvtierd.client import Client, Session
from kvtierd.core.stimuli import Role
from kvtierd.engines.vllm import stats
from kvtierd.engines.vllm.identity import Identity
from kvtierd.engines.vllm.manager import KvtierdManager
from kvtierd.engines.vllm.settings import Settings
from kvtierd.engines.vllm.worker import KvtierdWorker

logger = logging.getLogger(__name__)


def open_session(settings: Settings, identity: Identity, role: Role) -> Session:
    """Connect and attach; a daemon that is not there yet is found later, by the session itself.

    So is one that refuses this engine now, and takes it after an upgrade or when others have left. That is
    logged; meanwhile the engine runs without cache.
    """
    session = Client(settings.socket, deadline=settings.deadline).attach(
        identity.layout,
        engine_id=identity.engine_id,
        dp_rank=identity.dp_rank,
        role=role,
        rank=identity.rank,
        wait=settings.attach_timeout,
        patient=True,
    )
    if session.refused is not None:
        logger.error(
            "kvtierd: the daemon refuses this engine, which runs without cache and tries again: %s",
            session.refused,
        )
    return session


class KvtierdOffloadingSpec(OffloadingSpec):
    """Use it through :class:`KvtierdConnector`, which binds what it makes; unbound it stores nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = Settings.of(self.extra_config)
        self._identity: Identity | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Describe what the manager reports beside vLLM's own metrics."""
        return {**super().build_metric_definitions(extra_config), **stats.definitions()}

    def bind(self, identity: Identity) -> None:
        """Say who this process is; before :meth:`get_worker`."""
        self._identity = identity

    def get_manager(self) -> OffloadingManager:
        """Make the scheduler side; it is inert until it is bound."""
        return KvtierdManager(self)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker side over its own session with the daemon."""
        if self._identity is None:
            logger.warning("kvtierd: without kv_connector=KvtierdConnector nothing is stored or loaded")
            return KvtierdWorker(None, None, kv_caches, self.blocks_per_chunk)
        session = open_session(self.settings, self._identity, Role.WORKER)
        return KvtierdWorker(session, self._identity, kv_caches, self.blocks_per_chunk)

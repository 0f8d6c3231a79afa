"""From a tier of the tier file to its backend and to what the core has to know of it."""

from __future__ import annotations

from collections.abc import Mapping

from kvtierd.config.schema import FsTier, PluginTier, StorageTier
from kvtierd.core.model import Medium
from kvtierd.core.policies import POLICIES
from kvtierd.core.tier import TierSpec
from kvtierd.edges.backends.base import Backend, Probing, Reserving
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.fs_tree import BLOCKS, is_namespace
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.edges.backends.object_tier import make_object_backend
from kvtierd.edges.backends.registry import make_added


def make_backend(tier: StorageTier) -> Backend:
    """Return the tier's backend, not opened yet.

    Raises:
        ConfigError: its type is a package's, and that cannot be used.
    """
    if isinstance(tier, FsTier):
        return FsBackend(
            tier.name,
            tier.path,
            io=tier.io,
            fsync=tier.fsync,
            pack_below=tier.pack_below,
            shared=tier.shared,
            min_free=tier.min_free,
            lock_wait=0.0,  # whoever opens it tries again
        )
    if isinstance(tier, PluginTier):
        return make_added(tier.name, tier.type, tier.options)
    if tier.url.startswith("memory://"):
        return MemoryBackend(tier.name)
    return make_object_backend(tier)


def holds_blocks(tier: StorageTier) -> bool:
    """Say whether a quick look at the tier's storage shows that there was, or may have been, an earlier run.

    Touches the storage, so that it may hang.
    """
    if not isinstance(tier, FsTier):
        return False
    try:
        return any(is_namespace(path.name) for path in (tier.path / BLOCKS).iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def make_spec(
    tier: StorageTier, backend: Backend, pool_bytes: int, shares: Mapping[str, int] | None = None
) -> TierSpec:
    """Return what the core has to know of a tier; its storage is not touched.

    What the backend occupies besides its blocks is taken off the capacity; a tier's writes pin at most half
    of the pool, however slow it is. ``shares``: bytes by tenant.
    """
    capacity = tier.max_bytes if isinstance(tier.max_bytes, int) else None
    if capacity is not None and isinstance(backend, Reserving):
        capacity = max(0, capacity - backend.reserve(capacity))
    return TierSpec(
        name=tier.name,
        medium=Medium.STORAGE,
        locality=tier.locality,
        events=tier.events,
        policy=POLICIES[tier.policy],
        capacity=capacity,
        budget=max(1, min(tier.inflight_bytes, pool_bytes // 2)),
        estimate=backend.estimate,
        ttl=tier.ttl,
        max_load_time=tier.max_load_time,
        shares=shares or {},
        on_evict=tier.demote == "on_evict",
        shared=tier.shared and isinstance(backend, Probing),
    )

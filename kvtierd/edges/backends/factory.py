"""From a tier of the tier file to its backend."""

from __future__ import annotations

from kvtierd.config.schema import FsTier, ObjectTier
from kvtierd.edges.backends.base import Backend
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.memory import MemoryBackend


def make_backend(tier: FsTier | ObjectTier) -> Backend:
    """Return the tier's backend, not opened yet."""
    if isinstance(tier, FsTier):
        return FsBackend(tier.name, tier.path)
    return MemoryBackend(tier.name)

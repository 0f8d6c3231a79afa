"""Eviction policies, one file each, by the names that the tier file uses."""

from __future__ import annotations

from kvtierd.core.policies.arc import Arc
from kvtierd.core.policies.auto import Auto
from kvtierd.core.policies.base import Policy
from kvtierd.core.policies.lru import Lru
from kvtierd.core.policies.s3fifo import S3Fifo

POLICIES: dict[str, type[Policy]] = {"auto": Auto, "lru": Lru, "s3fifo": S3Fifo, "arc": Arc}
"""Each is called without arguments and adapts to however many blocks it finds itself with."""

__all__ = ["POLICIES", "Arc", "Auto", "Lru", "Policy", "S3Fifo"]

# mypy: disable-error-code="import-not-found,import-untyped"
"""Where vLLM 0.26 to 0.33 differ in what the glue uses, and why; no other module asks for a version.

``tests/golden/vllm_surface.json`` lists the whole surface of every one of these versions, taken from their
released packages; the tests hold the glue against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from vllm.version import __version__ as RUNNING

from kvtierd.errors import ConfigError

__all__ = [
    "CAN_FAIL_REQUESTS",
    "HAS_FIXED_SEED",
    "SALTS_MAY_NAME_ADAPTERS",
    "VERSION",
    "CacheHitSource",
    "KVConnectorTransferResults",
    "group_id",
    "kv_cache_layout",
    "refuse_unsafe",
    "supported",
    "to_event_extra_keys",
]

OLDEST = (0, 26)
"""0.25 makes its ``OffloadingSpec`` of other arguments and counts slots otherwise."""
NEWEST = (0, 33)
"""The newest release whose surface was compared; a later one may have moved anything."""


def supported(version: str) -> tuple[int, int]:
    """Return the minor version that a vLLM version string belongs to.

    Raises:
        ConfigError: it is none that this glue was held against.
    """
    head = version.split("+")[0].split(".")[:2]
    minor = tuple(int(part) for part in head if part.isdigit())
    if len(minor) == 2 and OLDEST <= minor <= NEWEST:
        return minor[0], minor[1]
    raise ConfigError(
        f"kvtierd's vLLM connector works with vLLM {_name(OLDEST)} to {_name(NEWEST)}, this is {version}:"
        " install one of those, or a kvtierd that knows it"
    )


def _name(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"


VERSION = supported(RUNNING)

# 0.30 lets a connector fail a whole request's load. Before, it could only name block ids, which vLLM cannot
# place in models with several KV cache groups: a lost block would have been read as if it were loaded.
CAN_FAIL_REQUESTS = VERSION >= (0, 30)
if CAN_FAIL_REQUESTS:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
else:
    KVConnectorTransferResults = Any

# 0.31 tags the extra keys of block hashes. Before, those of a request with nothing but a salt were those of a
# request with nothing but an adapter of that name: whoever chose his salt well read and wrote its blocks.
SALTS_MAY_NAME_ADAPTERS = VERSION < (0, 31)

# It has a function that takes the tags off for events.
if VERSION >= (0, 31):
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys
else:

    def to_event_extra_keys(extra_keys: Sequence[Any] | None) -> list[Any] | None:
        """Return them as they are: they had no tags."""
        return list(extra_keys) if extra_keys else None


# 0.32 asks managers where a hit came from; before, nobody calls what uses it.
if VERSION >= (0, 32):
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:

    class CacheHitSource(StrEnum):  # type: ignore[no-redef]
        """The members that the glue names."""

        HOST = "host"
        DISK = "disk"


# 0.29 gave cryptographic block hashes a fixed seed. Before, it is drawn at every start unless PYTHONHASHSEED
# is set, so that two engines share nothing.
HAS_FIXED_SEED = VERSION >= (0, 29)


def group_id(group: Any, index: int) -> int:
    """Return a group's number among the KV cache's: 0.30 can leave groups out and says which it means."""
    return int(getattr(group, "group_id", index))


def kv_cache_layout(offloading: Any, kv_cache_config: Any) -> str:
    """Return the name of the order of a block's bytes.

    0.29 standardised and named them. Before, the order depended on platform, backend and version, so bytes
    are shared within one minor version only.
    """
    if VERSION < (0, 29):
        return f"vllm-{_name(VERSION)}"
    return str(offloading.kv_cache_layout or kv_cache_config.kv_cache_layout or "")


def refuse_unsafe(offloading: Any, groups: int) -> None:
    """Refuse what this version cannot do without a risk of wrong bytes.

    Raises:
        ConfigError: says what to change.
    """
    if getattr(offloading, "canonical_layout", False):  # 0.28
        raise ConfigError("kvtierd stores the workers' own layout: unset canonical_layout")
    if groups == 1:
        return
    if not CAN_FAIL_REQUESTS:
        raise ConfigError(
            f"this model has {groups} KV cache groups, for which vLLM {RUNNING} cannot recompute a block"
            " that failed to load: use vLLM 0.30 or later, or --disable-hybrid-kv-cache-manager"
        )
    if offloading.extra_config.get(
        "sync_load_budget_bytes"
    ):  # 0.33: no answer for such a load but "block ids"
        raise ConfigError(
            f"this model has {groups} KV cache groups, for which a failed synchronous load cannot be"
            " recomputed: unset sync_load_budget_bytes"
        )

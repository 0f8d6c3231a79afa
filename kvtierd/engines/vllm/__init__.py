"""vLLM glue: ``KvtierdConnector`` and ``KvtierdOffloadingSpec`` (vLLM 0.26 to 0.33).

Used by name in ``--kv-transfer-config``; imported by vLLM's processes only, never by the daemon. The two are
imported when they are asked for, so that the copies of :mod:`kvtierd.engines.vllm.streams` can be run where
there is no vLLM.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtierd.engines.vllm.connector import KvtierdConnector
    from kvtierd.engines.vllm.spec import KvtierdOffloadingSpec

__all__ = ["KvtierdConnector", "KvtierdOffloadingSpec"]

_HOMES = {"KvtierdConnector": "connector", "KvtierdOffloadingSpec": "spec"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.versions")  # first: it refuses a vLLM on which the rest breaks
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

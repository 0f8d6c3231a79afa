"""vLLM glue: ``KvtierdConnector`` and ``KvtierdOffloadingSpec`` (vLLM 0.26 to 0.33).

Used by name in ``--kv-transfer-config``; imported by vLLM's processes only, never by the daemon.
"""

from kvtierd.engines.vllm import versions  # noqa: F401 - first: it refuses a vLLM on which the rest breaks
from kvtierd.engines.vllm.connector import KvtierdConnector
from kvtierd.engines.vllm.spec import KvtierdOffloadingSpec

__all__ = ["KvtierdConnector", "KvtierdOffloadingSpec"]

"""SGLang glue: ``KvtierdStorage``, a HiCache storage backend over a kvtierd daemon.

Used by name in ``--hicache-storage-backend dynamic``; imported by SGLang's processes only. What it does and
what it cannot do is in ``SGLANG.md`` beside it.
"""

from kvtierd.engines.sglang.storage import KvtierdStorage

__all__ = ["KvtierdStorage"]

"""What the checks of the SGLang backend share: host pools, backends, the controller's own code, names."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import sglang_stubs  # noqa: F401 - before anything of SGLang
import torch
from sglang.srt.managers.cache_controller import HiCacheController, StorageOperation
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE, LAYERS, HEADS, DIM = 16, 3, 2, 8
TOKENS = 64 * PAGE
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def host_pool(layout="layer_first"):
    """SGLang's host pool of a tiny model, filled with random numbers."""
    shape = (PAGE, HEADS, DIM)
    k, v = (tuple(torch.zeros(shape) for _ in range(LAYERS)) for _ in range(2))
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    tables = {"k_data_ptrs": pointers, "v_data_ptrs": pointers}
    buffers = KVBuffers(k=k, v=v, **tables, layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
    )
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(3)))
    return pool


def backend(rig, pool, *, v1=1, model="tiny", mla=False, rank=0, **extra):
    """The backend as SGLang makes it for ``--hicache-storage-backend dynamic``."""
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first",
        model_name=model,
        extra_config={
            "backend_name": "kvtierd",
            "module_path": "kvtierd.engines.sglang",
            "class_name": "KvtierdStorage",
            "interface_v1": v1,
            "kvtierd_socket": rig.daemon.socket,
            "kvtierd_deadline": 2.0,
            **extra,
        },
    )
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    for pages in made._pages.values():
        if pages.reader is not None:
            rig.layouts.add(pages.layout)
    return made


class Controller(SimpleNamespace):
    """SGLang's own code between its queues and a backend, without the GPU around it."""

    _page_get_zero_copy = HiCacheController._page_get_zero_copy
    _page_set_zero_copy = HiCacheController._page_set_zero_copy
    _generic_page_get = HiCacheController._generic_page_get
    _generic_page_set = HiCacheController._generic_page_set
    _page_backup = HiCacheController._page_backup

    def __init__(self, made, pool, *, v1=True):
        super().__init__(storage_backend=made, storage_host_pool=pool, page_size=PAGE)
        self.page_get_func = self._page_get_zero_copy if v1 else self._generic_page_get
        self.page_set_func = self._page_set_zero_copy if v1 else self._generic_page_set

    def backup(self, names, first=0, prefix=None):
        """Write pages ``first`` and on; returns how many tokens were written."""
        indices = torch.arange(first * PAGE, (first + len(names)) * PAGE)
        operation = StorageOperation(indices, [], hash_value=names, prefix_keys=prefix)
        self._page_backup(operation)
        return operation.completed_tokens

    def fetch(self, names, first):
        """Read pages into place ``first`` and on; returns how many."""
        indices = torch.arange(first * PAGE, (first + len(names)) * PAGE)
        return self.page_get_func(operation(), names, indices, HiCacheStorageExtraInfo())


def operation():
    """What SGLang's controller knows of one read."""
    return SimpleNamespace(request_id="r", is_terminated=lambda: False, increment=lambda tokens: True)


def names_of(count, seed="chain"):
    """Names of a chain of pages, as SGLang makes them: SHA-256 in hex over the one before."""
    made, last = [], seed.encode()
    for number in range(count):
        last = hashlib.sha256(last + number.to_bytes(4, "little")).digest()
        made.append(last.hex())
    return made


def pages(pool, first, count):
    return [pool.get_data_page((first + number) * PAGE).clone() for number in range(count)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

"""Checks of the SGLang backend with other host pools, alone and beside the main one (interface v2)."""

from __future__ import annotations

import sglang_rig  # first: it stands in for what SGLang imports and does not need
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    count_pool_hits,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang_rig import LAYERS, PAGE, TOKENS, Controller, backend, host_pool, names_of, pages, same

from kvtierd.engines.sglang.pages import to_event_hash

LATENT, ROPE = 24, 8
STATES = 64


def mla_pool(layout):
    """SGLang's host pool of a model with latent attention, filled with random numbers."""
    width = LATENT + ROPE
    info = MLABufferInfo(
        buffers=tuple(torch.zeros(PAGE, 1, width) for _ in range(LAYERS)),
        data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=width,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool = MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
        target_layer_num=LAYERS,
    )
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(5)))
    return pool


def mamba_pool():
    """SGLang's host pool of recurrent states: one a page, of two parts with types of their own."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, STATES, 2, 6, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, STATES, 5, 3, dtype=torch.bfloat16),),
    )
    pool = MambaPoolHost(info, 1.0, 0, device_capacity=STATES, pin_memory=False, layout="page_first")
    generator = torch.Generator().manual_seed(7)
    for state in range(STATES):
        page = pool.get_dummy_flat_data_page()
        page.copy_(torch.randint(0, 100, page.shape, generator=generator).to(page.dtype))
        pool.set_from_flat_data_page(state, page)
    return pool


def check_pages_of_latent_attention_come_back_as_they_were_for_every_rank(rig):
    for layout in ("layer_first", "page_first", "page_first_direct"):
        pool, names = mla_pool(layout), names_of(12, f"mla {layout}")
        writer, reader = backend(rig, pool, mla=True), backend(rig, pool, mla=True, rank=1)
        assert Controller(writer, pool).backup(names) == 12 * PAGE
        assert reader.batch_exists(names) == 12
        before = pages(pool, 0, 12)
        pool.kv_buffer.zero_()
        assert Controller(reader, pool).fetch(names, 20) == 12
        assert same(pages(pool, 20, 12), before), layout
        rig.agree()
        writer.clear()
        writer.close()
        reader.close()


def several(rig, **extra):
    """A backend with the main pool, an indexer's that has a page for each of it, and one of states."""
    pools = {
        PoolName.KV: host_pool(),
        PoolName.INDEXER: mla_pool("layer_first"),
        PoolName.MAMBA: mamba_pool(),
    }
    made = backend(rig, pools[PoolName.KV], **extra)
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    for each in made._pages.values():
        rig.layouts.add(each.layout)
    return made, pools


def transfer(name, names, first, *, page=PAGE, policy=PoolHitPolicy.ALL_PAGES):
    indices = torch.arange(first * page, (first + len(names)) * page)
    return PoolTransfer(name=name, host_indices=indices, keys=names, hit_policy=policy)


def state(names, first, policy=PoolHitPolicy.TRAILING_PAGES):
    return transfer(PoolName.MAMBA, names, first, page=1, policy=policy)


def check_pages_of_several_pools_come_back_each_as_it_was(rig):
    made, pools = several(rig)
    names = names_of(6, "several")
    controller = Controller(made, pools[PoolName.KV])
    controller.backup(names)
    stored = made.batch_set_v2([transfer(PoolName.INDEXER, names, 0), state(names[-1:], 5)])
    assert count_pool_hits(stored) == {PoolName.INDEXER: 6, PoolName.MAMBA: 1}
    before = {name: pages(pools[name], 0, 6) for name in (PoolName.KV, PoolName.INDEXER)}
    last = pools[PoolName.MAMBA].get_data_page(5).clone()
    assert controller.fetch(names, 20) == 6
    loaded = made.batch_get_v2([transfer(PoolName.INDEXER, names, 20), state(names[-1:], 40)])
    assert count_pool_hits(loaded) == {PoolName.INDEXER: 6, PoolName.MAMBA: 1}
    for name, old in before.items():
        assert same(pages(pools[name], 20, 6), old), name
    assert torch.equal(pools[PoolName.MAMBA].get_data_page(40), last)
    rig.agree()
    made.clear()
    assert made.batch_exists_v2(names, [state(names[-1:], 0)]).kv_hit_pages == 0
    made.close()


def check_a_prefix_counts_as_far_as_every_pool_can_restore_it(rig):
    made, pools = several(rig)
    names = names_of(8, "prefix")
    Controller(made, pools[PoolName.KV]).backup(names[:7])
    made.batch_set_v2([transfer(PoolName.INDEXER, names[:6], 0), state(names[2:3], 2), state(names[4:5], 4)])
    indexer = PoolTransfer(name=PoolName.INDEXER)

    def window(count):
        trailing = PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(name=PoolName.MAMBA, keys=names[:count], hit_policy=trailing)

    for transfers, expected, restorable in (
        ([], 7, [1, 2, 3, 4, 5, 6, 7]),
        ([indexer], 6, [1, 2, 3, 4, 5, 6]),
        ([window(1)], 5, [3, 5]),
        ([indexer, window(1)], 5, [3, 5]),
        ([window(2)], 0, []),
        ([PoolTransfer(name=PoolName.SWA)], 0, []),
    ):
        found = made.batch_exists_v2(names, transfers)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (expected, restorable), transfers
    assert made.batch_exists_v2(names, [indexer]).extra_pool_hit_pages == {
        PoolName.KV: 7,
        PoolName.INDEXER: 6,
    }
    made.clear()
    made.close()


def check_the_controllers_own_code_clamps_a_read_to_what_both_pools_have(rig):
    made, pools = several(rig)
    names = names_of(6, "clamped")
    controller = Controller(made, pools[PoolName.KV])
    controller.backup(names)
    made.batch_set_v2([transfer(PoolName.INDEXER, names[:4], 0)])
    indices, operation = torch.arange(20 * PAGE, 26 * PAGE), sglang_rig.operation()
    derived = [PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV)]
    read = HiCacheController._page_transfer_kv_batch
    assert read(controller, operation, names, indices, HiCacheStorageExtraInfo(), derived) == 4
    assert same(pages(pools[PoolName.INDEXER], 20, 4), pages(pools[PoolName.INDEXER], 0, 4))
    made.clear()
    made.close()


def check_pools_of_one_engine_are_told_apart_in_events_and_places_that_do_not_fit_are_refused(rig):
    made, pools = several(rig)
    names = names_of(2, "told")
    rig.settle()
    rig.router.batches.clear()
    Controller(made, pools[PoolName.KV]).backup(names)
    made.batch_set_v2([transfer(PoolName.INDEXER, names, 0), state(names[1:], 1)])
    rig.agree()
    stored = [e for e in rig.router.events if e.medium == "CPU" and hasattr(e, "token_ids")]
    told = [(list(PoolName)[e.group_idx], e.block_hashes[0]) for e in stored]
    first, second = map(to_event_hash, names)
    kv, indexer = PoolName.KV, PoolName.INDEXER
    assert told == [(kv, first), (kv, second), (indexer, first), (indexer, second), (PoolName.MAMBA, second)]
    short = PoolTransfer(name=PoolName.INDEXER, keys=names, host_indices=torch.arange(PAGE))
    assert made.batch_get_v2([short]) == made.batch_set_v2([short]) == {PoolName.INDEXER: [False, False]}
    made.clear()
    made.close()

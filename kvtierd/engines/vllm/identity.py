# mypy: disable-error-code="import-not-found,import-untyped"
"""Who an engine is to the daemon: the layout that names its bytes, and the shape of its cache groups.

Scheduler and workers compute the same layout from the same configuration, each in its own process; the
layout's digest travels with every copy job, so a difference is found before a byte is copied.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvtierd.core.model import Group, Layout
from kvtierd.engines.vllm import versions
from kvtierd.engines.vllm.settings import Settings
from kvtierd.errors import ConfigError

# vLLM's fixed seed of the first block's parent for cryptographic hashes (kv_cache_utils, >= 0.29).
_DEFAULT_SEED = "vllm-none-hash"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How one KV cache group is cut into blocks of the daemon (vLLM calls those chunks)."""

    group: int
    tokens_per_block: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    full_attention: bool
    spec_kind: str | None
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class Identity:
    """One engine process's name and geometry.

    ``salts_collide``: a request that has a salt and no adapter must not use the cache, for its salt may be
    the name of an adapter (:data:`versions.SALTS_MAY_NAME_ADAPTERS`).
    """

    layout: Layout
    engine_id: str
    dp_rank: int
    rank: int
    shapes: tuple[GroupShape, ...]
    salts_collide: bool = False

    @classmethod
    def of(cls, settings: Settings, offloading: Any, vllm_config: Any, kv_cache_config: Any) -> Identity:
        """Describe this process (``offloading``: vLLM's ``OffloadingConfig``).

        Raises:
            ConfigError: the engine is configured for something the glue cannot do.
        """
        versions.refuse_unsafe(offloading, len(kv_cache_config.kv_cache_groups))
        if offloading.worker_kv_bytes_per_block <= 0:
            raise ConfigError("kvtierd: this KV cache configuration has no fixed bytes per block")
        return cls(
            layout=_layout(settings, offloading, vllm_config, kv_cache_config),
            engine_id=offloading.engine_id,
            dp_rank=offloading.parallel.data_parallel_index,
            rank=offloading.parallel.rank,
            shapes=tuple(
                _shape(offloading, group, versions.group_id(group, index), kv_cache_config)
                for index, group in enumerate(offloading.groups)
            ),
            salts_collide=_salts_collide(vllm_config),
        )


def _salts_collide(vllm_config: Any) -> bool:
    return versions.SALTS_MAY_NAME_ADAPTERS and vllm_config.lora_config is not None


def _shape(offloading: Any, group: Any, number: int, kv_cache_config: Any) -> GroupShape:
    spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
    chunk_tokens = group.tokens_per_block * offloading.cache.blocks_per_chunk
    return GroupShape(
        group=number,
        tokens_per_block=group.tokens_per_block,
        blocks_per_chunk=offloading.cache.blocks_per_chunk,
        hashes_per_chunk=chunk_tokens // offloading.cache.tokens_per_hash,
        full_attention=isinstance(spec, FullAttentionSpec),
        spec_kind=get_kv_cache_spec_kind(spec).value,
        sliding_window=get_kv_cache_spec_sliding_window(spec),
    )


def _layout(settings: Settings, offloading: Any, vllm_config: Any, kv_cache_config: Any) -> Layout:
    """Gather everything that changes a block's bytes; what a worker sees differently per rank stays out."""
    model, parallel = vllm_config.model_config, offloading.parallel
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return Layout(
        model=offloading.model.name,
        revision=_tag(model.revision, settings.weights_id, model.quantization, model.hf_overrides or None),
        dtype=f"{model.dtype}/{offloading.model.dtype}",
        layout=_tag(
            "vllm",
            current_platform.device_type,
            versions.kv_cache_layout(offloading, kv_cache_config),
            vllm_config.attention_config.backend,
            f"tp{parallel.tp_size}.pp{parallel.pp_size}.pcp{parallel.pcp_size}.dcp{parallel.dcp_size}",
            f"hash{offloading.cache.tokens_per_hash}",
            settings.layout_tag,
            *(
                ["lora"] if _salts_collide(vllm_config) else []
            ),  # salts of engines without are no danger there
        ),
        groups=_groups(offloading),
        ranks=parallel.world_size,
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm, offloading.engine_id),
        tenant=settings.tenant,
    )


def _tag(*parts: object) -> str:
    return "/".join("" if part is None else str(part) for part in parts)


def _groups(offloading: Any) -> tuple[Group, ...]:
    """One entry per KV cache group number up to the largest offloaded one.

    vLLM lays all groups over the same tensors, so a block of any group takes at most the bytes of all
    tensors' pages; with one group that is exact. Numbers in between that are not offloaded are never asked
    for and get the smallest entry.
    """
    block_bytes = offloading.worker_kv_bytes_per_block * offloading.cache.blocks_per_chunk
    tokens = {
        versions.group_id(group, index): group.tokens_per_block * offloading.cache.blocks_per_chunk
        for index, group in enumerate(offloading.groups)
    }
    return tuple(
        Group(tokens_per_block=tokens[g], block_bytes=block_bytes)
        if g in tokens
        else Group(tokens_per_block=1, block_bytes=1)
        for g in range(max(tokens) + 1)
    )


def _hash_seed(algorithm: str, engine_id: str) -> str:
    """Return what seeds the hash chain; without a shared seed the namespace is this engine's own."""
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        return seed
    if versions.HAS_FIXED_SEED and algorithm.startswith("sha256"):
        return _DEFAULT_SEED
    return f"random:{engine_id}"

# mypy: disable-error-code="import-not-found,import-untyped"
"""One request's chains of block keys, and what its blocks' events must say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)

from kvtierd.core.model import BlockKey, BlockMeta
from kvtierd.engines.vllm.identity import GroupShape
from kvtierd.engines.vllm.versions import to_event_extra_keys

GROUP_BYTES = 4


def to_block_key(key: bytes) -> BlockKey:
    """Convert vLLM's ``OffloadKey`` (block hash, then 4 bytes of group number, big endian)."""
    return BlockKey(key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big"))


def to_offload_key(key: BlockKey) -> bytes:
    """Convert back to vLLM's ``OffloadKey``."""
    return key.hash + key.group.to_bytes(GROUP_BYTES, "big")


class Chain:
    """A live request's keys per group, in prefix order; grows with the request's block hashes."""

    def __init__(self, request: Any, shapes: Sequence[GroupShape]) -> None:
        self._request = request
        self._shapes = {shape.group.to_bytes(GROUP_BYTES, "big"): shape for shape in shapes}
        self._keys: dict[bytes, list[bytes]] = {suffix: [] for suffix in self._shapes}
        self._place: dict[bytes, int] = {}

    def all(self) -> list[bytes]:
        """All keys of all groups, each group root first."""
        self._grow()
        return [key for keys in self._keys.values() for key in keys]

    def asked_with(self, key: bytes) -> list[bytes]:
        """The keys that a lookup of ``key`` should ask for in one go.

        A full attention group is looked up from the first block that the engine lacks to the end; other
        groups from the end backwards, so there it is the whole chain. A key outside the chains (a partial
        tail) is asked for alone.
        """
        place = self._find(key)
        if place is None:
            return [key]
        suffix = key[-GROUP_BYTES:]
        start = place if self._shapes[suffix].full_attention else 0
        return self._keys[suffix][start:]

    def meta(self, key: bytes) -> BlockMeta | None:
        """What the block's event says, field by field as vLLM's own GPU events say it; ``None``: unknown."""
        place = self._find(key)
        if place is None:
            return None
        shape, hashes = self._shapes[key[-GROUP_BYTES:]], self._request.block_hashes
        first_block = place * shape.blocks_per_chunk
        per_block = shape.hashes_per_chunk // shape.blocks_per_chunk
        first_hash = place * shape.hashes_per_chunk
        ends = range(first_hash + per_block - 1, first_hash + shape.hashes_per_chunk, per_block)
        start = first_block * shape.tokens_per_block
        end = start + shape.blocks_per_chunk * shape.tokens_per_block
        lora = self._request.lora_request
        return BlockMeta(
            hashes=tuple(maybe_convert_block_hash(hashes[i]) for i in ends),
            parent=maybe_convert_block_hash(hashes[first_hash - 1]) if first_hash else None,
            token_ids=tuple(self._request.all_token_ids[start:end]),
            block_size=shape.tokens_per_block,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=self._extra_keys(start, end, shape.tokens_per_block),
            spec_kind=shape.spec_kind,
            sliding_window=shape.sliding_window,
        )

    def _extra_keys(self, start: int, end: int, step: int) -> tuple[tuple[object, ...] | None, ...] | None:
        per_block = [
            generate_block_hash_extra_keys(self._request, block, block + step, 0)[0]
            for block in range(start, end, step)
        ]
        public = to_event_extra_keys(per_block)
        return None if public is None else tuple(public)

    def _find(self, key: bytes) -> int | None:
        place = self._place.get(key)
        if place is None:
            self._grow()
            place = self._place.get(key)
        return place

    def _grow(self) -> None:
        hashes = self._request.block_hashes
        for suffix, shape in self._shapes.items():
            keys, step = self._keys[suffix], shape.hashes_per_chunk
            for place in range(len(keys), len(hashes) // step):
                key = hashes[(place + 1) * step - 1] + suffix
                keys.append(key)
                self._place[key] = place

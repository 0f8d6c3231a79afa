# mypy: disable-error-code="import-not-found,import-untyped"
"""One request's chains of block keys, and what its blocks' events must say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)

from kvtierd.core.model import GROUP_BYTES, BlockKey, BlockMeta
from kvtierd.engines.vllm.identity import GroupShape
from kvtierd.engines.vllm.versions import to_event_extra_keys


class Chain:
    """A live request's keys per group, in prefix order; grows with the request's block hashes.

    ``cap`` below is a number of tokens, ``None`` for no bound: a block that ends behind it is left out.
    """

    def __init__(self, request: Any, shapes: Sequence[GroupShape]) -> None:
        self._request = request
        self._shapes = {shape.group.to_bytes(GROUP_BYTES, "big"): shape for shape in shapes}
        self._keys: dict[bytes, list[BlockKey]] = {suffix: [] for suffix in self._shapes}
        self._place: dict[bytes, int] = {}
        self._hashes_seen = 0
        self._tells_numbers: bool | None = None

    def all(self, cap: int | None = None) -> list[BlockKey]:
        """All keys of all groups, each group root first. The daemon's key is vLLM's ``OffloadKey``."""
        self._grow()
        return [key for suffix, keys in self._keys.items() for key in keys[: self._count(suffix, cap)]]

    def run(self, key: bytes, wanted: Callable[[bytes], bool]) -> list[BlockKey]:
        """The keys that vLLM needs together with ``key``, as far as they are ``wanted`` without a gap.

        A full attention group is looked up from the first block that the engine lacks to the end. Other
        groups are looked up from their last block backwards, until a window is full.
        """
        place, suffix = self._place[key], key[-GROUP_BYTES:]
        keys, shape = self._keys[suffix], self._shapes[suffix]
        if shape.full_attention:
            others = keys[place:]
        else:
            others = keys[max(0, place + 1 - _window(shape)) : place + 1][::-1]
        gap = next((index for index, other in enumerate(others) if not wanted(other)), len(others))
        return others[: max(1, gap)]

    def has(self, key: bytes) -> bool:
        """Whether the key names a whole block of this request (and not a partial tail)."""
        return self._find(key) is not None

    def is_beyond(self, key: bytes, cap: int | None) -> bool:
        """Whether the key's block ends behind the cap; a partial tail does with any cap."""
        if cap is None:
            return False
        place = self._find(key)
        return place is None or place >= self._count(key[-GROUP_BYTES:], cap)

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
            hashes=tuple([self._told(hashes[i]) for i in ends]),
            parent=self._told(hashes[first_hash - 1]) if first_hash else None,
            token_ids=tuple(self._request.all_token_ids[start:end]),
            block_size=shape.tokens_per_block,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=self._extra_keys(start, end, shape.tokens_per_block),
            spec_kind=shape.spec_kind,
            sliding_window=shape.sliding_window,
        )

    def _told(self, block_hash: bytes) -> int | bytes:
        """Convert a hash as vLLM's ``maybe_convert_block_hash`` does, which reads the environment again."""
        if self._tells_numbers is None:
            self._tells_numbers = isinstance(maybe_convert_block_hash(block_hash), int)
        return int.from_bytes(block_hash[-8:], "big") if self._tells_numbers else block_hash

    def _extra_keys(self, start: int, end: int, step: int) -> tuple[tuple[object, ...] | None, ...] | None:
        if not self._has_extra_keys(start):
            return (None,) * ((end - start) // step)
        per_block = [
            generate_block_hash_extra_keys(self._request, block, block + step, 0)[0]
            for block in range(start, end, step)
        ]
        public = to_event_extra_keys(per_block)
        return None if public is None else tuple(public)

    def _has_extra_keys(self, start: int) -> bool:
        """Whether a block may have extra keys: making them costs more than all the rest of its metadata."""
        request = self._request
        return bool(
            request.lora_request
            or request.mm_features
            or (start == 0 and request.cache_salt)
            or request.prompt_embeds is not None
        )

    def _count(self, suffix: bytes, cap: int | None) -> int:
        if cap is None:
            return len(self._keys[suffix])
        shape = self._shapes[suffix]
        return min(len(self._keys[suffix]), cap // (shape.tokens_per_block * shape.blocks_per_chunk))

    def _find(self, key: bytes) -> int | None:
        place = self._place.get(key)
        if place is None:
            self._grow()
            place = self._place.get(key)
        return place

    def _grow(self) -> None:
        hashes = self._request.block_hashes
        if len(hashes) == self._hashes_seen:
            return
        self._hashes_seen = len(hashes)
        for suffix, shape in self._shapes.items():
            keys, step = self._keys[suffix], shape.hashes_per_chunk
            known = len(keys)
            keys += [BlockKey(each + suffix) for each in hashes[(known + 1) * step - 1 :: step]]
            self._place.update(zip(keys[known:], range(known, len(keys)), strict=True))


def _window(shape: GroupShape) -> int:
    """How many chunks a hit of a group without full attention needs, one more for its ragged end."""
    if shape.sliding_window is not None:
        return -(-shape.sliding_window // (shape.tokens_per_block * shape.blocks_per_chunk)) + 1
    return 1 if shape.spec_kind == "mamba" else sys.maxsize

"""A block's metadata as journals and files hold it, without taking its token ids out of their msgpack."""

from __future__ import annotations

import msgspec

from kvtierd.core.model import Block, EventHash


class PackedMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Encodes to the very bytes of the :class:`~kvtierd.core.model.BlockMeta` with the same fields."""

    hashes: tuple[EventHash, ...]
    parent: EventHash | None = None
    token_ids: msgspec.Raw | tuple[()] = ()
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    spec_kind: str | None = "full_attention"
    sliding_window: int | None = None


def packed_meta(block: Block) -> PackedMeta | None:
    """Return a block's metadata, to be encoded; ``None`` if its store brought none."""
    common = block.common
    if not common.described:
        return None
    return PackedMeta(
        hashes=block.hashes,
        parent=block.parent,
        token_ids=msgspec.Raw(block.tokens) if block.tokens else (),
        block_size=common.block_size,
        lora_id=common.lora_id,
        lora_name=common.lora_name,
        extra_keys=common.extra_keys,
        spec_kind=common.spec_kind,
        sliding_window=common.sliding_window,
    )

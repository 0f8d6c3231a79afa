"""A block's metadata as journals and files hold it, without taking its token ids out of their msgpack."""

from __future__ import annotations

import msgspec

from kvtierd.core.model import Block, EventHash

_Raw = msgspec.Raw


class PackedMeta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
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
    told_as, tokens = block.told_as, block.tokens
    return PackedMeta(  # in the order of its fields: names would cost more than all else
        told_as if isinstance(told_as, tuple) else (told_as,),
        block.parent,
        _Raw(tokens) if tokens else (),
        common.block_size,
        common.lora_id,
        common.lora_name,
        common.extra_keys,
        common.spec_kind,
        common.sliding_window,
    )

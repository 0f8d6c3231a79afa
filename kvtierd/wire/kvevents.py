"""KV cache events as vLLM publishes them: structs, two wire forms, a decoder for every schema so far.

The structs are those of vLLM 0.33 (``vllm/distributed/kv_events.py``), field for field, so that key order
and which keys are always present come out the same: keys without a default are always sent, the others only
when they are set. A batch is an array ``[ts, events, data_parallel_rank]``. An event is a map tagged
``type`` (vLLM >= 0.24) or an array with the tag first (vLLM <= 0.23, which knows no locality).

kvtierd never sets ``ownership``, ``session_id`` or ``lookahead_token_ids``: real readers drop such events.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventHash,
    EventKind,
    TierEvent,
    block_key,
    group_of,
)

T = TypeVar("T")
_Raw = msgspec.Raw


class Form(enum.StrEnum):
    """How an event is laid out inside a batch."""

    MAP = "map"
    ARRAY = "array"


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Base of all events; the tag is the class name."""


class BlockStored(KVCacheEvent, frozen=True):
    """Blocks became resident on ``medium``. ``block_size`` is in tokens, 0 in a placeholder."""

    block_hashes: tuple[EventHash, ...]
    parent_block_hash: EventHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None

    def __hash__(self) -> int:
        """Hash all fields, also where a decoded ``extra_keys`` holds lists."""
        fields = (getattr(self, name) for name in self.__struct_fields__)
        return hash(tuple(_hashable(value) for value in fields))


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks are no longer resident on ``medium``."""

    block_hashes: tuple[EventHash, ...]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """Everything of this worker is gone, on every medium. Decoded, never sent."""


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event that no schema here describes: what was decoded, for show."""

    type: str
    body: Any = None

    def __hash__(self) -> int:
        """Hash the type only; the body may hold anything."""
        return hash(self.type)


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared
DecodedEvent = WireEvent | UnknownEvent


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message: ``ts`` in seconds since the epoch (always a float), events in order, the dp rank."""

    ts: float
    events: tuple[DecodedEvent, ...]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_STORED_SLOTS = BlockStored.__struct_fields__[:11]
_REMOVED_SLOTS = BlockRemoved.__struct_fields__[:3]
_stored_fields = operator.attrgetter(*_STORED_SLOTS)
_removed_fields = operator.attrgetter(*_REMOVED_SLOTS)
# Keys that publishers with other defaults leave out (SGLang), and what their absence means.
_ABSENT = {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None}
_EVENTS: dict[str, tuple[type[WireEvent], tuple[str, ...]]] = {
    "BlockStored": (BlockStored, _STORED_SLOTS),
    "BlockRemoved": (BlockRemoved, _REMOVED_SLOTS),
    "AllBlocksCleared": (AllBlocksCleared, ()),
}

_encoder = msgspec.msgpack.Encoder()
_batch_decoder: msgspec.msgpack.Decoder[_RawBatch] = msgspec.msgpack.Decoder(_RawBatch)
_event_decoder: msgspec.msgpack.Decoder[WireEvent] = msgspec.msgpack.Decoder(WireEvent)


def encode_batch(ts: float, events: Sequence[WireEvent], rank: int, form: Form = Form.MAP) -> bytes:
    """Return a batch's bytes. In array form (the layout of vLLM 0.23) locality is not sent."""
    if form is Form.MAP:
        return _encoder.encode((float(ts), events, rank))
    return _encoder.encode((float(ts), [as_array(event) for event in events], rank))


def decode_batch(payload: bytes) -> EventBatch:
    """Decode a batch of any schema of vLLM 0.10 to 0.33, map or array; unknown keys and slots are ignored.

    An event of an unknown type, or one that does not fit, becomes an :class:`UnknownEvent`: one odd event
    must not cost the others.

    Raises:
        msgspec.MsgspecError: the payload is not an event batch at all.
    """
    try:
        raw = _batch_decoder.decode(payload)
        events = tuple(_decode_event(event) for event in raw.events)
    except (ValueError, TypeError, RecursionError) as error:  # bad text, maps as keys, nesting without an end
        raise msgspec.DecodeError(f"it is no event batch: {error}") from error
    return EventBatch(raw.ts, events, raw.data_parallel_rank)


def has_group(block: Block) -> bool:
    """Whether events of this block carry ``group_idx``; a removal carries it if and only if the store did.

    vLLM's placeholder carries it alone. With metadata it comes with the spec kind, or, for want of a kind,
    only where its absence (which readers take as group 0) would be wrong.
    """
    common = block.common
    return not common.described or common.spec_kind is not None or group_of(block.key) != 0


def stored(
    block: Block,
    index: int,
    medium: str,
    locality: str | None,
    group: int | None,
    tokens: bool = True,
    raw: bool = False,
) -> BlockStored:
    """Return the event that announces the ``index``-th hash of a block, chained to the hash before it.

    One block an event: the only form whose every block all readers find. Without metadata it is vLLM's
    placeholder (no tokens, ``block_size`` 0, no parent). ``group``: what it carries, see :func:`has_group`.
    ``raw``: it is only to be encoded, so the token ids may be the msgpack as which they are kept.
    """
    common, told_as = block.common, block.told_as
    hashes = told_as if isinstance(told_as, tuple) else (told_as,)
    if not common.described:
        return BlockStored(hashes, None, (), 0, None, medium, None, group_idx=group, locality=locality)
    extra, count = common.extra_keys, len(hashes)
    token_ids: Any = ()
    if tokens and block.tokens:
        copied = raw and count == 1
        token_ids = _Raw(block.tokens) if copied else _part(block.token_ids, index, common.block_size, count)
    return BlockStored(  # in the order of its fields: names would be half of what this costs
        hashes if count == 1 else (hashes[index],),
        hashes[index - 1] if index else block.parent,
        token_ids,
        common.block_size,
        common.lora_id,
        medium,
        common.lora_name,
        None if extra is None else _part(extra, index, 1, count),
        group,
        common.spec_kind,
        common.sliding_window if common.spec_kind is not None else None,
        locality,
    )


def removed(event_hash: EventHash, group: int | None, medium: str, locality: str | None) -> BlockRemoved:
    """Return the event that takes back one hash. ``group`` is what the store carried."""
    return BlockRemoved(block_hashes=(event_hash,), medium=medium, group_idx=group, locality=locality)


def foreign_block(event: BlockStored, rank: int) -> Block:
    """Return what another publisher's store tells, as a block that :func:`stored` can announce again.

    Its identity is made up (no namespace); the fields that real readers stumble over are left behind.
    """
    meta = BlockMeta(
        hashes=event.block_hashes,
        parent=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_id=event.lora_id,
        lora_name=event.lora_name,
        extra_keys=event.extra_keys,
        spec_kind=event.kv_cache_spec_kind,
        sliding_window=event.kv_cache_spec_sliding_window,
    )
    return Block.of(BlockId("", block_key(b"\0", event.group_idx or 0)), 0, meta, rank)


def pack(events: Iterable[WireEvent], *, most: int = 1024) -> Iterator[WireEvent]:
    """Join neighbours into events of up to ``most`` hashes, as vLLM sends them.

    Stores are joined along a chain (each the parent of the next, all else equal), removals where all but the
    hash is equal.
    """
    group: list[WireEvent] = []
    for event in events:
        if group and not (len(group) < most and _continues(group[-1], event)):
            yield _joined(group)
            group = []
        group.append(event)
    if group:
        yield _joined(group)


_SAME_STORED = (
    "medium",
    "locality",
    "group_idx",
    "block_size",
    "lora_id",
    "lora_name",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)


def _continues(last: WireEvent, event: WireEvent) -> bool:
    if isinstance(last, BlockRemoved) and isinstance(event, BlockRemoved):
        return all(getattr(last, n) == getattr(event, n) for n in ("medium", "locality", "group_idx"))
    if not (isinstance(last, BlockStored) and isinstance(event, BlockStored)):
        return False
    return (
        event.block_size > 0
        and event.parent_block_hash == last.block_hashes[-1]
        and (last.extra_keys is None) == (event.extra_keys is None)
        and len(last.token_ids) == len(event.token_ids)
        and all(getattr(last, name) == getattr(event, name) for name in _SAME_STORED)
    )


def _joined(group: list[WireEvent]) -> WireEvent:
    first = group[0]
    if len(group) == 1 or isinstance(first, AllBlocksCleared):
        return first
    hashes = tuple(h for event in group for h in event.block_hashes)  # type: ignore[union-attr]
    if isinstance(first, BlockRemoved):
        return msgspec.structs.replace(first, block_hashes=hashes)
    stores = [event for event in group if isinstance(event, BlockStored)]
    extra = None
    if first.extra_keys is not None:
        extra = tuple(key for event in stores for key in event.extra_keys or ())
    tokens = tuple(token for event in stores for token in event.token_ids)
    return msgspec.structs.replace(first, block_hashes=hashes, token_ids=tokens, extra_keys=extra)


def to_wire(event: TierEvent, *, tokens: bool = True) -> list[WireEvent]:
    """Return one tier event as wire events: a store root first, a removal leaf first."""
    block, medium = event.block, event.medium.value
    locality = event.locality.value if event.locality is not None else None
    group = group_of(block.key) if has_group(block) else None
    if event.kind is EventKind.STORED:
        return [stored(block, i, medium, locality, group, tokens=tokens) for i in range(len(block.hashes))]
    return [removed(h, group, medium, locality) for h in reversed(block.hashes)]


def _part(values: tuple[T, ...], index: int, size: int, count: int) -> tuple[T, ...]:
    """Return the ``index``-th of ``count`` parts; a block with one hash keeps all it was given."""
    return values if count == 1 else values[index * size : (index + 1) * size]


def as_array(event: WireEvent) -> tuple[Any, ...]:
    """Return an event as vLLM <= 0.23 lays it out."""
    if isinstance(event, BlockStored):
        return ("BlockStored", *_stored_fields(event))
    if isinstance(event, BlockRemoved):
        return ("BlockRemoved", *_removed_fields(event))
    return ("AllBlocksCleared",)


def _decode_event(raw: msgspec.Raw) -> DecodedEvent:
    try:
        return _event_decoder.decode(raw)
    except msgspec.ValidationError:
        return _decode_tolerantly(msgspec.msgpack.decode(raw))


def _decode_tolerantly(body: Any) -> DecodedEvent:
    """Read an array, or a map that lacks keys which vLLM always sends."""
    if isinstance(body, list) and body and isinstance(body[0], str):
        name, slots = body[0], _EVENTS[body[0]][1] if body[0] in _EVENTS else ()
        fields = dict(zip(slots, body[1:], strict=False))
    elif isinstance(body, dict) and isinstance(body.get("type"), str):
        name, fields = body["type"], body
    else:
        return UnknownEvent(type(body).__name__, body)
    if name not in _EVENTS:
        return UnknownEvent(name, body)
    try:
        return msgspec.convert({**_ABSENT, **fields, "type": name}, _EVENTS[name][0])
    except msgspec.ValidationError:
        return UnknownEvent(name, body)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(part) for part in value) if isinstance(value, list | tuple) else value

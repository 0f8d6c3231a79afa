"""The vocabulary that every room shares: keys, layouts, metadata, tiers' labels and block states.

The public names of :mod:`kvtierd.client` (``BlockKey``, ``block_key``, ``BlockMeta``, ``Group``, ``Layout``,
``Scope``, ``KeyState``) are defined here and are promises.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Iterable
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Index = Annotated[int, Meta(ge=0, le=1 << 31)]
Name = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]


class Medium(enum.StrEnum):
    """Where a tier keeps bytes, spelt as vLLM >= 0.27 spells it on the wire."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.StrEnum):
    """A storage tier's place relative to the publishing pod (vLLM PR 46544). Never inferred."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


BlockKey = NewType("BlockKey", bytes)
"""The engine's name of a block: its hash (1 to 64 bytes), then its KV cache group (4 bytes, big-endian).

It is vLLM's ``OffloadKey`` to the byte. One string of bytes is what the codec makes fastest, what an index
finds fastest and what takes the least memory (85 bytes with a SHA-256; a pair with its hash took 137).
"""

GROUP_BYTES = 4
_GROUP_0 = bytes(GROUP_BYTES)
WireKey = Annotated[BlockKey, Meta(min_length=1 + GROUP_BYTES, max_length=64 + GROUP_BYTES)]


def block_key(block_hash: bytes, group: int = 0) -> BlockKey:
    """Return the key of a block hash in a KV cache group."""
    return BlockKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def hash_of(key: BlockKey) -> bytes:
    """Return a key's block hash."""
    return key[:-GROUP_BYTES]


def group_of(key: BlockKey) -> int:
    """Return a key's KV cache group."""
    return 0 if key.endswith(_GROUP_0) else int.from_bytes(key[-GROUP_BYTES:], "big")


class BlockId(msgspec.Struct, frozen=True, order=True, gc=False):
    """A block's identity in the daemon: equal keys of different namespaces are different blocks.

    A struct: unlike a named tuple it is not walked by the collector, half as big, and made in 49 ns, not 131.
    """

    namespace: str
    key: BlockKey


def block_ids(namespace: str, keys: Iterable[BlockKey]) -> list[BlockId]:
    """Return the identities of many keys."""
    return [BlockId(namespace, key) for key in keys]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of one KV cache group.

    ``block_bytes`` is what ONE rank holds of one block, in bytes.
    """

    tokens_per_block: Count
    block_bytes: Count


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes the bytes of a block; equal for all ranks of an engine."""

    model: Name
    revision: Name = ""
    dtype: Name
    layout: Name
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=1024)]
    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1
    hash_algorithm: Name = ""
    hash_seed: Name = ""
    tenant: Name | None = None

    def namespace(self) -> str:
        """Return the 32 hex digits that name this layout (SHA-256 over the msgpack of all fields)."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]

    def differences(self, other: Layout) -> list[str]:
        """Return the names of the fields that make this another namespace."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


EventHash = int | bytes
"""A block's name in events: an unsigned 64-bit integer, or bytes."""


class BlockMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an event needs to describe a block by itself (field meanings as in vLLM's ``BlockStored``).

    ``hashes`` are the event's own hashes, one or several per block, in the engine's published form
    (unsigned 64-bit integers or bytes); ``parent`` is the parent's last event hash.
    """

    hashes: Annotated[tuple[EventHash, ...], Meta(min_length=1)]
    parent: EventHash | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    spec_kind: str | None = "full_attention"
    sliding_window: int | None = None


class Scope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which secondary tiers a request may use; ``None`` means all. CPU always takes part.

    Each entry is a tier's name, ``medium=STORAGE``, ``locality=LOCAL`` or ``locality=REMOTE``; one match is
    enough.
    """

    load_from: tuple[str, ...] | None = None
    store_to: tuple[str, ...] | None = None


class KeyState(enum.IntEnum):
    """What a lookup says of one key.

    ``HIT``: in the pool. ``COLD``: only in a secondary tier, loading promotes it. ``PENDING``: being
    promoted now. ``MISS``: anything else, an uncommitted store included.
    """

    MISS = 0
    HIT = 1
    COLD = 2
    PENDING = 3


class State(enum.Enum):
    """A block's state in one tier; only RESIDENT is visible to lookups, events and inventory.

    ``RESERVED``: a store writes it. ``LOADING``: it is being promoted. ``WRITING``: it is on its way to a
    secondary tier. ``GONE``: it left, and only pins keep its bytes in place.
    """

    RESERVED = "reserved"
    LOADING = "loading"
    WRITING = "writing"
    RESIDENT = "resident"
    GONE = "gone"


class SkipReason(enum.StrEnum):
    """Why ``prepare_store`` gave a key no slot."""

    RESIDENT = "resident"
    PENDING = "pending"
    NO_ROOM = "no_room"
    PARENT_REFUSED = "parent_refused"


def event_hash(key: BlockKey) -> int:
    """Return the low 64 bits of the key's hash, unsigned: vLLM's published form of a block hash."""
    return int.from_bytes(key[-8 - GROUP_BYTES : -GROUP_BYTES], "big")


class Common(msgspec.Struct, frozen=True, gc=False):
    """What many blocks have in common, held once for all of them; ``described``: whether by metadata.

    ``payload_bytes`` is over all ranks; the rest is as in :class:`BlockMeta`.
    """

    namespace: str
    payload_bytes: int
    dp_rank: int = 0
    described: bool = False
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    spec_kind: str | None = None
    sliding_window: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether it can be of many blocks, and can be hashed."""
        return _of_many(self.extra_keys)


def _of_many(extra_keys: tuple[tuple[object, ...] | None, ...] | None) -> bool:
    """Whether many blocks can have these extra keys: others are of one block alone, and may have no hash."""
    return not extra_keys or not any(extra_keys)


_shared = functools.lru_cache(maxsize=4096)(Common)
_encode = msgspec.msgpack.Encoder().encode
_joined = b"".join
# The parts of an engine's event of many blocks are taken out of the same ids one after the other.
_unpack_tokens = functools.lru_cache(maxsize=8)(msgspec.msgpack.Decoder(tuple[int, ...]).decode)


def _packed(token_ids: tuple[int, ...]) -> bytes:
    """Return ids as msgpack in no more memory than that: the encoder's own result has 25 bytes to spare."""
    return _joined((_encode(token_ids), b""))  # joined, since a copy alone would be the same object


class Block(msgspec.Struct, frozen=True, gc=False):
    """One block's description as tiers and events carry it; made by :meth:`of`.

    A daemon has millions of them, so each is small: one hash is not wrapped in a tuple, ``tokens`` are the
    ids as a msgpack array (3 to 5 bytes an id, where objects take 40; empty if there are none), ready to be
    copied into an event, a journal or a file. It is part of no cycle, and nothing for the garbage collector.
    """

    common: Common
    key: BlockKey
    told_as: EventHash | tuple[EventHash, ...]
    """The event hash, or several of them."""
    parent: EventHash | None = None
    """The parent's last event hash."""
    tokens: bytes = b""

    @classmethod
    def of(
        cls,
        block_id: BlockId,
        payload_bytes: int,
        meta: BlockMeta | None = None,
        dp_rank: int = 0,
        before: Block | None = None,
    ) -> Block:
        """Return a block with the words that its store brought; without any, its hash is the key's.

        ``before``: a block that may be its parent; if it is, both refer to one number.
        """
        namespace, key = block_id.namespace, block_id.key
        if meta is None:
            return cls(_shared(namespace, payload_bytes, dp_rank), key, event_hash(key))
        extra, hashes, tokens = meta.extra_keys, meta.hashes, meta.token_ids
        make = _shared if extra is None or _of_many(extra) else Common  # nearly all: without a call
        common = make(
            namespace,
            payload_bytes,
            dp_rank,
            True,
            meta.block_size,
            meta.lora_id,
            meta.lora_name,
            extra,
            meta.spec_kind,
            meta.sliding_window,
        )
        told_as = hashes[0] if len(hashes) == 1 else hashes
        parent = meta.parent
        if before is not None and (last := before.told_as) == parent and not isinstance(last, tuple):
            parent = last
        return cls(common, key, told_as, parent, _packed(tokens) if tokens else b"")

    @property
    def id(self) -> BlockId:
        """Its identity, made anew each time: to be had once, and where ``key`` alone does not do."""
        return BlockId(self.common.namespace, self.key)

    @property
    def namespace(self) -> str:
        """The namespace of its layout."""
        return self.common.namespace

    @property
    def payload_bytes(self) -> int:
        """Bytes of its payload, over all ranks."""
        return self.common.payload_bytes

    @property
    def dp_rank(self) -> int:
        """The dp rank that stored it."""
        return self.common.dp_rank

    @property
    def hashes(self) -> tuple[EventHash, ...]:
        """The event hashes; derived from the key where the store brought no metadata."""
        told_as = self.told_as
        return told_as if isinstance(told_as, tuple) else (told_as,)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, decoded."""
        return _unpack_tokens(self.tokens) if self.tokens else ()

    @property
    def meta(self) -> BlockMeta | None:
        """The metadata as the store brought it; takes time, for what is small or seldom."""
        common = self.common
        if not common.described:
            return None
        return BlockMeta(
            hashes=self.hashes,
            parent=self.parent,
            token_ids=self.token_ids,
            block_size=common.block_size,
            lora_id=common.lora_id,
            lora_name=common.lora_name,
            extra_keys=common.extra_keys,
            spec_kind=common.spec_kind,
            sliding_window=common.sliding_window,
        )


class Departure(enum.StrEnum):
    """Why a visible block left a tier.

    ``CAPACITY``: another took its room. ``TTL``: unused for too long. ``CROWDED``: the storage was full of
    what others keep there. ``CLEARED``: somebody asked for it. ``CORRUPT``, ``GONE``: its bytes are wrong,
    or an outsider took them. ``DETACHED``: no engine of its layout is left and the pool was needed.
    ``STOPPED``: the pool ends with the daemon.
    """

    CAPACITY = "capacity"
    TTL = "ttl"
    CROWDED = "crowded"
    CLEARED = "cleared"
    CORRUPT = "corrupt"
    GONE = "gone"
    DETACHED = "detached"
    STOPPED = "stopped"


class EventKind(enum.Enum):
    """A placement change of one block in one tier."""

    STORED = "stored"
    REMOVED = "removed"


class TierEvent(msgspec.Struct, frozen=True, gc=False):
    """One entry of a tier's own event queue."""

    kind: EventKind
    tier: str
    medium: Medium
    locality: Locality | None
    block: Block

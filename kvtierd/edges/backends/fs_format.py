"""Format v1 of a stored block: a header region that proves what the block is, then its payload.

``FORMAT.md`` beside this file documents every byte. The region is a fixed prefix, msgpack metadata, zeroes
and a checksum over all of that; it is a multiple of 4096 bytes long so that the payload can be read with
direct I/O. Pure functions over bytes: files, memory and objects share them.
"""

from __future__ import annotations

import enum
import struct
import sys
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    Index,
    block_key,
    group_of,
    hash_of,
)
from kvtierd.errors import KvtierdError
from kvtierd.wire.described import PackedMeta, packed_meta

MAGIC = b"\x89KVTIER\n"
VERSION = 1
ALIGN = 4096
MAX_HEADER_BYTES = 1 << 20

_PREFIX = struct.Struct("<8sHHIIIQ16s")
PREFIX_BYTES = _PREFIX.size
_CHECKSUM_BYTES = 8
PLAIN_TOKEN_BYTES = 3072
"""Packed token ids that leave room in one page for the rest of a header."""
_PLAIN_NAME = 32

Buffer = bytes | bytearray | memoryview


class Flaw(enum.StrEnum):
    """Why bytes are not the block that they should be."""

    MAGIC = "not a block file"
    VERSION = "unknown format version"
    SHORT = "too short"
    LONG = "too long"
    LENGTHS = "impossible lengths in the header"
    HEADER = "header checksum differs"
    METADATA = "metadata cannot be decoded"
    OTHER_BLOCK = "another block's content"
    PAYLOAD = "payload checksum differs"
    FOREIGN = "not a regular file of this tree"
    TOO_BIG = "metadata too big for the header"


class FormatError(KvtierdError):
    """Bytes that do not prove to be the expected block; ``flaw`` says why."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.value)
        self.flaw = flaw


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What of the metadata says which block it is."""

    namespace: Annotated[str, Meta(min_length=32, max_length=32)]
    hash: Annotated[bytes, Meta(min_length=1, max_length=64)]
    group: Index
    payload_bytes: Annotated[int, Meta(ge=1)]


class _Metadata(_Identity, frozen=True, kw_only=True):
    """The msgpack map in the header region. New fields get defaults; unknown fields are ignored."""

    dp_rank: Index = 0
    meta: BlockMeta | None = None


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The same, to be encoded."""

    namespace: str
    hash: bytes
    group: int
    payload_bytes: int
    dp_rank: int
    meta: PackedMeta | None


_M = TypeVar("_M", bound=_Identity)
_sum = xxhash.xxh3_64_digest
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Metadata] = msgspec.msgpack.Decoder(_Metadata)
_identify: msgspec.msgpack.Decoder[_Identity] = msgspec.msgpack.Decoder(_Identity)


@dataclass(frozen=True, slots=True)
class Header:
    """A header region that passed its checksum. ``data_offset``: where the payload starts, in bytes."""

    block: Block
    data_offset: int
    payload_digest: bytes

    def check(self, block: Block, stored: int) -> None:
        """Prove that this is ``block``'s header in front of a payload that ends at byte ``stored``.

        Raises:
            FormatError: it is another block's, or the lengths do not fit.
        """
        if self.block.id != block.id or self.block.payload_bytes != block.payload_bytes:
            raise FormatError(Flaw.OTHER_BLOCK)
        self.check_size(stored)

    def check_size(self, stored: int) -> None:
        """Prove that header and payload are exactly ``stored`` bytes; raises :class:`FormatError`."""
        _check_size(stored, self.data_offset + self.block.payload_bytes)

    def check_payload(self, payload: Buffer) -> None:
        """Prove the payload by its checksum; raises :class:`FormatError`."""
        check_digest(digest(payload), self.payload_digest)


Digest = xxhash.xxh3_128
"""Makes :func:`digest` of a payload that comes in parts; releases the GIL."""


def digest(payload: Buffer) -> bytes:
    """Return the payload's xxh3-128 (16 bytes, canonical big-endian); releases the GIL."""
    return xxhash.xxh3_128_digest(payload)


def aligned(size: int) -> int:
    """Round ``size`` up to a multiple of 4096."""
    return -(-size // ALIGN) * ALIGN


def _metadata(block: Block) -> bytes:
    """Encode the metadata map; ``FormatError(METADATA)`` when a value has no msgpack form."""
    try:
        return _encoder.encode(
            _Written(
                namespace=block.namespace,
                hash=hash_of(block.key),
                group=group_of(block.key),
                payload_bytes=block.payload_bytes,
                dp_rank=block.dp_rank,
                meta=packed_meta(block),
            )
        )
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise FormatError(Flaw.METADATA) from error


def _region_bytes(metadata: bytes) -> int:
    return aligned(PREFIX_BYTES + len(metadata) + _CHECKSUM_BYTES)


def header_bytes(block: Block) -> int:
    """Return the length of the block's header region in bytes, a multiple of 4096."""
    return ALIGN if _is_plain(block) else _region_bytes(_metadata(block))


def _is_plain(block: Block) -> bool:
    """Whether one page holds the header for sure, as nearly always: names and numbers take 700 bytes at most.

    So the core learns what a block will occupy without its metadata being encoded for that.
    """
    common = block.common
    return (
        len(block.tokens) <= PLAIN_TOKEN_BYTES
        and type(block.told_as) is int
        and (block.parent is None or type(block.parent) is int)
        and common.lora_name is None
        and common.extra_keys is None
        and (common.spec_kind is None or len(common.spec_kind) <= _PLAIN_NAME)
    )


def stored_bytes(block: Block) -> int:
    """Return what a stored block occupies: header region and payload, in whole 4096-byte units."""
    return header_bytes(block) + aligned(block.payload_bytes)


def encode(block: Block, payload_digest: bytes) -> bytes:
    """Return the header region of a block whose payload has this :func:`digest`.

    Raises:
        FormatError: the metadata has no msgpack form or does not fit in ``MAX_HEADER_BYTES``.
    """
    metadata = _metadata(block)
    size = _region_bytes(metadata)
    if size > MAX_HEADER_BYTES:
        raise FormatError(Flaw.TOO_BIG)
    region = bytearray(size)
    _PREFIX.pack_into(
        region, 0, MAGIC, VERSION, 0, size, len(metadata), 0, block.payload_bytes, payload_digest
    )
    region[PREFIX_BYTES : PREFIX_BYTES + len(metadata)] = metadata
    region[-_CHECKSUM_BYTES:] = xxhash.xxh3_64_digest(memoryview(region)[:-_CHECKSUM_BYTES])
    return bytes(region)


def _prefix(start: Buffer) -> tuple[int, int, int, bytes]:
    """Return the region's length, the metadata's, the payload's and its digest; raises as data_offset."""
    if len(start) < PREFIX_BYTES:
        raise FormatError(Flaw.SHORT)
    magic, version, flags, offset, metadata, reserved, payload, payload_digest = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise FormatError(Flaw.MAGIC)
    if version != VERSION:
        raise FormatError(Flaw.VERSION)
    room = offset - PREFIX_BYTES - _CHECKSUM_BYTES
    if flags or reserved or not 0 < offset <= MAX_HEADER_BYTES or offset % ALIGN or metadata > room:
        raise FormatError(Flaw.LENGTHS)
    return offset, metadata, payload, payload_digest


def data_offset(start: Buffer) -> int:
    """Return the header region's length from its first ``PREFIX_BYTES`` bytes (nothing is proved yet).

    Raises:
        FormatError: not format v1, or lengths that no header has.
    """
    return _prefix(start)[0]


def unseal(start: Buffer) -> tuple[int, memoryview, int, bytes]:
    """Prove the header region at the beginning of ``start`` by its checksum; decode nothing.

    Returns the region's length, the metadata's bytes, the payload's length and digest.

    Raises:
        FormatError: not format v1, lengths that no header has, or another checksum.
    """
    offset, length, payload, payload_digest = _prefix(start)
    if len(start) < offset:
        raise FormatError(Flaw.SHORT)
    region = memoryview(start)
    if _sum(region[: offset - _CHECKSUM_BYTES]) != region[offset - _CHECKSUM_BYTES : offset].tobytes():
        raise FormatError(Flaw.HEADER)
    return offset, region[PREFIX_BYTES : PREFIX_BYTES + length], payload, payload_digest


def _read_metadata(decoder: msgspec.msgpack.Decoder[_M], metadata: Buffer, payload_bytes: int) -> _M:
    try:
        found = decoder.decode(metadata)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(Flaw.METADATA) from error
    if found.payload_bytes != payload_bytes:
        raise FormatError(Flaw.LENGTHS)
    return found


def block_of(metadata: Buffer, payload_bytes: int) -> Block:
    """Decode the metadata of a region that :func:`unseal` proved; raises :class:`FormatError`."""
    found = _read_metadata(_decoder, metadata, payload_bytes)
    # One namespace string for all its blocks: a copy for each would cost 80 bytes a block.
    block_id = BlockId(sys.intern(found.namespace), block_key(found.hash, found.group))
    return Block.of(block_id, payload_bytes, found.meta, found.dp_rank)


def decode(start: Buffer) -> Header:
    """Decode and prove the header region at the beginning of ``start``.

    Raises:
        FormatError: anything that :func:`encode` would not have written.
    """
    offset, metadata, payload, payload_digest = unseal(start)
    return Header(block_of(metadata, payload), offset, payload_digest)


def prove(start: Buffer, block: Block, stored: int) -> tuple[int, bytes]:
    """Prove that the header region at the beginning of ``start`` is ``block``'s, as a read needs it.

    Of the metadata only what identifies the block is decoded: the rest is under the same checksum, and who
    reads knows it. ``stored``: at which byte the payload ends. Returns the region's length and the payload's
    digest.

    Raises:
        FormatError: it is not, or the lengths do not fit.
    """
    offset, metadata, payload, payload_digest = unseal(start)
    found = _read_metadata(_identify, metadata, payload)
    if (found.hash, found.group) != (hash_of(block.key), group_of(block.key)) or (
        (found.namespace, payload) != (block.namespace, block.payload_bytes)
    ):
        raise FormatError(Flaw.OTHER_BLOCK)
    _check_size(stored, offset + payload)
    return offset, payload_digest


def check_digest(found: bytes, expected: bytes) -> None:
    """Prove a payload by its :func:`digest`; raises :class:`FormatError`."""
    if found != expected:
        raise FormatError(Flaw.PAYLOAD)


def _check_size(stored: int, expected: int) -> None:
    if stored != expected:
        raise FormatError(Flaw.SHORT if stored < expected else Flaw.LONG)

"""Format v1: golden bytes, and every flipped or missing byte is noticed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.model import Block, BlockId, BlockMeta, block_key, hash_of
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.fs_format import Flaw, FormatError

GOLDEN = Path(__file__).parents[2] / "golden"
KEY = block_key(bytes(range(32)), 1)
META = BlockMeta(
    hashes=(2**64 - 1, b"\x00\x01"), parent=7, token_ids=(1, 2, 70000), block_size=16, lora_name="a"
)
BLOCK = Block.of(BlockId("0123456789abcdef" * 2, KEY), 5000, META, 2)
PAYLOAD = bytes(offset % 251 for offset in range(5000))


def region(block: Block = BLOCK, payload: bytes = PAYLOAD) -> bytes:
    return fs_format.encode(block, fs_format.digest(payload))


def flaw_of(data: bytes) -> Flaw:
    with pytest.raises(FormatError) as caught:
        fs_format.decode(data)
    return caught.value.flaw


def resealed(data: bytes, offset: int, value: bytes) -> bytes:
    """Change bytes and make the header checksum right again."""
    changed = bytearray(data)
    changed[offset : offset + len(value)] = value
    changed[-8:] = xxhash.xxh3_64_digest(bytes(changed[:-8]))
    return bytes(changed)


def test_the_header_has_the_golden_bytes():
    assert region() == (GOLDEN / "fs_header_v1.bin").read_bytes()


def test_the_golden_bytes_decode_to_the_golden_record():
    header = fs_format.decode((GOLDEN / "fs_header_v1.bin").read_bytes())
    header.check(BLOCK, 4096 + 5000)
    header.check_payload(PAYLOAD)
    expected = json.loads((GOLDEN / "fs_header_v1.json").read_text())
    assert header.block == BLOCK
    assert header.payload_digest.hex() == expected["payload_xxh3_128"]
    assert header.data_offset == expected["data_offset"]


def test_the_prefix_is_laid_out_as_documented():
    data = region()
    length = struct.unpack_from("<I", data, 16)[0]
    assert data[:8] == b"\x89KVTIER\n"
    assert struct.unpack_from("<HHIIIQ", data, 8) == (1, 0, 4096, length, 0, 5000)
    assert data[32:48] == xxhash.xxh3_128_digest(PAYLOAD)
    record = msgspec.msgpack.decode(data[48 : 48 + length])
    assert (record["namespace"], record["hash"], record["group"]) == (BLOCK.id.namespace, hash_of(KEY), 1)
    assert (record["dp_rank"], record["payload_bytes"]) == (2, 5000)
    assert record["meta"]["hashes"] == [2**64 - 1, b"\x00\x01"]
    assert data[48 + length : -8] == bytes(4096 - 56 - length)
    assert data[-8:] == xxhash.xxh3_64_digest(data[:-8])


def test_every_flipped_header_byte_is_noticed():
    """L63: all bytes of the region, padding and checksums included."""
    good = region()
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 1 << (offset % 8)
        with pytest.raises(FormatError):
            fs_format.decode(bad)


def test_every_flipped_payload_byte_is_noticed():
    header = fs_format.decode(region())
    for offset in range(len(PAYLOAD)):
        bad = bytearray(PAYLOAD)
        bad[offset] ^= 1 << (offset % 8)
        with pytest.raises(FormatError, match="payload checksum"):
            header.check_payload(bad)


def test_a_truncated_region_is_too_short():
    good = region()
    assert {flaw_of(good[:length]) for length in (0, 1, 47, 48, 4095)} == {Flaw.SHORT}


@pytest.mark.parametrize(
    ("offset", "value", "flaw"),
    [
        (0, b"\x80\x04\x95pickl", Flaw.MAGIC),
        (8, b"\x02\x00", Flaw.VERSION),
        (8, b"\x00\x00", Flaw.VERSION),
        (10, b"\x01", Flaw.LENGTHS),
        (12, struct.pack("<I", 0), Flaw.LENGTHS),
        (12, struct.pack("<I", 4095), Flaw.LENGTHS),
        (12, struct.pack("<I", (1 << 20) + 4096), Flaw.LENGTHS),
        (12, struct.pack("<I", 8192), Flaw.SHORT),
        (16, struct.pack("<I", 4096), Flaw.LENGTHS),
        (16, struct.pack("<I", 3), Flaw.METADATA),
        (20, b"\x01", Flaw.LENGTHS),
        (24, struct.pack("<Q", 5001), Flaw.LENGTHS),
        (48, b"\xc1", Flaw.METADATA),
    ],
)
def test_a_sealed_header_that_makes_no_sense_is_refused_with_its_flaw(offset, value, flaw):
    assert flaw_of(resealed(region(), offset, value)) is flaw


@pytest.mark.parametrize(
    ("other", "stored", "flaw"),
    [
        (Block.of(BlockId("f" * 32, KEY), 5000, META), 9096, Flaw.OTHER_BLOCK),
        (Block.of(BlockId(BLOCK.namespace, block_key(hash_of(KEY), 0)), 5000, META), 9096, Flaw.OTHER_BLOCK),
        (Block.of(BLOCK.id, 4999, META), 9096, Flaw.OTHER_BLOCK),
        (BLOCK, 9095, Flaw.SHORT),
        (BLOCK, 9097, Flaw.LONG),
    ],
)
def test_a_header_is_checked_against_the_block_and_the_length(other, stored, flaw):
    with pytest.raises(FormatError) as caught:
        fs_format.decode(region()).check(other, stored)
    assert caught.value.flaw is flaw


def test_unknown_metadata_keys_are_ignored():
    data = region()
    length = struct.unpack_from("<I", data, 16)[0]
    record = msgspec.msgpack.decode(data[48 : 48 + length]) | {"colour": "blue"}
    more = msgspec.msgpack.encode(record)
    grown = resealed(data, 16, struct.pack("<I", len(more)))
    assert fs_format.decode(resealed(grown, 48, more)).block == BLOCK


def test_metadata_that_does_not_fit_is_refused():
    big = Block.of(BLOCK.id, 5000, BlockMeta(hashes=(1,), token_ids=tuple(range(300_000))))
    with pytest.raises(FormatError, match="too big"):
        region(big)


def test_metadata_without_a_msgpack_form_is_refused():
    odd = Block.of(BLOCK.id, 5000, BlockMeta(hashes=(2**64,)))
    with pytest.raises(FormatError, match="metadata"):
        region(odd)


@given(tokens=st.integers(0, 5000), payload=st.integers(1, 100_000))
def test_the_region_is_aligned_and_its_length_known_beforehand(tokens, payload):
    block = Block.of(BLOCK.id, payload, BlockMeta(hashes=(1,), token_ids=(99,) * tokens))
    data = region(block)
    assert len(data) % 4096 == 0
    assert len(data) == fs_format.header_bytes(block)
    assert fs_format.stored_bytes(block) == len(data) + -(-payload // 4096) * 4096
    assert fs_format.decode(data).block == block


def test_the_largest_header_that_is_taken_for_one_page_is_one():
    most = 2**63 - 1
    meta = BlockMeta(
        hashes=(2**64 - 1,),
        parent=2**64 - 1,
        token_ids=(70_000,) * ((fs_format.PLAIN_TOKEN_BYTES - 3) // 5),
        block_size=most,
        lora_id=most,
        spec_kind="\N{GRINNING FACE}" * 32,
        sliding_window=most,
    )
    block = Block.of(BlockId("f" * 32, block_key(bytes(64), 4 * 10**9 - 1)), most, meta, 2**31 - 1)
    assert fs_format.PLAIN_TOKEN_BYTES - 5 < len(block.tokens) <= fs_format.PLAIN_TOKEN_BYTES
    data = fs_format.encode(block, bytes(16))
    assert fs_format.header_bytes(block) == len(data) == fs_format.ALIGN
    assert data[-300:-8] == bytes(292), "there is room left"


@given(st.binary(max_size=9000))
def test_arbitrary_bytes_are_refused_and_nothing_else_is_raised(data):
    with pytest.raises(FormatError):
        fs_format.decode(data)


@given(st.binary(max_size=200))
def test_arbitrary_metadata_under_a_right_checksum_raises_only_format_errors(data):
    sealed = resealed(resealed(region(), 16, struct.pack("<I", len(data))), 48, data)
    with pytest.raises(FormatError):
        fs_format.decode(sealed)

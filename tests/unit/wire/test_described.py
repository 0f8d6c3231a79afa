"""Metadata that is kept packed leaves for journals and files with the bytes that it came with."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.model import Block, BlockId, BlockMeta, block_key
from kvtierd.wire.block_map import BlockMap
from kvtierd.wire.described import PackedMeta, packed_meta

encode = msgspec.msgpack.encode
hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)
names = st.none() | st.text(max_size=8)
parts = st.none() | st.tuples(st.text(max_size=4), st.integers(0, 9))
metas = st.builds(
    BlockMeta,
    hashes=st.lists(hashes, min_size=1, max_size=3).map(tuple),
    parent=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple),
    block_size=st.integers(0, 64),
    lora_id=st.none() | st.integers(0, 9),
    lora_name=names,
    extra_keys=st.none() | st.lists(parts, max_size=3).map(tuple),
    spec_kind=st.sampled_from([None, "full_attention", "mamba"]),
    sliding_window=st.none() | st.integers(1, 4096),
)


def block(meta=None, number=1, namespace="space", before=None):
    return Block.of(BlockId(namespace, block_key(bytes([number]))), 4096, meta, 2, before)


@given(metas)
def test_packed_metadata_has_the_very_bytes_of_what_was_stored(meta):
    one = block(meta)
    assert one.meta == meta
    assert encode(packed_meta(one)) == encode(meta)
    assert one == block(msgspec.msgpack.decode(encode(meta), type=BlockMeta))


def test_packed_and_plain_metadata_have_the_same_fields_in_the_same_order():
    assert PackedMeta.__struct_fields__ == BlockMeta.__struct_fields__
    assert packed_meta(block()) is None
    assert block().meta is None


@pytest.mark.parametrize("extra", [None, (None,)])
def test_what_blocks_have_in_common_is_held_once(extra):
    first, second = (block(BlockMeta(hashes=(n,), block_size=16, extra_keys=extra), n) for n in (1, 2))
    assert first.common is second.common
    assert block(number=3).common is block(number=4).common is not first.common


def test_a_parent_that_came_before_is_named_by_the_same_number():
    first = block(BlockMeta(hashes=(1 << 60,)))
    child = block(BlockMeta(hashes=(2,), parent=int(str(1 << 60))), 2, before=first)
    assert child.parent is first.told_as
    assert block(BlockMeta(hashes=(2,), parent=3), 2, before=first).parent == 3


def test_equal_keys_of_other_namespaces_are_other_blocks():
    blocks = [block(number=1), block(number=1, namespace="other"), block(number=2)]
    held = BlockMap(blocks)
    assert len(held) == 3
    assert [held.get(one.id) for one in blocks] == blocks
    assert held.pop(blocks[0]) is blocks[0]
    assert held.pop(blocks[0]) is None
    assert list(held) == [blocks[2], blocks[1]]
    assert held.get(BlockId("third", blocks[0].key)) is None

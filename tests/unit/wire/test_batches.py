"""Bytes made from templates are those that the encoder makes of the whole structs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Locality, Medium, TierEvent, block_key
from kvtierd.wire.announced import TierLabel
from kvtierd.wire.batches import encode_changes
from kvtierd.wire.frames import checked
from kvtierd.wire.kvevents import Form, encode_batch
from kvtierd.wire.projection import Projection, View
from kvtierd.wire.records import RecordWriter
from kvtierd.wire.templates import HASH, TOKENS, array_head, cut, in_a_row

encode = msgspec.msgpack.encode

hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)
extras = st.none() | st.just((None,)) | st.tuples(st.tuples(st.text(max_size=4), st.binary(max_size=4)))
alone = st.builds(
    BlockMeta,
    hashes=st.tuples(hashes),
    parent=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
    block_size=st.integers(0, 64),
    lora_id=st.none() | st.integers(0, 2),
    lora_name=st.sampled_from([None, "lora", "\u00c1\u00e9"]),
    extra_keys=extras,
    spec_kind=st.sampled_from([None, "full_attention", "mamba"]),
    sliding_window=st.none() | st.integers(1, 4096),
)
several = st.builds(
    BlockMeta, hashes=st.lists(hashes, min_size=2, max_size=2, unique=True).map(tuple), block_size=st.just(4)
)
blocks = st.builds(
    lambda space, key, group, meta, rank: Block.of(BlockId(space, block_key(key, group)), 4096, meta, rank),
    st.sampled_from(["one", "two"]),
    st.binary(min_size=1, max_size=32),
    st.integers(0, 1),
    st.none() | alone | alone | several,
    st.integers(0, 1),
)
labels = st.sampled_from(
    [TierLabel("cpu", Medium.CPU, None)]
    + [TierLabel(str(where), Medium.STORAGE, where) for where in Locality]
    + [TierLabel("object", Medium.STORAGE, None)]
)
events = st.builds(
    lambda kind, label, block: TierEvent(kind, *label, block), st.sampled_from(EventKind), labels, blocks
)
turns = st.lists(events, max_size=24)


@given(turns, st.sampled_from(Form), st.booleans(), st.integers(0, 3))
def test_a_batch_has_the_bytes_of_its_events(turn, form, tokens, rank):
    view = View(form=form, tokens=tokens)
    changes = Projection(view).apply(turn)
    whole = [change.to_wire(tokens) for change in changes]
    assert encode_changes(1.5, rank, changes, view) == encode_batch(1.5, whole, rank, form)


@given(turns)
def test_changes_that_readers_are_not_to_hear_are_left_out(turn):
    view = View(removals=False)
    changes = Projection(view).apply(turn)
    heard = [change.to_wire() for change in changes if change.block is not None]
    assert encode_changes(0, 0, changes, view) == encode_batch(0, heard, 0)


@given(turns, turns)
def test_a_record_has_the_bytes_of_its_entries(first, second):
    writer, tiers, spaces = RecordWriter(), dict[TierLabel, int](), dict[str, int]()
    for turn in (first, second):
        known = len(tiers), len(spaces)
        entries = [_entry(event, tiers, spaces) for event in turn]
        names = [*tiers][known[0] :], [*spaces][known[1] :]
        body = encode((1.5, entries, *names) if any(names) else (1.5, entries))
        assert writer.changes(1.5, turn) == checked(body)


def _entry(event, tiers, spaces):
    block = event.block
    tier = tiers.setdefault(TierLabel(event.tier, event.medium, event.locality), len(tiers))
    space = spaces.setdefault(block.namespace, len(spaces))
    kind = int(event.kind is EventKind.REMOVED)
    return kind, tier, space, block.key, block.payload_bytes, block.dp_rank, block.meta


def test_a_change_of_one_word_alone_takes_another_template():
    meta = BlockMeta(hashes=(1,), block_size=16, token_ids=(1, 2))
    other = msgspec.structs.replace(meta, spec_kind="mamba", lora_name="x", hashes=(2,))
    view = View()
    turn = [
        TierEvent(EventKind.STORED, *label, Block.of(BlockId("one", block_key(b"k", group)), 1, described, 0))
        for label in (TierLabel("a", Medium.CPU, None), TierLabel("b", Medium.STORAGE, Locality.LOCAL))
        for group in (0, 1)
        for described in (meta, other)
    ]
    changes = Projection(view).apply(turn)
    assert len(changes) == len(turn)
    whole = [change.to_wire() for change in changes]
    assert len({encode(event) for event in whole}) == len(turn)
    assert encode_changes(0, 0, changes, view) == encode_batch(0, whole, 0)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 65_535, 65_536])
def test_values_in_a_row_are_an_array_without_its_head(size):
    values = [None] * size
    assert bytes(array_head(size)) + in_a_row(values) == encode(values)


def test_a_template_is_cut_where_its_holes_are():
    parts = cut({"a": HASH, "b": 5, "c": [TOKENS]})
    assert in_a_row([parts[0], 7, parts[1], (8, 9), parts[2]]) == encode({"a": 7, "b": 5, "c": [(8, 9)]})
    assert [*map(bytes, cut({"a": 1}))] == [encode({"a": 1})]

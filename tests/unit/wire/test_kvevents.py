"""Event structs, their bytes, and what old and new readers make of them."""

import json
from pathlib import Path

import msgspec
import pytest

from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    block_key,
)
from kvtierd.wire.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Form,
    UnknownEvent,
    decode_batch,
    encode_batch,
    to_wire,
)

TS = 1700000000.5
VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "kv_events.json").read_text())["vectors"]
GOLDEN = {vector["name"]: bytes.fromhex(vector["hex"]) for vector in VECTORS}
ROOT = 0xF100000000000600


def block(event_hash=ROOT, *, parent=None, tokens=(6000, 6001, 6002, 6003), group=0, **meta):
    if isinstance(event_hash, int):
        key = block_key(event_hash.to_bytes(32, "big"), group)
    else:
        key = block_key(event_hash, group)
    described = BlockMeta(
        hashes=(event_hash,), parent=parent, token_ids=tokens, block_size=len(tokens), **meta
    )
    return Block.of(BlockId("ns", key), 4096, described)


def placeholder(event_hash, group=0):
    return Block.of(BlockId("ns", block_key(event_hash.to_bytes(32, "big"), group)), 4096)


def event(what, kind=EventKind.STORED, medium=Medium.CPU, locality=None, tier="t"):
    return TierEvent(kind, tier, medium, locality, what)


def wire(*events, form=Form.MAP, tokens=True):
    return encode_batch(TS, [w for e in events for w in to_wire(e, tokens=tokens)], 0, form)


def chain():
    return block(), block(ROOT + 1, parent=ROOT, tokens=(6004, 6005, 6006, 6007))


# -- golden bytes


def test_a_chain_of_cpu_stores_has_the_bytes_that_vllm_would_send():
    root, child = chain()
    assert wire(event(root), event(child)) == GOLDEN["cpu_chain_of_two"]


def test_a_block_of_several_hashes_is_announced_as_a_chain_of_single_blocks():
    chunk = Block.of(
        BlockId("ns", block_key(b"chunk")),
        4096,
        BlockMeta(hashes=(ROOT, ROOT + 1), token_ids=tuple(range(6000, 6008)), block_size=4),
    )
    assert wire(event(chunk)) == GOLDEN["cpu_chain_of_two"]
    removal = decode_batch(wire(event(chunk, EventKind.REMOVED))).events
    assert [e.block_hashes for e in removal] == [(ROOT + 1,), (ROOT,)], "leaf first"


def test_extra_keys_and_lora_pass_through_unchanged_each_block_its_own():
    """L41."""
    keys = (("adapter", ("image-1", 3), "salt"), None)
    chunk = Block.of(
        BlockId("ns", block_key(b"chunk")),
        4096,
        BlockMeta(
            hashes=(ROOT, ROOT + 1),
            token_ids=tuple(range(8)),
            block_size=4,
            lora_name="adapter",
            lora_id=7,
            extra_keys=keys,
        ),
    )
    first, second = decode_batch(wire(event(chunk))).events
    assert (first.lora_name, first.lora_id) == ("adapter", 7)
    assert first.extra_keys == (("adapter", ["image-1", 3], "salt"),)
    assert second.extra_keys == (None,)
    assert isinstance(hash(first), int)


def test_a_removal_has_the_bytes_that_vllm_would_send():
    stored = decode_batch(GOLDEN["cpu_stored_then_leaf_removed"]).events[0]
    leaf = block(stored.block_hashes[1])
    removal = to_wire(event(leaf, EventKind.REMOVED))
    assert encode_batch(TS, [stored, *removal], 0) == GOLDEN["cpu_stored_then_leaf_removed"]


def test_a_store_without_metadata_is_vllms_placeholder():
    """L14, L40: the fields say so; a removal agrees with the store on having a group."""
    hash_only = placeholder(0xF100000000000900)
    assert wire(event(hash_only)) == GOLDEN["cpu_placeholder"]
    captured = decode_batch(GOLDEN["engine_placeholder_group"]).events[0]
    assert to_wire(event(placeholder(captured.block_hashes[0])))[0] == captured
    (removal,) = to_wire(event(hash_only, EventKind.REMOVED))
    assert removal.group_idx == 0


def test_the_array_form_has_the_twelve_slots_of_vllm_0_23():
    first, second = decode_batch(GOLDEN["array_chain_of_two"]).events
    assert encode_batch(TS, [first, second], 0, Form.ARRAY) == GOLDEN["array_chain_of_two"]
    both = decode_batch(GOLDEN["array_stored_then_removed"]).events
    assert encode_batch(TS, both, 0, Form.ARRAY) == GOLDEN["array_stored_then_removed"]
    root, child = chain()
    built = decode_batch(wire(event(root), event(child), form=Form.ARRAY)).events
    assert built == decode_batch(wire(event(root), event(child))).events


def test_an_empty_batch_has_the_heartbeats_bytes():
    assert encode_batch(1700000000.5, [], 0) == GOLDEN["empty"]
    assert encode_batch(1700000000, [], 0)[1:2] == b"\xcb", "ts is a float even if the clock gave an int"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_every_known_schema_is_decoded_and_map_events_keep_their_bytes(vector):
    """L32: map and array events of vLLM 0.10 to 0.33."""
    payload = bytes.fromhex(vector["hex"])
    batch = decode_batch(payload)
    strange = [e for e in batch.events if isinstance(e, UnknownEvent)]
    assert bool(strange) == (vector["name"] == "unknown_event_type")
    again = decode_batch(encode_batch(batch.ts, [e for e in batch.events if e not in strange], 0))
    assert again.events == tuple(e for e in batch.events if e not in strange)
    canonical = {"cpu_local_two_hashes", "storage_local_two_hashes", "storage_remote_two_hashes", "ownership"}
    canonical |= {
        "storage_no_locality_two_hashes",
        "bytes_hash",
        "session_id",
        "lookahead",
        "all_blocks_cleared",
    }
    if vector["name"] in canonical:
        assert encode_batch(batch.ts, batch.events, 0) == payload


def test_what_decoding_finds_in_a_captured_engine_batch():
    local, remote = decode_batch(GOLDEN["engine_storage_local_and_remote"]).events
    assert (local.medium, local.locality) == ("STORAGE", "LOCAL")
    assert (remote.medium, remote.locality) == ("STORAGE", "REMOTE")
    assert local.token_ids == (5,) * 32
    assert any(e == AllBlocksCleared() for e in decode_batch(GOLDEN["engine_array_cleared"]).events)
    short = decode_batch(GOLDEN["array_7_slots"]).events[0]
    assert (short.medium, short.lora_name, short.group_idx) == ("CPU", None, None) or short.medium == "GPU"
    assert len(decode_batch(GOLDEN["engine_bytes_hashes"]).events[0].block_hashes[0]) == 32
    assert decode_batch(GOLDEN["negative_hash"]).events[0].block_hashes[0] < 0
    assert decode_batch(GOLDEN["dp_rank_nil"]).data_parallel_rank is None


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", msgspec.msgpack.encode("x")])
def test_what_is_no_batch_is_an_error_and_nothing_else(payload):
    with pytest.raises(msgspec.MsgspecError):
        decode_batch(payload)


@pytest.mark.parametrize(
    "odd", [1, [], ["BlockStored"], [5], {"type": 3}, {"type": "BlockRemoved"}, None, ["X", 1]]
)
def test_one_odd_event_does_not_cost_the_others(odd):
    payload = msgspec.msgpack.encode([TS, [odd, {"type": "AllBlocksCleared"}], 0])
    strange, good = decode_batch(payload).events
    assert isinstance(strange, UnknownEvent)
    assert good == AllBlocksCleared()
    assert isinstance(hash(strange), int)


# -- hashes


@pytest.mark.parametrize("value", [bytes(range(32)), (1 << 63) + 5, (1 << 64) - 1])
def test_hashes_keep_their_type_and_value(value):
    """L33: no sign flip, no change between bytes and integers, parents included."""
    child = block(value, parent=value)
    for kind in EventKind:
        (decoded,) = decode_batch(wire(event(child, kind))).events
        assert decoded.block_hashes == (value,)
        assert type(decoded.block_hashes[0]) is type(value)
    assert decode_batch(wire(event(child))).events[0].parent_block_hash == value


# -- medium and locality


@pytest.mark.parametrize("kind", list(EventKind))
@pytest.mark.parametrize("rich", [True, False], ids=["rich", "placeholder"])
@pytest.mark.parametrize("locality", [Locality.LOCAL, Locality.REMOTE, None])
@pytest.mark.parametrize("medium", list(Medium))
def test_medium_and_locality_reach_every_kind_of_event(medium, locality, rich, kind):
    """L35, L36: spelling frozen, absent when unset, never inferred from the medium."""
    what = block() if rich else placeholder(ROOT)
    raw = msgspec.msgpack.decode(wire(event(what, kind, medium, locality)))[1][0]
    assert raw["medium"] in {"CPU", "STORAGE"}
    assert raw["medium"] == medium.value
    assert raw.get("locality", "absent") == {None: "absent", Locality.LOCAL: "LOCAL"}.get(locality, "REMOTE")


def test_media_and_localities_are_spelt_as_vllm_spells_them():
    assert [m.value for m in Medium] == ["CPU", "STORAGE"]
    assert [loc.value for loc in Locality] == ["LOCAL", "REMOTE"]


@pytest.mark.parametrize("kind", list(EventKind))
def test_events_that_differ_only_in_locality_are_unequal_and_hash_differently(kind):
    variants = [to_wire(event(block(), kind, Medium.STORAGE, where))[0] for where in (None, *Locality)]
    assert len(set(variants)) == 3
    assert len({hash(variant) for variant in variants}) == 3


def test_the_invented_fields_of_vllm_are_never_set():
    raw = msgspec.msgpack.decode(wire(event(block(), locality=Locality.LOCAL)))[1][0]
    assert not raw.keys() & {"ownership", "session_id", "lookahead_token_ids"}


# -- schemas before locality, defined here as vLLM 0.24 had them


class OldBase(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class OldStored(OldBase, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class OldRemoved(OldBase, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[OldStored | OldRemoved]
    data_parallel_rank: int | None = None


class StoredWithoutLocality(OldStored, tag="BlockStored"):
    """vLLM 0.33 less locality, plus one unused field: msgspec picks the map header by their number."""

    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    another: str | None = None


@pytest.mark.parametrize("kind", list(EventKind))
def test_without_locality_the_bytes_are_those_of_a_schema_without_the_field(kind):
    payload = wire(event(block(spec_kind="sliding_window", sliding_window=64), kind))
    ts, events, rank = msgspec.msgpack.decode(
        payload, type=tuple[float, list[StoredWithoutLocality | OldRemoved], int]
    )
    assert msgspec.msgpack.encode((ts, events, rank)) == payload


@pytest.mark.parametrize("kind", list(EventKind))
def test_an_old_reader_decodes_new_messages_and_a_new_reader_old_ones(kind):
    new = wire(event(block(), kind, Medium.STORAGE, Locality.LOCAL))
    old = msgspec.msgpack.decode(new, type=OldBatch)
    assert (old.events[0].block_hashes, old.events[0].medium) == ([ROOT], "STORAGE")
    (read,) = decode_batch(msgspec.msgpack.encode(old)).events
    assert read.locality is None
    assert msgspec.structs.replace(read, locality="LOCAL") == decode_batch(new).events[0]


# -- groups and tokens


@pytest.mark.parametrize(
    ("group", "kind", "carried"),
    [(0, "full_attention", 0), (1, "sliding_window", 1), (0, None, None), (1, None, 1)],
)
def test_group_and_kind_come_together_and_a_removal_carries_the_group_if_the_store_did(group, kind, carried):
    """Without a kind the group is left out where its absence means the same (group 0)."""
    what = block(group=group, spec_kind=kind)
    (stored,) = to_wire(event(what))
    (removal,) = to_wire(event(what, EventKind.REMOVED))
    assert isinstance(stored, BlockStored)
    assert isinstance(removal, BlockRemoved)
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (carried, kind)
    assert removal.group_idx == carried


def test_without_tokens_no_token_id_is_in_any_byte_but_the_block_size_is_true():
    """L125, L40."""
    tokens = (0xABCDE1, 0xABCDE2, 0xABCDE3, 0xABCDE4)
    payload = wire(event(block(tokens=tokens)), tokens=False)
    assert b"\xab\xcd" not in payload
    (stored,) = decode_batch(payload).events
    assert (stored.token_ids, stored.block_size) == ((), 4)

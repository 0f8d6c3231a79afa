"""What an engine's batches mean, with batches that real engines sent (vLLM 0.22 to 0.33)."""

import json
from pathlib import Path

import msgspec
import pytest

from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, UnknownEvent, encode_batch
from kvtierd.wire.projection import Projection, View
from kvtierd.wire.relay import MAX_HASHES, EngineCache

GOLDEN = {
    entry["what"]: bytes.fromhex(entry["payload"])
    for entry in json.loads((Path(__file__).parents[2] / "golden/vllm_engine_batches.json").read_text())
}
H = 0xF100000000000000


def stored(*numbers, parent=None, medium="GPU", tokens=4, **fields):
    return BlockStored(
        block_hashes=tuple(H + n for n in numbers),
        parent_block_hash=None if parent is None else H + parent,
        token_ids=tuple(range(tokens * len(numbers))),
        block_size=tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        **fields,
    )


def removed(*numbers, medium="GPU", **fields):
    return BlockRemoved(tuple(H + n for n in numbers), medium, **fields)


def told(cache, *events, rank=0):
    """What a cache tells of a batch with these events."""
    return cache.take(encode_batch(1.0, events, rank)).events


def golden(name, cache=None):
    """What a cache tells of a real batch."""
    return (cache or EngineCache()).take(GOLDEN[name])


@pytest.mark.parametrize("name", GOLDEN)
def test_every_real_batch_is_told_as_events_that_all_readers_take(name):
    rank, events = golden(name)
    assert rank == 0
    for event in events:
        assert event.block_hashes
        assert all(isinstance(h, int) and 0 <= h < 1 << 64 for h in event.block_hashes)
        assert event.medium in ("GPU", "CPU", "STORAGE")
        assert event.ownership is None
        if isinstance(event, BlockStored):
            assert event.session_id is event.lookahead_token_ids is None
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)


def test_a_real_store_is_told_field_by_field_as_it_came():
    _, (event,) = golden("salted store")
    assert event.block_hashes == (15335340950225324668, 13414269482645957683, 5823703527357732859)
    assert (event.parent_block_hash, event.block_size, event.medium) == (None, 32, "GPU")
    assert event.token_ids == tuple(range(10, 106))
    assert [list(key or ()) for key in event.extra_keys] == [["tenant-A"], [], []]
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")


@pytest.mark.parametrize(("array", "as_map"), [("array store", "salted store")])
def test_an_array_of_vllm_0_22_is_told_as_the_map_of_later_versions(array, as_map):
    """The hashes differ (another version's), all else is equal."""
    _, (old,) = golden(array)
    _, (new,) = golden(as_map)
    same = {"block_hashes": (), "extra_keys": None}
    assert msgspec.structs.replace(old, **same) == msgspec.structs.replace(new, **same)


def test_hashes_of_32_bytes_become_the_numbers_that_vllm_sends_by_default():
    numbers = golden("salted store").events[0].block_hashes
    assert golden("hashes of 32 bytes").events[0].block_hashes == numbers


def test_a_negative_hash_becomes_its_twos_complement():
    """SGLang sends signed numbers; vllm-router refuses the whole batch."""
    payload = encode_batch(1.0, [msgspec.structs.replace(stored(1), block_hashes=(-2,))], 0)
    assert EngineCache().take(payload).events[0].block_hashes == ((1 << 64) - 2,)


def test_ownership_session_and_lookahead_are_stripped():
    cache = EngineCache()
    extra = {"ownership": "mine", "session_id": "s", "lookahead_token_ids": ((1,),)}
    assert told(cache, stored(1, **extra)) == [stored(1)]
    assert told(cache, removed(1, ownership="mine")) == [removed(1, group_idx=0)]
    assert golden("ownership").events[0].locality == "REMOTE"


def test_cleared_takes_back_what_this_engine_has_on_the_device_leaf_first_and_nothing_else():
    cache = EngineCache()
    told(cache, stored(1, 2), stored(9, medium="CPU"), stored(3, parent=2))
    other_rank = told(cache, stored(1), rank=1)
    assert other_rank == [stored(1)]
    events = told(cache, AllBlocksCleared(), stored(5))
    assert events == [removed(3, 2, 1, group_idx=0), stored(5)]
    assert {key.medium for key in cache.known if key.rank == 0 and key.hash != H + 5} == {"CPU"}
    assert {key.hash for key in cache.known if key.rank == 1} == {H + 1}


@pytest.mark.parametrize("name", ["cleared, then stored", "array cleared"])
def test_a_real_reset_is_told_as_removals_then_the_new_store(name):
    cache = EngineCache()
    told(cache, stored(1, 2))
    first, second = golden(name, cache).events
    assert first == removed(2, 1, group_idx=0)
    assert len(second.block_hashes) == 6


def test_an_event_of_an_unknown_type_is_counted_and_costs_no_other():
    cache = EngineCache()
    body = [1.0, [{"type": "NewThing", "x": 1}, msgspec.to_builtins(stored(1)), ["Odd", 2], 7], 0]
    assert cache.take(msgspec.msgpack.encode(body)).events == [stored(1)]
    assert cache.counts["unknown_events"] == 3
    assert isinstance(UnknownEvent("NewThing"), UnknownEvent)


@pytest.mark.parametrize(
    "event", [stored(), stored(1, parent=1), stored(1, 2, 1), stored(2, 1, parent=1)], ids=str
)
def test_an_empty_or_self_referencing_store_is_refused_and_clears_nothing(event):
    """L123."""
    cache = EngineCache()
    told(cache, stored(7))
    assert told(cache, event, stored(8)) == [stored(8)]
    assert {key.hash for key in cache.known} == {H + 7, H + 8}


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"a": 1}), b"\x00" * 99])
def test_a_batch_that_is_none_is_counted_and_clears_nothing(payload):
    """L123."""
    cache = EngineCache()
    told(cache, stored(7))
    assert cache.take(payload) is None
    assert (cache.counts["malformed"], len(cache.known)) == (1, 1)


def test_a_store_whose_tokens_cannot_be_dealt_out_is_a_placeholder_for_each_hash():
    """A sliding window skips blocks but sends all tokens."""
    cache = EngineCache()
    event = msgspec.structs.replace(stored(5, 6, parent=1, group_idx=1), token_ids=tuple(range(24)))
    events = told(cache, event)
    assert [(e.block_hashes, e.parent_block_hash, e.token_ids, e.block_size) for e in events] == [
        ((H + 5,), None, (), 0),
        ((H + 6,), None, (), 0),
    ]
    assert told(cache, removed(5, group_idx=1)) == [removed(5, group_idx=1)]


def test_a_removal_of_what_was_never_announced_is_counted_and_not_told():
    cache = EngineCache()
    told(cache, stored(1))
    assert told(cache, removed(1, 2), removed(1)) == [removed(1, group_idx=0)]
    assert cache.counts["unknown_removals"] == 2


@pytest.mark.parametrize(
    ("given", "said", "expected"), [(None, 3, 3), (None, None, 0), (5, 3, 5), (5, None, 5)]
)
def test_the_rank_is_the_batchs_unless_the_relay_has_one(given, said, expected):
    """L119."""
    assert EngineCache(given).take(encode_batch(1.0, [stored(1)], said)).rank == expected


def test_what_one_engine_may_have_is_bounded():
    cache = EngineCache(max_blocks=3)
    assert told(cache, stored(1, 2), stored(3, 4)) == [stored(1, 2)]
    assert (len(cache.known), cache.counts["overflowed"]) == (2, 2)


def test_forgetting_takes_all_back_for_each_rank_in_pieces():
    cache = EngineCache()
    count = 2 * MAX_HASHES + 1
    for number in range(count):
        told(cache, stored(number, parent=number - 1 if number else None))
    told(cache, stored(1), rank=2)
    first, second = cache.forget()
    assert (first.rank, second.rank, len(cache.known)) == (0, 2, 0)
    assert [len(event.block_hashes) for event in first.events] == [MAX_HASHES, MAX_HASHES, 1]
    assert [h - H for event in first.events for h in event.block_hashes] == list(reversed(range(count)))


def test_a_device_without_a_name_is_the_gpu_and_odd_localities_are_left_out():
    cache = EngineCache()
    assert told(cache, stored(1, medium=None, locality="local")) == [stored(1)]
    assert told(cache, removed(1, medium="gpu")) == [removed(1, group_idx=0)]


def test_what_is_told_leaves_a_reader_with_what_is_known():
    """Through the projection that all audiences use."""
    cache, projection = EngineCache(), Projection(View())
    for name in GOLDEN:
        rank, events = golden(name, cache)
        projection.inject(rank, events)
    announced = {(event_hash, place.group, place.medium) for event_hash, place in projection.announced}
    assert announced == {(key.hash, key.group, key.medium) for key in cache.known}
    for rank, events in cache.forget():
        projection.inject(rank, events)
    assert not projection.announced

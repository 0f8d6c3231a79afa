"""What a restarted daemon knows of an engine by its records."""

import random

import pytest

from kvtierd.wire.kvevents import BlockRemoved, BlockStored, encode_batch
from kvtierd.wire.projection import Projection
from kvtierd.wire.relay import EngineCache
from kvtierd.wire.relay_records import Kind, Record, decode, digest, encode, keep, recover

H = 0xF100000000000000


def stored(*numbers, parent=None):
    return BlockStored(
        tuple(H + n for n in numbers),
        None if parent is None else H + parent,
        tuple(range(2 * len(numbers))),
        2,
        None,
        "GPU",
        None,
        extra_keys=tuple((str(n),) for n in numbers),
        group_idx=0,
    )


def removed(*numbers):
    return BlockRemoved(tuple(H + n for n in numbers), "GPU", 0)


def batch(number, at, *events, rank=0):
    return Record(Kind.BATCH, number, at, encode_batch(at, events, rank))


def data(*records):
    return b"".join(map(encode, records))


def hashes(told):
    return [h - H for _, events in told for event in events for h in event.block_hashes]


def test_records_are_read_back_up_to_the_first_that_is_torn():
    records = [batch(number, 1.0, stored(number)) for number in range(3)]
    whole = data(*records)
    assert list(decode(whole)) == records
    for cut in range(len(data(*records[:2])), len(whole)):
        assert list(decode(whole[:cut])) == records[:2]
    broken = bytearray(whole)
    broken[len(data(records[0])) + 30] ^= 1
    assert list(decode(bytes(broken))) == records[:1]
    assert list(decode(b"")) == []


def test_what_was_told_long_ago_is_known_and_not_told_again():
    cache = EngineCache()
    last = batch(1, 1.0, stored(3, parent=2), removed(1))
    found = recover(
        data(batch(0, 0.0, stored(1, 2)), last, Record(Kind.AT, 1, 9.0, digest(last.body))), cache, tail=1.0
    )
    assert sorted(hashes(found.seeds)) == [2, 3]
    assert (found.place, found.doubts) == ((1, digest(last.body)), [])
    assert {key.hash - H for key in cache.known} == {2, 3}


def test_what_was_told_in_the_last_moments_is_told_again():
    """A removal, and a store: whether they got out is open."""
    cache = EngineCache()
    found = recover(data(batch(0, 0.0, stored(1, 2)), batch(1, 5.0, removed(1), stored(3))), cache, tail=1.0)
    assert sorted(hashes(found.seeds)) == [1, 2, 3]
    for heard in ([1, 2], [1, 2, 3], [2], [2, 3]):
        reader = {H + n for n in heard}
        for _, events in found.doubts:
            for event in events:
                (reader.update if isinstance(event, BlockStored) else reader.difference_update)(
                    event.block_hashes
                )
        assert reader == {H + 2, H + 3}


def test_what_was_taken_back_is_gone():
    cache = EngineCache()
    records = (batch(0, 0.0, stored(1, 2)), Record(Kind.FORGOTTEN, 0, 1.0, b""), batch(0, 2.0, stored(5)))
    found = recover(data(*records, Record(Kind.AT, 0, 9.0, b"d")), cache, tail=1.0)
    assert hashes(found.seeds) == [5]
    assert recover(data(*records[:2]), EngineCache(), tail=0.0).place is None


@pytest.mark.parametrize("seed", range(10))
def test_a_file_written_anew_says_the_same_in_every_field(seed):
    rng, cache = random.Random(seed), EngineCache()
    for number in range(60):
        first = rng.randrange(1000)
        events = [
            stored(
                *range(first, first + rng.randrange(1, 4)), parent=first - 1 if rng.random() < 0.5 else None
            )
        ]
        if cache.known and rng.random() < 0.5:
            events.append(removed(rng.choice(list(cache.known)).hash - H))
        cache.take(encode_batch(1.0, events, rng.randrange(2)))
        assert number >= 0
    other = EngineCache()
    found = recover(b"".join(keep(list(cache.known.items()), (7, b"digest"), 1.0)), other, tail=1.0)
    assert (found.place, found.doubts) == ((7, b"digest"), [])
    assert folded(cache) == folded(other)


def folded(cache):
    """What every audience would say of all that is known."""
    projection = Projection()
    found = recover(b"".join(keep(list(cache.known.items()), None, 1.0)), EngineCache(), tail=0.0)
    for rank, events in found.seeds:
        projection.inject(rank, events)
    return {key: change.to_wire() for key, change in projection.announced.items()}

"""The numbered log: limits, the ring, and replays from before it."""

import random

import pytest

from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Medium, TierEvent, block_key
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.wire import stream
from kvtierd.wire.folded import Folded
from kvtierd.wire.kvevents import decode_batch
from kvtierd.wire.projection import Projection, View, runs_of
from kvtierd.wire.stream import END, Limits, StreamLog, encode_sequence, split

BASE = 0xF100000000000000


def block(number, rank=0, tokens=4):
    parent = None if number % 50 == 0 else BASE + number - 1
    meta = BlockMeta(
        hashes=(BASE + number,), parent=parent, token_ids=tuple(range(tokens)), block_size=tokens
    )
    return Block.of(BlockId("ns", block_key(number.to_bytes(8, "big"))), 4096, meta, rank)


def event(number, kind=EventKind.STORED, rank=0):
    return TierEvent(kind, "cpu", Medium.CPU, None, block(number, rank))


class Source:
    """A projection and a log, as the publisher joins them."""

    def __init__(self, first=0, **limits):
        known = {"max_tombstones": limits.pop("max_tombstones", 1 << 18)}
        view = limits.pop("view", View())
        self.projection = Projection(view)
        self.log = StreamLog(Limits(**{"ring_batches": 10, "ring_bytes": 1 << 30, **limits}), view, **known)
        self.next = first

    def publish(self, *events):
        sent = []
        for run in runs_of(self.projection.apply(events)) or [(0, [])]:
            sent.append((self.next, self.log.append(self.next, float(self.next), *run)))
            self.next += 1
        return sent

    def resident(self):
        return {h for told in self.projection.resident() for h in told.block_hashes}

    def fill(self, turns, seed=1):
        rng = random.Random(seed)
        held = []
        for turn in range(turns):
            if len(held) > 30 and rng.random() < 0.5:
                gone = [held.pop(rng.randrange(len(held))) for _ in range(3)]
                self.publish(*(event(n, EventKind.REMOVED, n // 50 % 2) for n in gone))
            else:
                new = range(turn * 3, turn * 3 + 3)
                held.extend(new)
                self.publish(*(event(n, rank=n // 50 % 2) for n in new))


def joined(log, start=0, consumer=None):
    """Feed a replay to a consumer, as the socket part would."""
    consumer = consumer or ReferenceConsumer()
    consumer.wanted = start
    for number, payload in log.since(start):
        again = consumer.replay(number, payload)
        if again is not None:
            return joined(log, again, consumer)
    consumer.replay_ended()
    return consumer


def known(consumer):
    return {entry.hash for entry in consumer.resident}


def test_numbers_are_eight_bytes_big_endian_below_2_to_63():
    assert encode_sequence(258) == b"\0\0\0\0\0\0\1\2"
    assert (-1).to_bytes(8, "big", signed=True) == END
    for bad in (-1, 1 << 63, (1 << 64) - 1):
        with pytest.raises(ValueError, match="outside"):
            encode_sequence(bad)


def test_numbers_must_follow_each_other():
    source = Source()
    source.publish(event(1))
    with pytest.raises(ValueError, match="does not follow"):
        source.log.append(5, 0.0, 0, ())


def test_batches_keep_within_events_and_bytes():
    changes = Projection().apply([event(n) for n in range(10_000)])
    parts = list(split(changes))
    assert [len(part) for part in parts] == [4096, 4096, 1808]
    assert [change for part in parts for change in part] == changes
    assert all(sum(c.size for c in part) <= 4096 for part in split(changes, max_bytes=4096))
    assert len(list(split(changes[:3], max_bytes=1))) == 3, "a single event that is too big still goes"
    assert list(split([])) == []


def test_a_replay_inside_the_ring_is_byte_equal_to_what_was_sent():
    source = Source()
    sent = [source.publish(event(n))[0] for n in range(8)]
    assert list(source.log.since(5)) == sent[5:]
    assert list(source.log.since(0)) == sent
    assert list(source.log.since(8)) == []
    assert list(StreamLog(Limits(1, 1)).since(0)) == []


def test_the_ring_is_bounded_in_batches_and_in_bytes():
    source = Source(ring_batches=3)
    for number in range(10):
        source.publish(event(number))
    assert source.log.statistics().ring_batches == 3
    assert source.log.statistics().folded == 7
    tight, whole = Source(ring_batches=1000, ring_bytes=5_000), Source(ring_batches=1000)
    for number in range(100):
        tight.publish(event(number))
        whole.publish(event(number))
    assert 1 < tight.log.statistics().ring_batches < 10
    assert tight.log.statistics().ring_bytes <= 10_000
    assert joined(tight.log).resident == joined(whole.log).resident


def test_late_join_after_the_ring_wrapped_gives_the_present_state_without_a_hole():
    """L22, L23, L25: parents first, numbers unbroken up to the live ones."""
    source = Source()
    source.fill(400)
    replay = list(source.log.since(0))
    assert [number for number, _ in replay] == list(range(source.next))
    seen = set()
    for _, payload in replay[:-10]:
        for told in decode_batch(payload).events:
            parent = told.parent_block_hash
            assert parent is None or parent in seen or parent not in source.resident()
            seen.update(told.block_hashes)
    consumer = joined(source.log)
    assert known(consumer) == source.resident()
    assert {entry.dp_rank for entry in consumer.resident} == {0, 1}
    for number in range(2000, 2100):
        ((sequence, payload),) = source.publish(event(number))
        assert consumer.feed(sequence, payload) is None
    assert known(consumer) == source.resident()
    assert consumer.counts["gaps"] == 0


def test_a_long_gap_is_made_good_removals_included():
    """L18: the reader comes back long after the ring moved on."""
    source = Source()
    source.fill(60)
    consumer = joined(source.log)
    left_at = consumer.expected
    source.fill(300, seed=2)
    assert left_at < source.log._ring[0].sequence
    joined(source.log, left_at, consumer)
    assert known(consumer) == source.resident()
    assert consumer.counts["resets"] == 0


def test_where_removals_were_forgotten_a_checking_reader_starts_over():
    source = Source(max_tombstones=5)
    source.fill(60)
    consumer = joined(source.log)
    left_at = consumer.expected
    source.fill(300, seed=2)
    assert source.log.statistics().tombstones == 5
    assert source.log.statistics().forgotten > 0
    assert next(source.log.since(left_at))[0] == left_at + 1, "a hole that shows"
    joined(source.log, left_at, consumer)
    assert consumer.counts["resets"] == 1
    assert known(consumer) == source.resident()


def test_a_replay_sees_the_state_of_its_request_whatever_is_published_meanwhile():
    source = Source()
    source.fill(200)
    expected = source.resident()
    replay = source.log.since(0)
    first = [next(replay) for _ in range(3)]
    source.fill(200, seed=3)
    consumer = ReferenceConsumer()
    consumer.wanted = 0
    for number, payload in [*first, *replay]:
        assert consumer.replay(number, payload) is None
    assert known(consumer) == expected


def test_a_repeated_request_gives_the_same_bytes():
    """L24."""
    source = Source()
    source.fill(100)
    assert list(source.log.since(0)) == list(source.log.since(0))


def test_numbers_of_an_earlier_run_are_answered_with_state_and_empty_batches():
    source = Source(first=500)
    source.fill(100)
    for start in (0, 123, 499):
        numbers = [number for number, _ in source.log.since(start)]
        assert numbers == list(range(start, source.next))
    assert known(joined(source.log)) == source.resident()


def test_a_start_far_from_zero_is_not_filled_from_zero():
    source = Source(first=10 * stream.FILL_LIMIT)
    source.fill(100)
    numbers = [number for number, _ in source.log.since(0)]
    assert numbers == list(range(numbers[0], source.next))
    assert len(numbers) < 100
    assert known(joined(source.log)) == source.resident()


def test_a_large_state_keeps_the_batch_limits():
    source = Source(ring_batches=1)
    changes = [event(n) for n in range(20_000)]
    for at in range(0, 20_000, 4000):
        source.publish(*changes[at : at + 4000])
    source.publish()
    batches = [decode_batch(payload).events for _, payload in source.log.since(0)]
    assert max(map(len, batches)) <= 4096
    assert sum(map(len, batches)) == 20_000
    assert len(batches) == 6


def test_without_tokens_a_replay_from_the_base_has_none_either():
    source = Source(view=View(tokens=False))
    source.fill(50)
    events = [told for _, payload in source.log.since(0) for told in decode_batch(payload).events]
    assert events
    assert not any(getattr(told, "token_ids", ()) for told in events)


def test_a_change_that_is_told_again_has_the_number_of_the_last_time():
    one, two = Projection(View()).apply([event(1), event(2)])
    folded = Folded(10)
    for number, change in enumerate([one, two, one]):
        folded.fold(number, 1.0, 0, [change])
    for start, latest in ((1, [two, one]), (2, [one]), (3, [])):
        assert list(folded.changed_since(start)[1].values()) == latest

"""The reference consumer's rules, without sockets."""

import random
import sys

import pytest

from kvtierd.core.effects import InventoryEntry
from kvtierd.core.model import block_key
from kvtierd.testing.consumer import ReferenceConsumer, Residency, residencies
from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch

H = 0xF100000000000000


def stored(number, medium="CPU", group=0, locality=None):
    return BlockStored((H + number,), None, (1, 2), 2, None, medium, None, group_idx=group, locality=locality)


def removed(number, medium="CPU", group=0, locality=None):
    return BlockRemoved((H + number,), medium, group, locality)


def batch(*events, rank=0):
    return encode_batch(1.5, events, rank)


def following(*payloads):
    consumer = ReferenceConsumer()
    for number, payload in enumerate(payloads):
        assert consumer.feed(number, payload) is None
    return consumer


def test_residency_is_kept_by_medium_locality_group_and_rank():
    """L12: no removal is total."""
    consumer = following(
        batch(stored(1), stored(1, "STORAGE", locality="LOCAL"), stored(1, group=1)),
        batch(stored(1), rank=1),
        batch(removed(1)),
        batch(removed(1, "STORAGE", locality="REMOTE"), removed(1, "STORAGE")),
    )
    assert consumer.resident == {
        Residency(H + 1, 0, "STORAGE", "LOCAL", 0),
        Residency(H + 1, 1, "CPU", None, 0),
        Residency(H + 1, 0, "CPU", None, 1),
    }
    assert consumer.counts["unknown_removals"] == 2


def test_an_absent_group_is_group_zero():
    assert following(batch(stored(1, group=None)), batch(removed(1, group=0))).resident == set()


def test_cleared_takes_the_ranks_entries_only():
    consumer = following(batch(stored(1)), batch(stored(2), rank=1), batch(AllBlocksCleared()))
    assert {entry.hash for entry in consumer.resident} == {H + 2}


def test_unknown_removals_are_counted_and_cost_nothing():
    """L31."""
    consumer = ReferenceConsumer()
    payloads = [batch(*(removed(n) for n in range(at, at + 1000))) for at in range(0, 100_000, 1000)]
    consumer.feed(0, payloads[0])
    before = sys.getsizeof(consumer.resident) + len(consumer.counts)
    for number, payload in enumerate(payloads[1:], 1):
        consumer.feed(number, payload)
    assert consumer.counts["unknown_removals"] == 100_000
    assert sys.getsizeof(consumer.resident) + len(consumer.counts) == before


def test_lost_messages_are_replayed_and_nothing_is_cleared():
    """L18, L31: every gap is seen, and none costs the state."""
    log = [batch(stored(n), *([removed(n - 7)] if n > 7 else [])) for n in range(1, 2001)]
    rng = random.Random(5)
    consumer = ReferenceConsumer()
    for number, payload in enumerate(log):
        if rng.random() < 0.01:
            continue
        wanted = consumer.feed(number, payload)
        while wanted is not None:
            for missed in range(wanted, number + 1):
                assert consumer.replay(missed, log[missed]) is None
            wanted = consumer.replay_ended()
    assert consumer.counts["gaps"] > 5
    assert consumer.counts["resets"] == 0
    assert consumer.resident == following(*log[: consumer.expected]).resident


def test_live_messages_wait_for_the_end_of_a_replay():
    log = [batch(stored(n)) for n in range(6)]
    consumer = following(*log[:2])
    assert consumer.feed(3, log[3]) == 2
    assert consumer.feed(4, log[4]) == 2
    assert consumer.replay(2, log[2]) is None
    assert len(consumer.resident) == 3, "not yet"
    assert consumer.replay_ended() is None
    assert len(consumer.resident) == 5
    assert consumer.feed(5, log[5]) is None


def test_repeats_are_skipped():
    consumer = following(batch(stored(1)), batch(removed(1)))
    assert consumer.feed(0, batch(stored(1))) is None
    assert consumer.resident == set()
    assert consumer.counts["repeats"] == 1


def test_a_late_joiner_asks_from_zero_and_takes_what_there_is():
    consumer = ReferenceConsumer()
    assert consumer.feed(70, batch(stored(3))) == 0
    assert consumer.replay(68, batch(stored(1))) is None
    assert consumer.replay(69, batch(stored(2))) is None
    assert consumer.replay(70, batch(stored(3))) is None
    assert consumer.replay_ended() is None
    assert len(consumer.resident) == 3
    assert consumer.expected == 71


def test_a_hole_in_a_replay_means_starting_over():
    consumer = following(batch(stored(1)))
    assert consumer.feed(9, batch(stored(9))) == 1
    assert consumer.replay(5, batch(stored(5))) == 0
    assert consumer.resident == set()
    assert consumer.replay(5, batch(stored(5))) is None
    for number in range(6, 10):
        assert consumer.replay(number, batch(stored(number))) is None
    assert consumer.replay_ended() is None
    assert {entry.hash - H for entry in consumer.resident} == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("hidden", [frozenset(), frozenset({"lake"})])
def test_the_inventory_folds_as_the_stream_does(hidden):
    def entry(tier, medium, locality, number, group=0):
        return InventoryEntry(
            tier, medium, locality, block_key(bytes([number]), group), (H + number, H - number), 0
        )

    entries = [
        entry("cpu", "CPU", None, 1),
        entry("fs", "STORAGE", None, 1),
        entry("lake", "STORAGE", None, 1),
        entry("lake", "STORAGE", None, 2),
    ]
    assert len(residencies(entries, hidden=hidden)) == (4 if hidden else 6)
    assert Residency(H + 1, 0, "CPU", None, 0) in residencies(entries, hidden=hidden)

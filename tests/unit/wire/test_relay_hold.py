"""Tier events wait for the engine's own, each not longer than stated, and never change their order."""

import random

import pytest

from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Medium, TierEvent, block_key
from kvtierd.wire import hold as hold_module
from kvtierd.wire.hold import Hold
from kvtierd.wire.kvevents import BlockRemoved, BlockStored

H = 0xF100000000000000


def event(*numbers, kind=EventKind.STORED, medium=Medium.CPU, rank=0):
    hashes = tuple(H + n for n in numbers)
    meta = BlockMeta(hashes=hashes, parent=None, token_ids=(1,) * len(hashes), block_size=1)
    block = Block.of(BlockId("ns", block_key(numbers[0].to_bytes(8, "big"))), 4096, meta, rank)
    return TierEvent(kind, "cpu", medium, None, block)


def gpu(*numbers, medium="GPU"):
    return [BlockStored(tuple(H + n for n in numbers), None, (), 0, None, medium, None)]


@pytest.fixture
def hold():
    made = Hold()
    made.follow(0, 0.02)
    return made


def test_a_committed_block_waits_for_its_engines_event(hold):
    assert hold.offer([event(1), event(2)], 0.0, committed=True) == []
    hold.note(0, gpu(1))
    assert hold.release(0.001) == [event(1)]
    hold.note(0, gpu(2))
    assert hold.release(0.002) == [event(2)]
    assert (hold.counts["held"], hold.counts["timeouts"], hold.longest) == (2, 0, 0.002)


def test_it_waits_no_longer_than_stated(hold):
    hold.offer([event(1)], 1.0, committed=True)
    assert hold.deadline == 1.02
    assert hold.release(1.0199) == []
    assert hold.release(1.02) == [event(1)]
    assert hold.counts["timeouts"] == 1


def test_a_block_whose_engine_spoke_before_does_not_wait(hold):
    hold.note(0, gpu(1))
    assert hold.offer([event(1)], 0.0, committed=True) == [event(1)]


def test_a_block_that_left_the_device_has_to_be_announced_anew(hold):
    hold.note(0, gpu(1))
    hold.note(0, [BlockRemoved((H + 1,), "GPU", 0)])
    assert hold.offer([event(1)], 0.0, committed=True) == []


def test_a_chunk_waits_for_all_of_its_hashes(hold):
    hold.offer([event(1, 2)], 0.0, committed=True)
    hold.note(0, gpu(2))
    assert hold.release(0.0) == []
    hold.note(0, gpu(1))
    assert hold.release(0.0) == [event(1, 2)]


@pytest.mark.parametrize(
    "other",
    [event(1, kind=EventKind.REMOVED), event(1, medium=Medium.STORAGE), event(1, rank=1)],
    ids=["a removal", "another tier's store", "a rank without a relay"],
)
def test_what_no_engine_event_precedes_does_not_wait(hold, other):
    assert hold.offer([other], 0.0, committed=True) == [other]


def test_a_promotion_does_not_wait(hold):
    assert hold.offer([event(1)], 0.0, committed=False) == [event(1)]


def test_an_engine_that_is_no_longer_heard_is_not_waited_for(hold):
    hold.offer([event(1)], 0.0, committed=True)
    hold.follow(0, None)
    assert hold.release(0.0) == [event(1)]
    assert hold.counts["timeouts"] == 0


def test_an_event_of_another_medium_is_not_the_one_waited_for(hold):
    hold.note(0, gpu(1, medium="CPU"))
    assert hold.offer([event(1)], 0.0, committed=True) == []


def test_more_than_the_bound_lets_all_go(hold, monkeypatch):
    monkeypatch.setattr(hold_module, "MAX_HELD", 10)
    many = [event(n) for n in range(11)]
    assert hold.offer(many, 0.0, committed=True) == many
    assert hold.counts["overflows"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_order_stays_and_nothing_is_late(seed):
    rng, hold = random.Random(seed), Hold()
    for rank in (0, 1):
        hold.follow(rank, 0.02)
    now, given, got, came = 0.0, [], [], []
    for number in range(300):
        now += rng.random() * 0.01
        batch = [
            event(
                rng.randrange(40),
                number + 100,
                rank=rng.randrange(3),
                medium=rng.choice(list(Medium)),
                kind=rng.choice(list(EventKind)),
            )
            for _ in range(rng.randrange(4))
        ]
        given += batch
        came += [now] * len(batch)
        got += hold.offer(batch, now, committed=rng.random() < 0.7)
        hold.note(rng.randrange(2), gpu(rng.randrange(40), number + 100))
        got += hold.release(now)
        assert all(now - when < 0.02 for when in came[len(got) :])
    got += hold.flush(now)
    assert got == given
    assert len(hold) == 0

"""L108: a hit that takes longer to load than it may is declined as a miss."""

from __future__ import annotations

import pytest

from kvtierd.core.effects import Loaded
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import KeyState
from kvtierd.core.pace import DECLINED_SECONDS
from kvtierd.core.stimuli import Load
from kvtierd.testing.rig import fs_spec, key

COLD, MISS = KeyState.COLD, KeyState.MISS


def cold(rig, *numbers):
    rig.store(*numbers)
    rig.evict(*numbers, tiers=("cpu",))


def slow_load(rig, seconds, *numbers):
    """Load blocks from storage that takes so long; drop them from the pool again."""
    rig.hold = True
    number = rig.ask(Load, keys=tuple(map(key, numbers)), deadline=1000.0)
    rig.now += seconds
    rig.hold = False
    rig.run_held()
    got = rig.answer(number, Loaded)
    rig.release(got.lease)
    rig.evict(*numbers, tiers=("cpu",))
    return len(got.keys)


@pytest.fixture
def rig(rigged):
    """One second per hit is the most; the tier gives a block in half a second."""
    rig = rigged(64, [fs_spec("disk", max_load_time=1.0)])
    cold(rig, *range(8))
    assert rig.lookup(*range(8)).states == (COLD,) * 8, "nothing is known of its pace"
    assert slow_load(rig, 2.0, 0, 1, 2, 3) == 4
    return rig


def test_what_comes_in_time_is_a_hit_and_the_rest_is_not(rig):
    assert rig.ladder.statistics()["tiers"][1]["read_bytes_per_second"] == 2 * UNIT
    assert rig.lookup(*range(8)).states == (COLD,) * 2 + (MISS,) * 6
    assert rig.lookup(*range(8)).prefix == 2
    assert len(rig.load(*range(8)).keys) == 2
    assert rig.ladder.stack.by_name["disk"].counters["declined_slow"] > 0


def test_reads_under_way_count_against_the_bound(rig):
    rig.hold = True
    first = rig.ask(Load, keys=(key(0), key(1)), deadline=10.0)
    assert rig.lookup(*range(2, 8)).prefix == 0
    rig.hold = False
    rig.run_held()
    assert len(rig.answer(first, Loaded).keys) == 2


def test_a_slower_tier_is_passed_over_for_one_that_has_the_block_too(rigged):
    rig = rigged(64, [fs_spec("tape", max_load_time=1.0), fs_spec("disk")])
    cold(rig, *range(8))
    assert slow_load(rig, 80.0, *range(8)) == 8
    got = rig.load(*range(8))
    assert got.sources == ("disk",) * 8


def test_a_tier_that_is_too_slow_is_tried_again_with_one_block(rig):
    slow_load(rig, 50.0, 0)
    assert rig.lookup(*range(8)).prefix == 0
    rig.now += DECLINED_SECONDS + 1
    assert rig.lookup(*range(8)).prefix == 8
    rig.hold = True
    number = rig.ask(Load, keys=tuple(map(key, range(8))), deadline=10.0)
    assert rig.lookup(*range(1, 8)).prefix == 0, "until it is known how it went"
    rig.now += 0.001
    rig.hold = False
    rig.run_held()
    assert len(rig.answer(number, Loaded).keys) == 1
    assert rig.lookup(*range(8)).prefix == 8, "it is fast by now"


def test_without_a_bound_nothing_is_declined(rigged):
    rig = rigged(64, [fs_spec("disk")])
    cold(rig, *range(8))
    slow_load(rig, 1000.0, *range(8))
    assert rig.lookup(*range(8)).states == (COLD,) * 8

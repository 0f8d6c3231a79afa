"""The gate in front of a secondary: breaker, window, backlog; and what the ladder does with it."""

import pytest

from kvtierd.core.effects import Loaded, Read, Write
from kvtierd.core.gate import BACKLOG_HIGH, FAULTS, FIRST_PAUSE, LONGEST_PAUSE, TARGET, Breaker, Gate
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import BlockId, KeyState, hash_of
from kvtierd.core.stimuli import Load, Stalled, Status
from kvtierd.testing.rig import LAYOUT, fs_spec, key


def condition(rig, tier=1):
    return rig.ladder.statistics()["tiers"][tier]["condition"]


def test_the_breaker_opens_after_faults_in_a_row_and_closes_with_one_success():
    breaker = Breaker()
    for _ in range(FAULTS - 1):
        breaker.ended(0.0, "disk on fire")
    breaker.ended(0.0, None)
    for _ in range(FAULTS):
        assert breaker.allows(0.0)
        breaker.ended(0.0, "disk on fire")
    assert not breaker.allows(FIRST_PAUSE - 0.01)
    assert breaker.reason == "disk on fire"
    assert breaker.allows(FIRST_PAUSE)
    breaker.started()
    assert not breaker.allows(FIRST_PAUSE), "half open: one at a time"
    breaker.ended(FIRST_PAUSE, None)
    assert breaker.closed
    assert breaker.reason == ""


def test_the_pause_doubles_up_to_a_minute():
    breaker, now = Breaker(), 0.0
    pauses = []
    for _ in range(FAULTS + 10):
        breaker.ended(now, "x")
        if breaker.until is not None:
            pauses.append(breaker.until - now)
            now = breaker.until
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert max(pauses) == LONGEST_PAUSE


def test_the_window_shrinks_when_writes_are_slow_and_stays_in_between():
    gate = Gate(budget=1000)
    gate.wrote(1000, 4 * TARGET)
    assert gate.write_limit() == 500
    gate.wrote(500, 1.5 * TARGET)
    assert gate.write_limit() == 500, "hysteresis"
    for _ in range(10):
        gate.wrote(gate.write_limit(), TARGET / 2)
    assert gate.write_limit() == 1000


def test_a_backlog_is_refused_until_it_is_half_done():
    gate = Gate(budget=1000)
    gate.wrote(100, 1.0)
    assert gate.pace == 100
    assert gate.takes_more(int(100 * BACKLOG_HIGH))
    assert not gate.takes_more(int(100 * BACKLOG_HIGH) + 1)
    assert not gate.takes_more(int(100 * BACKLOG_HIGH) - 1), "hysteresis"
    assert gate.takes_more(int(100 * BACKLOG_HIGH / 2))


def test_a_fast_tier_that_turns_slow_is_known_to_be_slow_after_one_write():
    gate = Gate(budget=10**9)
    for _ in range(50):
        gate.wrote(10**8, 0.1)
    gate.wrote(10**6, 10.0)
    assert gate.pace < 10**6


def test_a_slow_tier_drops_cascades_and_nothing_else_and_recovers(rigged):
    """L60"""
    rig = rigged(64, [fs_spec("slow", budget=8 * UNIT), fs_spec("fast")])
    rig.op_seconds = 5.0
    rig.store(0)
    rig.op_seconds = 0.001
    rig.hold = True
    for number in range(1, 60):
        assert rig.store(number) == (key(number),), "CPU stores are never delayed"
        fast = [effect for effect in rig.held if effect.__class__ is Write and effect.tier == "fast"]
        for effect in fast:
            rig.held.remove(effect)
            rig.run(effect)
    slow = rig.ladder.statistics()["tiers"][1]
    assert slow["condition"] == "slow"
    assert slow["counters"]["cascade_dropped_slow"] > 40
    assert rig.ladder.stack.by_name["slow"].in_flight <= 8 * UNIT
    rig.hold = False
    rig.run_held()
    assert {hash_of(number)[-1] for tier, number in rig.inventory() if tier == "fast"} == set(range(60))
    for number in range(100, 110):
        rig.store(number)
    assert condition(rig) == "ok"
    assert ("slow", key(109)) in rig.inventory()


def test_a_tier_that_fails_is_left_alone_and_tried_again(rigged):
    """L43, L84: degraded with the reason, the CPU tier untouched, recovery by itself."""
    rig = rigged(32, [fs_spec()])
    rig.judge = lambda op, tier, bid: Status.FAILED if op == "write" else Status.OK
    for number in range(10):
        assert rig.store(number) == (key(number),)
    assert condition(rig) == "degraded"
    writes = sum(isinstance(effect, Write) for effect in rig.effects)
    rig.store(20)
    assert sum(isinstance(effect, Write) for effect in rig.effects) == writes, "not asked while open"
    rig.judge = lambda op, tier, bid: Status.OK
    rig.advance(FIRST_PAUSE)
    assert condition(rig) == "ok"
    assert ("disk", key(20)) in rig.inventory(), "what waited is written"


def test_a_failed_block_is_tried_once_more_and_then_dropped_for_that_tier(rigged):
    rig = rigged(8, [fs_spec()])
    tries = []
    rig.judge = lambda op, tier, bid: tries.append(op) or Status.FAILED
    rig.store(1)
    assert tries == ["write", "write"]
    assert rig.ladder.statistics()["tiers"][1]["counters"]["cascade_dropped_failed"] == 1


def test_a_stalled_read_answers_its_loads_and_keeps_its_slot(rigged):
    """L82"""
    rig = rigged(1, [fs_spec()])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    rig.hold = True
    number = rig.ask(Load, keys=(key(1),), deadline=60.0)
    (read,) = [effect for effect in rig.held if isinstance(effect, Read)]
    rig.feed(Stalled(read.op))
    assert rig.answer(number, Loaded).keys == ()
    assert condition(rig) == "stalled"
    assert rig.lookup(1).states == (KeyState.MISS,), "nothing is asked of a stalled tier"
    assert rig.store(2) == (), "its thread may still write into the slot"
    rig.run_held()
    rig.hold = False
    assert rig.store(2) == (key(2),)
    rig.evict(2, tiers=("cpu",))
    assert rig.lookup(1).states == (KeyState.COLD,)


def test_no_space_costs_the_oldest_blocks_of_the_tier_not_the_newest(rigged):
    """L66: others fill the storage; the cache yields."""
    rig = rigged(16, [fs_spec()])
    for number in range(6):
        rig.store(number)
    full = {"left": 1}

    def judge(op, tier, block_id):
        if op == "write" and full["left"]:
            full["left"] -= 1
            return Status.FULL
        return Status.OK

    rig.judge = judge
    rig.store(10)
    disk = {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "disk"}
    assert disk == {2, 3, 4, 5, 10}


def test_an_undeletable_victim_keeps_its_room_and_the_next_one_goes(rigged):
    """L68"""
    rig = rigged(16, [fs_spec(blocks=3)])
    stubborn = BlockId(LAYOUT.namespace(), key(0))
    rig.judge = lambda op, tier, bid: Status.FAILED if (op, bid) == ("delete", stubborn) else Status.OK
    for number in range(5):
        rig.store(number)
    assert {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "disk"} == {3, 4}
    assert len(rig.storage["disk"]) == 3, "never over the limit"
    assert rig.ladder.statistics()["tiers"][1]["counters"]["undeletable"] == 1
    rig.judge = lambda op, tier, bid: Status.OK
    rig.advance(60.0)
    rig.store(5)
    assert {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "disk"} == {3, 4, 5}


def test_when_nothing_can_be_deleted_stores_are_refused_without_spinning(rigged):
    """L68"""
    rig = rigged(16, [fs_spec(blocks=2)])
    rig.judge = lambda op, tier, bid: Status.FAILED if op == "delete" else Status.OK
    for number in range(8):
        rig.store(number)
    assert len(rig.storage["disk"]) == 2
    assert rig.ladder.statistics()["tiers"][1]["counters"]["cascade_dropped_no_room"] > 0


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_stalled_operation_that_ends_well_reopens_the_tier(rigged, op):
    rig = rigged(4, [fs_spec()])
    if op == "read":
        rig.store(1)
        rig.evict(1, tiers=("cpu",))
    rig.hold = True
    if op == "read":
        rig.ask(Load, keys=(key(1),), deadline=60.0)
    else:
        rig.store(1)
    (effect,) = rig.held
    rig.feed(Stalled(effect.op))
    assert condition(rig) == "stalled"
    rig.hold = False
    rig.run_held()
    assert condition(rig) == "ok"
    rig.feed(Stalled(effect.op))
    assert condition(rig) == "ok", "a stall reported too late is nothing"

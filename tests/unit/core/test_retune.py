"""Other limits for a ladder that runs: they bind at once, and what is too much leaves bit by bit."""

import pytest

from kvtierd.core.geometry import UNIT
from kvtierd.core.model import EventKind
from kvtierd.core.stimuli import PrepareStore, Retune, TierLimits
from kvtierd.core.upkeep import TRIM_BATCH
from kvtierd.testing.rig import fs_spec, key

MANY = 3 * TRIM_BATCH


def retune(rig, *, capacity=None, budget=1 << 30, ttl=None, max_load_time=None, job=60.0, leases=100):
    limits = TierLimits(capacity, budget, ttl, max_load_time)
    rig.feed(Retune({"disk": limits}, job_ttl=job, lease_ttl=job, max_leases=leases))


def test_a_lowered_capacity_trims_in_portions_and_tells_each_removal(rigged):
    rig = rigged(MANY, [fs_spec()])
    rig.store(*range(1, MANY + 1))
    tier = rig.ladder.stack.by_name["disk"]
    before = len(rig.events)
    rig.hold = True
    retune(rig, capacity=10 * UNIT)
    assert len(tier.blocks) == MANY - TRIM_BATCH, "one portion in this turn"
    rig.hold = False
    rig.run_held()
    assert tier.used <= 10 * UNIT
    gone = rig.events[before:]
    assert {(event.kind, event.tier) for event in gone} == {(EventKind.REMOVED, "disk")}
    assert len(gone) == MANY - 10
    assert tier.counters["evictions"] == MANY - 10


def test_stores_go_on_while_a_tier_shrinks(rigged):
    rig = rigged(2 * MANY, [fs_spec()])
    rig.store(*range(1, MANY + 1))
    rig.hold = True
    retune(rig, capacity=10 * UNIT)
    rig.store(10_000)
    assert rig.ladder.stack.by_name["disk"].counters["cascade_dropped_no_room"] == 0
    rig.hold = False
    rig.run_held()
    assert ("disk", key(10_000)) in rig.inventory()


def test_a_ttl_that_is_new_begins_now_for_what_is_there_and_ends_with_its_removal(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2, chain=False)
    rig.advance(1000.0)
    retune(rig, ttl=10.0)
    rig.advance(0.1)
    rig.advance(9.0)
    assert ("disk", key(1)) in rig.inventory()
    rig.advance(2.0)
    assert not any(tier == "disk" for tier, _ in rig.inventory())
    rig.store(3)
    retune(rig, ttl=None)
    rig.advance(1000.0)
    assert ("disk", key(3)) in rig.inventory()


def test_a_shorter_ttl_holds_for_what_is_older(rigged):
    rig = rigged(8, [fs_spec(ttl=1000.0)])
    rig.store(1)
    rig.advance(20.0)
    retune(rig, ttl=10.0)
    rig.advance(0.1)
    assert ("disk", key(1)) not in rig.inventory()


@pytest.mark.parametrize("leases", [1, 100])
def test_other_bounds_hold_for_the_next_request(rigged, leases):
    rig = rigged(8, [fs_spec()])
    retune(rig, leases=leases, job=5.0)
    rig.prepare([key(1)])
    number = rig.ask(PrepareStore, keys=(key(2),))
    assert (type(rig.answers[number]).__name__ == "Refused") is (leases == 1)
    rig.advance(6.0)
    assert not rig.ladder.sessions.jobs, "the job's time was the new one"


def test_budget_and_load_time_reach_the_gate(rigged):
    rig = rigged(8, [fs_spec()])
    retune(rig, budget=UNIT, max_load_time=0.5)
    tier = rig.ladder.stack.by_name["disk"]
    assert tier.gate.write_limit() == UNIT
    assert tier.loading.bound == 0.5

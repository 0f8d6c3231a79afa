"""Secondaries: cascade, bounded capacity, scans, events with locality."""

import pytest

from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId, KeyState, Locality, Scope, hash_of
from kvtierd.core.stimuli import Found, FoundBlock, Status
from kvtierd.testing.rig import LAYOUT, fs_spec, key, meta


def found(number, parent=None):
    block = Block.of(BlockId(LAYOUT.namespace(), key(number)), UNIT, meta(number, parent))
    return FoundBlock(block, UNIT)


@pytest.mark.parametrize("locality", [None, *Locality])
@pytest.mark.parametrize("rich", [True, False])
def test_locality_of_the_tier_file_reaches_every_storage_event(rigged, locality, rich):
    """L35 (the core's part)"""
    rig = rigged(4, [fs_spec("disk", locality=locality), fs_spec("lake", locality=locality)])
    rig.commit(rig.prepare([key(1)], [meta(1) if rich else None]))
    rig.evict(1)
    by_tier = {
        tier: {event.locality for event in rig.events if event.tier == tier}
        for tier in ("cpu", "disk", "lake")
    }
    assert by_tier == {"cpu": {None}, "disk": {locality}, "lake": {locality}}
    assert [event.medium.value for event in rig.events] == [
        "CPU",
        "STORAGE",
        "STORAGE",
        "CPU",
        "STORAGE",
        "STORAGE",
    ]


def test_a_tier_stays_within_its_capacity_and_evicts_leaves_of_the_oldest_chain(rigged):
    rig = rigged(32, [fs_spec(blocks=6)])
    for chain in range(5):
        rig.store(chain * 10, chain * 10 + 1, chain * 10 + 2)
        assert len(rig.storage["disk"]) <= 6
    disk = {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "disk"}
    assert {40, 41, 42} <= disk
    assert rig.story().index(("removed", "disk", 2)) < rig.story().index(("removed", "disk", 0))


def test_a_failed_write_announces_nothing_and_is_not_a_hit(rigged):
    """L08, L09"""
    rig = rigged(4, [fs_spec()])
    rig.judge = lambda op, tier, bid: Status.FAILED if op == "write" and bid.key == key(2) else Status.OK
    rig.store(1, 2, 3)
    assert ("stored", "disk", 2) not in rig.story()
    rig.evict(1, 2, 3, tiers=("cpu",))
    assert rig.lookup(1, 2, 3).states == (KeyState.COLD, KeyState.MISS, KeyState.COLD)


def test_a_slow_tier_holds_no_more_of_the_pool_than_its_budget(rigged):
    """L60 (first part)"""
    rig = rigged(8, [fs_spec(budget=2 * UNIT)])
    rig.hold = True
    for number in range(40):
        assert rig.store(number) == (key(number),)
    assert rig.ladder.stack.by_name["disk"].in_flight <= 2 * UNIT


def test_a_block_evicted_while_it_is_written_is_deleted_and_never_announced(rigged):
    rig = rigged(4, [fs_spec()])
    rig.hold = True
    rig.store(1)
    rig.evict(1)
    rig.run_held()
    rig.run_held()
    assert [entry for entry in rig.story() if entry[1] == "disk"] == []
    assert rig.storage["disk"] == {}


def test_a_block_stored_again_while_its_deletion_runs_reaches_the_tier(rigged):
    """L45 (one kind): pending is not never."""
    rig = rigged(4, [fs_spec()])
    rig.store(1)
    rig.hold = True
    rig.evict(1)
    rig.store(1)
    rig.hold = False
    rig.run_held()
    assert ("disk", key(1)) in rig.inventory()
    assert len(rig.storage["disk"]) == 1


def test_a_store_scoped_to_cpu_stays_there_until_another_asks_for_more(rigged):
    """L45"""
    rig = rigged(4, [fs_spec()])
    rig.commit(rig.prepare([key(1)], scope=Scope(store_to=())))
    assert ("disk", key(1)) not in rig.inventory()
    rig.prepare([key(1)])
    assert ("disk", key(1)) in rig.inventory()


def test_a_store_of_a_block_that_is_being_promoted_still_reaches_the_other_tier(rigged):
    """L45"""
    rig = rigged(4, [fs_spec("near"), fs_spec("far")])
    rig.commit(rig.prepare([key(1)], scope=Scope(store_to=("far",))))
    rig.evict(1, tiers=("cpu",))
    rig.hold = True
    rig.lookup(1, promote=True)
    assert [skip.reason.value for skip in rig.prepare([key(1)]).skipped] == ["pending"]
    rig.hold = False
    rig.run_held()
    rig.advance(0.1)
    assert ("near", key(1)) in rig.inventory()


def test_storage_residency_survives_a_second_store_to_cpu(rigged):
    """L03"""
    rig = rigged(4, [fs_spec()])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    rig.store(1)
    rig.evict(1, tiers=("disk",))
    assert rig.story()[-1] == ("removed", "disk", 1)
    assert rig.story().count(("stored", "disk", 1)) == 1
    assert rig.load(1).sources == ("cpu",)


def test_found_blocks_are_hits_at_once_and_announced_root_first_at_the_end(rigged):
    rig = rigged(4, [fs_spec()], scanned=False)
    rig.feed(Found("disk", [found(2, 1), found(3, 2)]))
    assert rig.lookup(2).states == (KeyState.COLD,)
    rig.feed(Found("disk", [found(1)]))
    assert rig.story() == []
    rig.feed(Found("disk", (), last=True))
    assert rig.story() == [("stored", "disk", 1), ("stored", "disk", 2), ("stored", "disk", 3)]
    rig.storage["disk"] = {item.block.id: item.block for item in [found(1), found(2, 1), found(3, 2)]}
    rig.load(1, 2)
    assert rig.events[-1].block.meta == meta(2, 1), "L13: a promoted block is described by its header"


def test_a_smaller_limit_at_restart_trims_the_oldest(rigged):
    rig = rigged(4, [fs_spec(blocks=2)], scanned=False)
    rig.feed(Found("disk", [found(1), found(2), found(3), found(4)], last=True))
    assert rig.inventory() == {("disk", key(3)), ("disk", key(4))}


def test_a_block_gone_before_the_scan_ended_is_not_announced(rigged):
    rig = rigged(4, [fs_spec()], scanned=False)
    rig.feed(Found("disk", [found(1)]))
    rig.evict(1)
    rig.feed(Found("disk", [found(1)], last=True))
    assert rig.story() == []


def test_a_block_found_gone_is_a_miss_and_a_removal(rigged):
    """L75 (the core's part)"""
    rig = rigged(4, [fs_spec()])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    rig.storage["disk"].clear()
    assert rig.load(1).keys == ()
    assert rig.story()[-1] == ("removed", "disk", 1)
    assert rig.lookup(1).states == (KeyState.MISS,)

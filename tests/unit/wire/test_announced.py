"""What readers know, and the difference that a restart tells them."""

import pytest

from kvtierd.core.model import Block, BlockId, EventKind, Locality, Medium, TierEvent
from kvtierd.testing.rig import key, meta
from kvtierd.wire.announced import Announced, History, TierLabel

CPU = TierLabel("cpu", Medium.CPU, None)
DISK = TierLabel("disk", Medium.STORAGE, Locality.LOCAL)
LAKE = TierLabel("lake", Medium.STORAGE, None)
TIERS = (CPU, DISK, LAKE)


def block(number, parent=None, **fields):
    return Block.of(BlockId("space", key(number)), 4096, meta(number, parent), **fields)


def stored(label, *blocks):
    return [TierEvent(EventKind.STORED, *label, each) for each in blocks]


def removed(label, *blocks):
    return [TierEvent(EventKind.REMOVED, *label, each) for each in blocks]


def history(*entries, doubts=(), whole=True):
    """A history of (label, block...) entries."""
    told = {label: {each.id: each for each in blocks} for label, *blocks in entries}
    return History(told, list(doubts), whole)


def restarted(past, tiers=TIERS):
    announced = Announced(tiers, past)
    return announced, announced.begin()


A, B, C = block(1), block(2, 1), block(3, 2)


def test_with_nothing_before_changes_pass_as_they_are():
    announced, told = restarted(History())
    assert told == ([], [])
    events = [*stored(CPU, A, B), *stored(DISK, A), *removed(CPU, B)]
    assert announced.advance(events) == ([], events)
    assert len(announced) == 2
    assert announced.holding(CPU, A.id) is A
    assert announced.holding(CPU, B.id) is None


def test_the_pools_blocks_are_taken_back_leaf_first_before_any_store():
    announced, told = restarted(history((DISK, A), (CPU, A, B, C)))
    assert told.seeds == [*stored(DISK, A), *stored(CPU, A, B, C)]
    assert told.events == removed(CPU, C, B, A)
    assert announced.advance(stored(CPU, A)).events == stored(CPU, A)


def test_what_the_scan_finds_again_is_told_to_nobody():
    announced, told = restarted(history((DISK, A, B)))
    assert told.events == []
    again = [block(1), block(2, 1)]
    assert announced.advance(stored(DISK, *again), scanned=["disk"]) == ([], [])
    assert (announced.confirmed, announced.unconfirmed) == (2, 0)
    assert announced.advance(removed(DISK, again[1])).events == removed(DISK, B)


def test_what_the_scan_did_not_find_is_taken_back_when_it_ends_before_its_stores():
    announced, _ = restarted(history((DISK, A, B, C)))
    new = block(4)
    told = announced.advance(stored(DISK, A, new), scanned=["disk"])
    assert told == ([], [*removed(DISK, C, B), *stored(DISK, new)])
    assert len(announced) == 2


def test_an_empty_scan_takes_all_back_and_probes_tell_again():
    announced, _ = restarted(history((LAKE, A, B)))
    assert announced.advance([], scanned=["lake"]).events == removed(LAKE, B, A)
    assert announced.advance(stored(LAKE, A)).events == stored(LAKE, A)


def test_tiers_do_not_wait_for_each_other():
    announced, _ = restarted(history((DISK, A), (LAKE, A)))
    assert announced.advance([], scanned=["disk"]).events == removed(DISK, A)
    assert announced.unconfirmed == 1
    assert announced.advance(stored(LAKE, A), scanned=["lake"]).events == []


def test_a_block_that_leaves_before_the_scan_ends_is_taken_back_once():
    announced, _ = restarted(history((DISK, A, B)))
    assert announced.advance(removed(DISK, B)).events == removed(DISK, B)
    assert announced.advance(stored(DISK, A), scanned=["disk"]).events == []


@pytest.mark.parametrize(
    "other",
    [block(2, 7), block(2, 1, dp_rank=3), Block.of(B.id, 4096, None)],
    ids=["parent", "rank", "placeholder"],
)
def test_a_block_that_reads_differently_now_is_removed_as_it_was_told_then_stored(other):
    announced, _ = restarted(history((DISK, A, B)))
    told = announced.advance(stored(DISK, A, other), scanned=["disk"])
    assert told == ([], [*removed(DISK, B), *stored(DISK, other)])


def test_blocks_told_anew_are_removed_leaf_first():
    announced, _ = restarted(history((DISK, A, B)))
    changed = [block(1, 7), block(2, 8)]
    told = announced.advance(stored(DISK, *changed), scanned=["disk"])
    assert told.events == [*removed(DISK, B, A), *stored(DISK, *changed)]


@pytest.mark.parametrize("tiers", [(CPU, LAKE), (CPU, DISK._replace(locality=Locality.REMOTE), LAKE)])
def test_a_tier_that_left_or_changed_its_label_is_taken_back_with_the_old_one(tiers):
    announced, told = restarted(history((DISK, A, B), (LAKE, A)), tiers)
    assert told.events == removed(DISK, B, A)
    assert announced.holding(DISK, A.id) is None
    if len(tiers) == 3:
        assert announced.advance(stored(tiers[1], A)).events == stored(tiers[1], A)
        assert announced.holding(tiers[1], A.id) is A


def test_changes_of_the_last_moments_are_taken_back_and_told_again_when_found():
    gone = block(9)
    past = history((CPU, A), (DISK, A, B, C), doubts=[(DISK, C), (DISK, gone), (CPU, A)])
    announced, told = restarted(past)
    assert told.seeds == [*stored(CPU, A), *stored(DISK, A, B, C), *stored(DISK, gone)]
    assert told.events == [*removed(DISK, gone), *removed(CPU, A), *removed(DISK, C)]
    found = announced.advance(stored(DISK, A, B, block(3, 2)), scanned=["disk"])
    assert found.events == stored(DISK, block(3, 2))


def test_a_doubt_about_a_block_that_was_stored_anew_concerns_both():
    old, new = block(2, 7), block(2, 8)
    past = history((DISK, A, new), doubts=[(DISK, old), (DISK, new)])
    announced, told = restarted(past)
    assert told.seeds == [*stored(DISK, A, new), *stored(DISK, old)]
    assert told.events == [*removed(DISK, old), *removed(DISK, new)]
    assert announced.advance(stored(DISK, A, new), scanned=["disk"]).events == stored(DISK, new)


def test_without_a_record_what_a_first_scan_finds_is_removed_then_stored():
    announced, told = restarted(None)
    assert told == ([], [])
    assert announced.advance(stored(CPU, A)) == ([], stored(CPU, A)), "the pool is new"
    told = announced.advance(stored(DISK, A, B), scanned=["disk"])
    assert told == (stored(DISK, A, B), [*removed(DISK, B, A), *stored(DISK, A, B)])
    later = announced.advance(stored(DISK, C))
    assert later == ([], stored(DISK, C)), "after the scan all is known"


def test_a_record_that_may_lack_its_end_is_taken_back_whole_and_doubted():
    announced, told = restarted(history((CPU, A), (DISK, A, B), whole=False))
    assert told.events == [*removed(CPU, A), *removed(DISK, B, A)]
    told = announced.advance(stored(DISK, A, C), scanned=["disk"])
    assert told == (stored(DISK, A, C), [*removed(DISK, C, A), *stored(DISK, A, C)])


def test_changes_that_are_none_are_swallowed_and_counted():
    announced, _ = restarted(History())
    announced.advance(stored(CPU, A))
    assert announced.advance([*stored(CPU, A), *removed(CPU, B)]) == ([], [])
    assert (announced.repeated, announced.unmatched) == (1, 1)


def test_a_found_block_that_says_the_same_is_replaced_by_the_one_that_is_known():
    """One description in memory, not two."""
    announced, _ = restarted(history((DISK, A, B)))
    assert announced.known("disk", block(1)) is A
    other = block(2, 7)
    assert announced.known("disk", other) is other
    assert announced.known("lake", other) is other


def test_a_pool_that_survived_is_found_again_like_any_tier():
    announced = Announced(TIERS, history((CPU, A, B, C), (DISK, A)), pool_survived=True)
    assert announced.begin().events == []
    assert announced.advance(stored(CPU, A, B)).events == []
    assert announced.advance([], scanned=["cpu"]).events == removed(CPU, C)
    assert announced.confirmed == 2
    assert announced.unconfirmed == 1  # the disk's


def test_a_pool_that_survived_its_record_is_removed_then_stored():
    announced = Announced(TIERS, None, pool_survived=True)
    announced.begin()
    assert announced.advance(stored(CPU, A)) == (stored(CPU, A), [*removed(CPU, A), *stored(CPU, A)])
    assert announced.advance(stored(CPU, B), scanned=["cpu"]).events[-1:] == stored(CPU, B)
    assert announced.advance(stored(CPU, C)).events == stored(CPU, C)

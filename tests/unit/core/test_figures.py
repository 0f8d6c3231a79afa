"""What is counted: hits by the tier that had the block, each question once, and why blocks left (L133)."""

import pytest

from kvtierd.core.stimuli import Load, Prefetch, Status
from kvtierd.testing.rig import fs_spec, key


def cold(rig, *numbers):
    rig.store(*numbers)
    rig.evict(*numbers, tiers=("cpu",))


def figures(rig):
    """Return hits and misses by tier, and the keys that were asked for, found nowhere and asked again."""
    report = rig.ladder.statistics()
    tiers = {tier["name"]: (tier["hits"], tier["misses"]) for tier in report["tiers"]}
    return tiers, tuple(report["lookups"].values())


def test_a_promoted_block_is_a_hit_of_its_tier_once_and_of_the_pool_from_then_on(rigged):
    rig = rigged(8, [fs_spec()])
    cold(rig, 1, 2)
    rig.hold = True
    for _ in range(3):  # asked again and again while it is read
        rig.lookup(1, 2, 3, promote=True)
    rig.hold = False
    rig.run_held()
    rig.lookup(1, 2, 3, promote=True, lease=1.0)
    assert figures(rig) == ({"cpu": (0, 3), "disk": (2, 1)}, (3, 1, 9))
    rig.lookup(1, 2, 3)
    assert figures(rig) == ({"cpu": (2, 4), "disk": (2, 2)}, (6, 2, 9))


def test_a_lookup_that_a_load_follows_counts_once(rigged):
    rig = rigged(8, [fs_spec()])
    cold(rig, 1, 2)
    rig.hold = True
    rig.lookup(1, 2, promote=True)
    rig.ask(Load, keys=(key(1), key(2)), deadline=1.0)
    rig.hold = False
    rig.run_held()
    rig.lookup(1, 2)
    assert figures(rig)[0] == {"cpu": (2, 2), "disk": (2, 0)}


def test_what_was_prefetched_counts_for_its_tier_at_its_first_use(rigged):
    rig = rigged(8, [fs_spec()])
    cold(rig, 1)
    rig.ask(Prefetch, keys=(key(1),))
    rig.lookup(1, 1)
    assert figures(rig)[0] == {"cpu": (1, 1), "disk": (1, 0)}, "the second naming finds it in the pool"
    rig.lookup(1)
    assert figures(rig)[0] == {"cpu": (2, 1), "disk": (1, 0)}


def test_a_promotion_that_nobody_read_in_time_is_counted_and_forgotten(rigged):
    rig = rigged(8, [fs_spec()])
    cold(rig, 1)
    rig.lookup(1, promote=True)
    rig.advance(10.0)
    rig.lookup(1)
    assert figures(rig)[0] == {"cpu": (1, 1), "disk": (1, 0)}
    assert rig.ladder.statistics()["given_up"]["promotions_unread"] == 1
    assert not rig.ladder.loads.promotion.counted


def test_a_failed_promotion_leaves_nothing_to_count_later(rigged):
    rig = rigged(8, [fs_spec()])
    cold(rig, 1)
    rig.judge = lambda op, tier, block: Status.FAILED if op == "read" else Status.OK
    rig.lookup(1, promote=True)
    assert not rig.ladder.loads.promotion.counted
    rig.judge = lambda op, tier, block: Status.OK
    rig.lookup(1)
    assert figures(rig)[0] == {"cpu": (0, 2), "disk": (2, 0)}


@pytest.mark.parametrize(
    ("tier", "why", "do"),
    [
        ("cpu", "capacity", lambda rig: rig.store(5, 6, 7, 8, chain=False)),
        ("cpu", "cleared", lambda rig: rig.evict(1, tiers=("cpu",))),
        ("disk", "cleared", lambda rig: rig.reset()),
        ("disk", "capacity", lambda rig: rig.store(5, 6, 7, 8, chain=False)),
        ("disk", "ttl", lambda rig: rig.advance(1000.0)),
        ("disk", "corrupt", lambda rig: broken_load(rig, Status.CORRUPT)),
        ("disk", "gone", lambda rig: broken_load(rig, Status.GONE)),
    ],
)
def test_a_departure_is_counted_with_its_reason(rigged, tier, why, do):
    rig = rigged(4, [fs_spec(blocks=4, ttl=100.0)])
    rig.store(1, 2, 3, 4, chain=False)
    do(rig)
    left = {tier["name"]: tier["left"] for tier in rig.ladder.statistics()["tiers"]}[tier]
    assert left[why] > 0
    assert sum(left.values()) == left[why], left


def broken_load(rig, status):
    rig.evict(1, tiers=("cpu",))
    rig.judge = lambda op, tier, block: status if op == "read" else Status.OK
    rig.load(1)

"""Loads: contiguous prefixes, promotion, failures that never become other bytes, leases."""

import time

from kvtierd.core.effects import Loaded, LookedUp, Read
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId, KeyState, Scope
from kvtierd.core.stimuli import Found, FoundBlock, Load, Lookup, Prefetch, Status
from kvtierd.testing.rig import LAYOUT, fs_spec, key, meta


def cold(rig, *numbers):
    """Store a chain and evict it from the pool, so that only the secondaries hold it."""
    rig.store(*numbers)
    rig.evict(*numbers, tiers=("cpu",))


def block_id(number):
    return BlockId(LAYOUT.namespace(), key(number))


def test_a_load_names_the_tier_that_served(rigged):
    """L16"""
    rig = rigged(4, [fs_spec()])
    rig.store(1)
    assert rig.load(1).sources == ("cpu",)
    rig.evict(1, tiers=("cpu",))
    assert rig.load(1).sources == ("disk",)
    assert rig.load(1).sources == ("cpu",)


def test_a_promotion_is_a_cpu_store_and_announces_nothing_for_its_source(rigged):
    """L13: with the metadata that the block was stored with."""
    rig = rigged(4, [fs_spec()])
    cold(rig, 1)
    before = len(rig.events)
    rig.load(1)
    (event,) = rig.events[before:]
    assert (event.kind.value, event.tier, event.block.meta) == ("stored", "cpu", meta(1))


def test_a_block_evicted_from_the_pool_only_is_removed_there_only(rigged):
    """L11"""
    rig = rigged(4, [fs_spec()])
    cold(rig, 1)
    assert rig.story() == [("stored", "cpu", 1), ("stored", "disk", 1), ("removed", "cpu", 1)]
    assert rig.load(1).keys == (key(1),)


def test_a_failed_read_ends_the_prefix_and_counts_only_what_was_loaded(rigged):
    """L57, L61: block 3 of 8 cannot be read."""
    rig = rigged(16, [fs_spec()])
    cold(rig, *range(8))
    rig.judge = lambda op, tier, bid: Status.FAILED if bid == block_id(2) and op == "read" else Status.OK
    got = rig.load(*range(8))
    assert got.keys == (key(0), key(1))
    counters = rig.ladder.statistics()["tiers"][0]["counters"]
    assert counters["load_from_disk"] == 2
    rig.release(got.lease)
    rig.judge = lambda op, tier, bid: Status.OK
    assert len(rig.load(*range(8)).keys) == 8, "a passing fault takes nothing away"


def test_a_corrupt_block_is_a_miss_from_then_on_and_announced_as_removed(rigged):
    """L42, L63 (the core's part)"""
    rig = rigged(4, [fs_spec()])
    cold(rig, 1)
    rig.judge = lambda op, tier, bid: Status.CORRUPT if op == "read" else Status.OK
    assert rig.load(1).keys == ()
    assert rig.story()[-1] == ("removed", "disk", 1)
    assert rig.lookup(1).states == (KeyState.MISS,)
    assert rig.storage["disk"] == {}
    rig.judge = lambda op, tier, bid: Status.OK
    rig.store(1)
    assert rig.lookup(1).states == (KeyState.HIT,)


def test_a_hit_under_a_lease_survives_a_flood(rigged):
    """L48"""
    rig = rigged(4)
    rig.store(1, 2)
    leased = rig.lookup(1, 2, lease=5.0)
    assert leased.leased == 2
    for number in range(10, 30):
        rig.store(number)
    got = rig.load(1, 2)
    assert got.keys == (key(1), key(2))
    rig.release(leased.lease)
    rig.release(got.lease)


def test_a_hit_without_a_lease_is_a_clean_miss_after_a_flood(rigged):
    """L48"""
    rig = rigged(4)
    rig.store(1, 2)
    for number in range(10, 30):
        rig.store(number)
    assert rig.load(1, 2).keys == ()


def test_a_load_from_below_evicts_from_a_full_pool(rigged):
    """L52"""
    rig = rigged(4, [fs_spec()])
    cold(rig, 1, 2)
    rig.store(10, 11, 12, 13, chain=False)
    assert rig.load(1, 2).sources == ("disk", "disk")


def test_a_fully_leased_pool_answers_at_once(rigged):
    """L47"""
    rig = rigged(2, [fs_spec()])
    cold(rig, 1)
    rig.store(10), rig.store(11)
    leases = [rig.load(10).lease, rig.load(11).lease]
    assert rig.load(1).keys == ()
    for lease in leases:
        rig.release(lease)


def test_many_readers_of_one_absent_block_cause_one_read(rigged):
    rig = rigged(4, [fs_spec()])
    cold(rig, 1)
    rig.hold = True
    numbers = [rig.ask(Load, keys=(key(1),), deadline=1.0) for _ in range(5)]
    assert sum(isinstance(effect, Read) for effect in rig.held) == 1
    rig.run_held()
    assert [rig.answer(number, Loaded).keys for number in numbers] == [(key(1),)] * 5


def test_a_load_answers_at_its_deadline_with_the_prefix_that_is_there(rigged):
    """L44, L57"""
    rig = rigged(4, [fs_spec()])
    rig.store(1, 2)
    rig.evict(2, tiers=("cpu",))
    rig.hold = True
    number = rig.ask(Load, keys=(key(1), key(2)), deadline=0.5)
    assert number not in rig.answers
    rig.advance(0.5)
    assert rig.answer(number, Loaded).keys == (key(1),)
    rig.run_held()
    assert rig.lookup(1, 2).prefix == 2, "the read that came late is not lost"


def test_another_client_s_unfinished_store_is_a_miss_at_once(rigged):
    """L44"""
    rig = rigged(4)
    other = rig.attach("e1", b"p1")
    rig.prepare([key(1)])
    number = rig.ask(Load, session=other, keys=(key(1),), deadline=5.0)
    assert rig.answer(number, Loaded).keys == ()


def test_a_reset_cancels_loads_and_a_late_read_never_lands_in_a_new_block(rigged):
    """L15"""
    rig = rigged(1, [fs_spec()])
    cold(rig, 1)
    rig.hold = True
    number = rig.ask(Load, keys=(key(1),), deadline=5.0)
    rig.reset()
    assert rig.answer(number, Loaded).keys == ()
    assert rig.store(2) == (), "the slot is under the old read's DMA still"
    rig.run_held()
    rig.hold = False
    assert rig.store(2) == (key(2),)
    assert rig.lookup(1).states == (KeyState.MISS,)


def test_a_lookup_may_start_promotions(rigged):
    rig = rigged(4, [fs_spec()])
    cold(rig, 1, 2)
    rig.hold = True
    assert rig.lookup(1, 2, 3).states == (KeyState.COLD, KeyState.COLD, KeyState.MISS)
    assert rig.lookup(1, 2, 3, promote=True).states == (KeyState.PENDING, KeyState.PENDING, KeyState.MISS)
    rig.run_held()
    assert rig.lookup(1, 2, 3).states == (KeyState.HIT, KeyState.HIT, KeyState.MISS)


def test_a_promotion_never_costs_a_hit_of_the_same_lookup(rigged):
    """Also one behind the promoted block: a full pool [COLD, HIT] once evicted what it had just reported."""
    rig = rigged(2, [fs_spec()])
    rig.store(1, 2)
    rig.evict(1, tiers=("cpu",))
    rig.store(3)
    assert rig.lookup(3).states == (KeyState.HIT,)
    found = rig.lookup(1, 2, 3, promote=True, lease=5.0)
    assert found.states == (KeyState.COLD, KeyState.HIT, KeyState.HIT)
    assert rig.lookup(2, 3).states == (KeyState.HIT, KeyState.HIT)
    assert rig.load(1).keys == (key(1),)


def test_a_request_may_name_a_key_twice(rigged):
    rig = rigged(8, [fs_spec()])
    assert rig.store(1, 1, chain=False) == (key(1),)
    rig.evict(1, tiers=("cpu",))
    rig.hold = True
    assert rig.lookup(1, 1, promote=True).states == (KeyState.PENDING, KeyState.PENDING)
    rig.hold = False
    rig.run_held()
    leased = rig.lookup(1, 1, lease=5.0)
    got = rig.load(1, 1)
    assert got.keys == (key(1), key(1))
    rig.release(leased.lease)
    rig.release(got.lease)
    assert rig.evict(1, 1) == 2


def test_refused_prefetches_leave_nothing_behind(rigged):
    """L56"""
    rig = rigged(1, [fs_spec()])
    cold(rig, 1)
    rig.store(2)
    lease = rig.load(2).lease
    for _ in range(100):
        rig.ask(Prefetch, keys=(key(1),))
    rig.release(lease)
    rig.ask(Prefetch, keys=(key(1),))
    assert rig.lookup(1).states == (KeyState.HIT,)


def test_a_failing_tier_is_not_asked_where_scope_excludes_it(rigged):
    from kvtierd.core.model import Scope

    rig = rigged(4, [fs_spec("near"), fs_spec("far")])
    cold(rig, 1)
    assert rig.load(1, scope=Scope(load_from=("far",))).sources == ("far",)
    rig.evict(1, tiers=("cpu",))
    assert rig.load(1, scope=Scope(load_from=())).keys == ()


def test_a_lookup_everywhere_holds_every_hit_also_behind_a_miss(rigged):
    """A sliding window's blocks are looked for from the end; what lies before them may be gone."""
    rig = rigged(4, [fs_spec()])
    rig.store(1, 2, 3, chain=False)
    rig.evict(2)
    found = rig.lookup(2, 1, 3, lease=5.0, everywhere=True)
    assert found.states == (KeyState.MISS, KeyState.HIT, KeyState.HIT)
    assert found.leased == 2
    rig.store(4, 5, 6, 7, chain=False)
    assert rig.lookup(1, 3).states == (KeyState.HIT, KeyState.HIT)
    rig.release(found.lease)
    rig.store(8, 9, 10, 11, chain=False)
    assert rig.lookup(1, 3).states != (KeyState.HIT, KeyState.HIT)


def test_a_lookup_that_promotes_holds_the_hits_behind_the_gap_that_it_reports(rigged):
    rig = rigged(2, [fs_spec()])
    rig.store(1, 2, chain=False)
    rig.store(3, chain=False)
    found = rig.lookup(1, 9, 2, 3, promote=True, lease=5.0, everywhere=True)
    held = [number for number, state in zip((1, 9, 2, 3), found.states, strict=True) if state is KeyState.HIT]
    assert found.leased == len(held)
    assert rig.lookup(*held).states == (KeyState.HIT,) * len(held)


def test_a_lookup_names_the_tiers_that_blocks_are_coming_from(rigged):
    rig = rigged(4, [fs_spec("near"), fs_spec("far")])
    rig.store(1)
    cold(rig, 2)
    rig.hold = True
    found = rig.lookup(1, 2, 3, promote=True)
    assert found.sources == ("", "near")
    rig.run_held()
    assert rig.lookup(1, 2, promote=True).sources == ()


def test_a_lookup_sees_and_promotes_only_what_its_scope_allows(rigged):
    from kvtierd.core.model import Scope

    rig = rigged(4, [fs_spec("near"), fs_spec("far")])
    cold(rig, 1)
    assert rig.lookup(1, scope=Scope(load_from=())).states == (KeyState.MISS,)
    rig.hold = True
    found = rig.lookup(1, promote=True, scope=Scope(load_from=("far",)))
    assert found.sources == ("far",)
    rig.run_held()


def test_a_lookup_that_touches_keeps_its_blocks_from_being_the_next_victims(rigged):
    rig = rigged(2)
    rig.store(1, chain=False)
    rig.store(2, chain=False)
    rig.lookup(1, touch=True)
    rig.store(3, chain=False)
    assert rig.lookup(1, 2).states == (KeyState.HIT, KeyState.MISS)


def test_ten_thousand_keys_of_two_hundred_thousand_blocks_are_looked_up_in_no_time(rigged):
    """L80: whoever asks next waits for a few milliseconds, not for a hundredth of a second per tier."""
    rig = rigged(4, [fs_spec("disk"), fs_spec("lake")], scanned=False)
    namespace = LAYOUT.namespace()
    for start in range(0, 200_000, 512):
        part = [
            FoundBlock(Block.of(BlockId(namespace, key(n)), UNIT), UNIT)
            for n in range(start, min(start + 512, 200_000))
        ]
        rig.feed(Found("lake", part))
    keys = tuple(key(n) for n in range(0, 200_000, 20))
    took = []
    for _ in range(5):
        begin = time.thread_time()
        number = rig.ask(Lookup, keys=keys)
        took.append(time.thread_time() - begin)
        assert rig.answer(number, LookedUp).prefix == 10_000
    assert min(took) < 0.02, took
    rig.feed(Found("disk", (), last=True))
    rig.feed(Found("lake", (), last=True))


def test_a_look_everywhere_leaves_cold_blocks_to_the_question_that_promotes_them(rigged):
    rig = rigged(4, [fs_spec()])
    rig.store(1)
    cold(rig, 2)
    rig.lookup(1, 2, 3, lease=5.0, everywhere=True)
    pool, disk = (tier["counters"] for tier in rig.ladder.statistics()["tiers"])
    assert (pool["lookup_blocks"], pool["lookup_hits"], pool["lookup_misses"]) == (2, 1, 1)
    assert disk.get("lookup_hits", 0) == 0
    rig.lookup(2, promote=True)
    pool, disk = (tier["counters"] for tier in rig.ladder.statistics()["tiers"])
    assert (pool["lookup_blocks"], disk["lookup_hits"]) == (3, 1)


def test_the_short_way_of_a_plain_lookup_answers_and_counts_as_the_long_one(rigged):
    rig = rigged(8)
    rig.store(1, 2, 3)
    for numbers in ((), (1,), (1, 2, 3), (3, 1, 1), (1, 9), (9,)):
        answers = []
        for scope in (None, Scope()):  # a scope of everything changes nothing but the way
            before = rig.ladder.stack.primary.counters.copy()
            found = rig.lookup(*numbers, scope=scope)
            after = rig.ladder.stack.primary.counters.copy()
            answers.append(
                (found.states, found.prefix, found.lease, found.leased, found.sources, after - before)
            )
        assert answers[0] == answers[1]

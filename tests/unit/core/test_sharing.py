"""Shared tiers, ages, demotion on eviction, scopes, the promotion budget."""

import pytest

from kvtierd.core.effects import LookedUp, Probe, Refused
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId, KeyState, Locality, Scope, hash_of
from kvtierd.core.probing import ABSENT_SECONDS
from kvtierd.core.promotion import GRACE
from kvtierd.core.stimuli import Drain, Found, FoundBlock, Load, Lookup, PrepareStore, Stalled, Status
from kvtierd.testing.rig import LAYOUT, fs_spec, key, meta


def theirs(rig, *numbers, tier="disk"):
    """Another daemon wrote these blocks to the shared tier."""
    for number in numbers:
        block_id = BlockId(LAYOUT.namespace(), key(number))
        rig.storage[tier][block_id] = Block.of(block_id, UNIT, meta(number))


def probes(rig):
    return [effect for effect in rig.effects if isinstance(effect, Probe)]


def test_an_unknown_key_of_a_shared_tier_is_looked_for_in_the_background(rigged):
    """L76-L79's kind: what others wrote is found, announced once and loadable."""
    rig = rigged(8, [fs_spec(shared=True)])
    theirs(rig, 1, 2)
    rig.hold = True
    assert rig.lookup(1, 2, 3).states == (KeyState.MISS,) * 3, "a plain lookup asks nothing"
    assert rig.lookup(1, 2, 3, promote=True).states == (KeyState.PENDING,) * 3
    assert rig.lookup(1, 2, 3, promote=True).states == (KeyState.PENDING,) * 3
    assert len(probes(rig)) == 1, "one probe however many ask"
    rig.hold = False
    rig.run_held()
    assert rig.lookup(1, 2, 3).states == (KeyState.COLD, KeyState.COLD, KeyState.MISS)
    assert rig.story() == [("stored", "disk", 1), ("stored", "disk", 2)]
    assert rig.load(1, 2).sources == ("disk", "disk")


def test_a_request_that_comes_has_unknown_keys_looked_for_and_counts_what_it_found_at_once(rigged):
    """As the vLLM glue asks: once everywhere, with a touch, then for what is not in the pool."""
    rig = rigged(8, [fs_spec(shared=True)])
    rig.store(1)
    theirs(rig, 2)
    rig.hold = True
    first = rig.lookup(1, 2, 3, touch=True, everywhere=True)
    assert first.states == (KeyState.HIT, KeyState.PENDING, KeyState.PENDING)
    assert len(probes(rig)) == 1
    counters = rig.ladder.stack.primary.counters
    assert (counters["lookup_blocks"], counters["lookup_hits"], counters["lookup_misses"]) == (1, 1, 0)
    rig.hold = False
    rig.run_held()
    assert rig.lookup(2, 3, promote=True).states == (KeyState.PENDING, KeyState.MISS)
    assert rig.lookup(2, 3, promote=True).states == (KeyState.HIT, KeyState.MISS)
    assert (counters["lookup_blocks"], counters["lookup_misses"]) == (3, 1)
    assert rig.ladder.stack.by_name["disk"].counters["lookup_hits"] == 1


def test_a_load_waits_for_one_look_at_the_shared_tiers(rigged):
    rig = rigged(8, [fs_spec(shared=True)])
    rig.store(1)
    theirs(rig, 2, 3)
    rig.hold = True
    number = rig.ask(Load, keys=(key(1), key(2), key(3), key(4)), deadline=5.0)
    assert number not in rig.answers
    assert len(probes(rig)) == 1, "one look for all"
    rig.hold = False
    rig.run_held()
    assert rig.answers[number].sources == ("cpu", "disk", "disk")
    before = len(probes(rig))
    assert rig.load(4).keys == (), "known to be absent for a while: nothing to wait for"
    assert len(probes(rig)) == before


def test_a_load_without_patience_or_past_its_deadline_waits_for_no_look(rigged):
    rig = rigged(8, [fs_spec(shared=True)])
    theirs(rig, 1)
    rig.hold = True
    hurried = rig.ask(Load, keys=(key(1),), deadline=0.0)
    assert rig.answers[hurried].keys == ()
    assert probes(rig) == []
    patient = rig.ask(Load, keys=(key(1),), deadline=2.0)
    assert patient not in rig.answers
    rig.advance(2.0)
    assert rig.answers[patient].keys == ()
    rig.hold = False
    rig.run_held()
    assert rig.load(1).sources == ("disk",)


@pytest.mark.parametrize("how", [Status.FAILED, "stalled"])
def test_a_look_that_fails_ends_the_wait(rigged, how):
    rig = rigged(8, [fs_spec(shared=True)])
    rig.hold = True
    number = rig.ask(Load, keys=(key(1),), deadline=60.0)
    (probe,) = rig.held
    if how == "stalled":
        rig.feed(Stalled(probe.op))
    else:
        rig.hold = False
        rig.judge = lambda op, tier, bid: how
        theirs(rig, 1)
        rig.run_held()
    assert rig.answers[number].keys == ()
    rig.hold = False
    rig.run_held()


def test_what_is_not_there_is_not_asked_for_again_for_a_while(rigged):
    rig = rigged(8, [fs_spec(shared=True)])
    rig.lookup(1, promote=True)
    assert rig.lookup(1, promote=True).states == (KeyState.MISS,)
    assert len(probes(rig)) == 1
    rig.advance(ABSENT_SECONDS)
    theirs(rig, 1)
    rig.lookup(1, promote=True)
    assert rig.lookup(1).states == (KeyState.COLD,)


def test_a_probe_that_fails_says_nothing_about_the_keys(rigged):
    rig = rigged(8, [fs_spec(shared=True)])
    theirs(rig, 1)
    rig.judge = lambda op, tier, bid: Status.FAILED
    rig.lookup(1, promote=True)
    assert rig.lookup(1).states == (KeyState.MISS,)
    rig.judge = lambda op, tier, bid: Status.OK
    rig.lookup(1, promote=True)
    assert rig.lookup(1).states == (KeyState.COLD,)


def test_a_tier_that_is_not_shared_is_never_probed(rigged):
    rig = rigged(8, [fs_spec()])
    rig.lookup(1, 2, promote=True)
    assert probes(rig) == []


def test_a_block_deleted_by_others_becomes_a_miss_and_a_removal(rigged):
    """L75"""
    rig = rigged(8, [fs_spec(shared=True)])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    rig.storage["disk"].clear()
    assert rig.load(1).keys == ()
    assert rig.story()[-1] == ("removed", "disk", 1)


def test_blocks_unused_for_the_ttl_leave_leaf_first(rigged):
    rig = rigged(8, [fs_spec(ttl=10.0)])
    rig.store(1, 2)
    rig.advance(6.0)
    rig.store(3)
    rig.evict(3, tiers=("cpu",))
    rig.advance(6.0)
    gone = [entry for entry in rig.story() if entry[:2] == ("removed", "disk")]
    assert gone == [("removed", "disk", 2), ("removed", "disk", 1)]
    rig.load(3)
    rig.advance(6.0)
    assert ("disk", key(3)) in rig.inventory(), "a load renews"
    rig.advance(6.0)
    assert ("disk", key(3)) not in rig.inventory()


def test_the_age_of_a_found_block_counts(rigged):
    rig = rigged(8, [fs_spec(ttl=10.0)], scanned=False)
    blocks = [Block.of(BlockId(LAYOUT.namespace(), key(n)), UNIT, meta(n)) for n in (1, 2)]
    rig.feed(Found("disk", [FoundBlock(blocks[0], UNIT, 9.0), FoundBlock(blocks[1], UNIT, 1.0)], last=True))
    rig.advance(5.0)
    assert rig.inventory() == {("disk", key(2))}


def test_a_tier_written_on_eviction_gets_what_the_pool_gives_up_and_nothing_else(rigged):
    rig = rigged(16, [fs_spec(on_evict=True)])
    rig.store(*range(8))
    assert rig.storage["disk"] == {}
    for number in range(20, 40):
        rig.store(number)
    disk = {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "disk"}
    cpu = {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "cpu"}
    assert disk | cpu == {*range(8), *range(20, 40)}, "nothing was lost"
    assert not disk & cpu
    assert rig.load(0, 1).sources == ("disk", "disk")


def test_a_burst_that_a_written_on_eviction_tier_cannot_take_is_not_held_up(rigged):
    rig = rigged(8, [fs_spec(on_evict=True)])
    rig.hold = True
    for number in range(40):
        assert rig.store(number) == (key(number),)


@pytest.mark.parametrize(
    ("patterns", "served"),
    [
        (("far",), "far"),
        (("locality=REMOTE",), "far"),
        (("locality=LOCAL",), "near"),
        (("medium=STORAGE",), "near"),
        (("cpu",), None),
        ((), None),
    ],
)
def test_scope_chooses_by_name_medium_and_locality(rigged, patterns, served):
    rig = rigged(4, [fs_spec("near"), fs_spec("far", locality=Locality.REMOTE)])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    got = rig.load(1, scope=Scope(load_from=patterns))
    assert got.sources == ((served,) if served else ())


@pytest.mark.parametrize("pattern", ["dsk", "medium=FS", "locality=local", "colour=red", "locality="])
def test_a_bad_scope_is_an_error_and_stores_nothing(rigged, pattern):
    """L91"""
    rig = rigged(4, [fs_spec()])
    for request, scope in ((PrepareStore, {"store_to": (pattern,)}), (Load, {"load_from": (pattern,)})):
        answer = rig.answers[rig.ask(request, keys=(key(1),), scope=Scope(**scope))]
        assert isinstance(answer, Refused)
        assert pattern in answer.message
    assert rig.story() == []


def test_promotions_never_flush_the_pool(rigged):
    """L46: lookups of many cold blocks with a small pool."""
    rig = rigged(10, [fs_spec()])
    for number in range(100):
        rig.store(number)
        rig.evict(number, tiers=("cpu",))
    rig.store(200, 201, 202, 203, chain=False)
    for number in range(100):
        rig.ask(Lookup, keys=(key(number),), promote=True)
    promoted = {hash_of(entry)[-1] for tier, entry in rig.inventory() if tier == "cpu"} & set(range(100))
    assert promoted == {0, 1, 2, 3, 4}, "half of the pool, and none was evicted by a later one"
    assert rig.store(300) == (key(300),), "stores are still admitted"
    assert rig.ladder.statistics()["tiers"][0]["counters"]["promotion_over_budget"] == 95


def test_a_load_of_more_than_the_budget_goes_on_in_waves(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(*range(7))
    rig.evict(*range(7), tiers=("cpu",))
    rig.hold = True
    number = rig.ask(Load, keys=tuple(map(key, range(7))), deadline=5.0)
    waves = []
    while rig.held:
        waves.append(len(rig.held[0].blocks))
        rig.run_held()
    assert waves == [4, 3]
    assert rig.loaded(number).sources == ("disk",) * 7


def test_a_load_waits_for_the_budget_that_others_hold_until_its_deadline(rigged):
    rig = rigged(4, [fs_spec()])
    rig.store(*range(4), chain=False)
    rig.evict(*range(4), tiers=("cpu",))
    rig.lookup(0, 1, promote=True)
    number = rig.ask(Load, keys=(key(2), key(3)), deadline=GRACE + 1)
    late = rig.ask(Load, keys=(key(2),), deadline=0.5)
    rig.advance(0.5)
    assert rig.loaded(late).keys == ()
    rig.advance(GRACE)
    assert rig.loaded(number).sources == ("disk", "disk")


def test_a_promoted_block_is_kept_until_it_is_read_or_its_grace_ends(rigged):
    rig = rigged(2, [fs_spec()])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    rig.lookup(1, promote=True)
    rig.store(10), rig.store(11), rig.store(12)
    assert rig.load(1).sources == ("cpu",)
    rig.evict(1, tiers=("cpu",))
    rig.lookup(1, promote=True)
    rig.advance(GRACE)
    rig.store(13), rig.store(14), rig.store(15)
    assert rig.lookup(1).states == (KeyState.COLD,)


def test_lookups_of_ten_thousand_keys_are_answered_in_one_turn(rigged):
    """L80 (the core's part)"""
    rig = rigged(8, [fs_spec(shared=True)])
    number = rig.ask(Lookup, keys=tuple(key(n) for n in range(10_000)))
    assert rig.answer(number, LookedUp).prefix == 0


def test_a_drain_writes_down_what_only_the_pool_holds_and_serving_goes_on(rigged):
    rig = rigged(8, [fs_spec("disk", on_evict=True)])
    rig.store(1, 2, 3)
    assert rig.storage["disk"] == {}
    rig.feed(Drain())
    rig.advance(1.0)
    assert len(rig.storage["disk"]) == 3
    assert rig.load(1, 2, 3).sources == ("cpu",) * 3, "nothing left the pool"
    rig.feed(Drain())
    assert len(rig.storage["disk"]) == 3

"""Stores: reservation, commit, eviction at allocation, leaf first."""

from kvtierd.core.effects import Committed, Done, Refused
from kvtierd.core.model import KeyState, Scope, SkipReason, hash_of
from kvtierd.core.stimuli import (
    Abort,
    Commit,
    Fail,
    Finished,
    Outcome,
    PrepareStore,
    Role,
    Status,
    Touch,
)
from kvtierd.testing.rig import fs_spec, key, meta


def test_a_block_is_visible_with_its_commit_and_not_before(rigged):
    rig = rigged()
    job = rig.prepare([key(1)], [meta(1)])
    assert rig.lookup(1).states == (KeyState.MISS,)
    assert rig.story() == []
    assert rig.commit(job) == Committed(id=rig._request, stored=(key(1),))
    assert rig.lookup(1).states == (KeyState.HIT,)
    assert rig.story() == [("stored", "cpu", 1)]


def test_the_removal_of_the_victim_precedes_the_store_that_reused_its_slot(rigged):
    """L01"""
    rig = rigged(2, [fs_spec()])
    rig.store(1), rig.store(2), rig.store(3)
    story = rig.story()
    assert story.index(("removed", "cpu", 1)) < story.index(("stored", "cpu", 3))


def test_primary_then_each_secondary_in_one_drain(rigged):
    """L01: with everything held back until the end, one drain has the tiers in the file's order."""
    rig = rigged(2, [fs_spec("fast"), fs_spec("slow")])
    rig.hold = True
    job = rig.prepare([key(1), key(2)], [meta(1), meta(2, 1)])
    rig.commit(job)
    # Both secondaries end their writes before the next drain, the later tier first.
    ladder = rig.ladder
    held, rig.held = rig.held, []
    for effect in reversed(held):
        outcomes = [Outcome(at.block.id, Status.OK, at.block.payload_bytes) for at in effect.blocks]
        ladder.handle(Finished(effect.op, outcomes), 0.0)
    drained = ladder.take_events()
    rig.events += drained
    assert [event.tier for event in drained] == ["fast", "fast", "slow", "slow"]


def test_storing_a_key_that_is_there_announces_nothing(rigged):
    """L04"""
    rig = rigged(4, [fs_spec()])
    other = rig.attach("e1", b"p1")
    first = rig.prepare([key(1)], [meta(1)])
    second = rig.prepare([key(1)], [meta(1)], session=other)
    assert [skip.reason for skip in second.skipped] == [SkipReason.PENDING]
    rig.commit(first)
    for session in (rig.session, other, rig.session, other):
        again = rig.prepare([key(1)], [meta(1)], session=session)
        assert (again.job, again.keys) == (0, ())
        assert [skip.reason for skip in again.skipped] == [SkipReason.RESIDENT]
    assert rig.story() == [("stored", "cpu", 1), ("stored", "disk", 1)]
    rig.evict(1)
    assert rig.story()[2:] == [("removed", "cpu", 1), ("removed", "disk", 1)]


def test_a_burst_of_three_times_the_pool_leaves_the_newest_blocks(rigged):
    rig = rigged(8)
    for number in range(24):
        rig.store(number)
    assert {hash_of(entry)[-1] for _, entry in rig.inventory()} == set(range(16, 24))


def test_a_chain_longer_than_the_pool_keeps_its_head(rigged):
    """L58: room for 90 of 100: the first 90 stay, the rest is refused, not the head evicted."""
    rig = rigged(90)
    stored = rig.store(*range(100))
    assert stored == tuple(key(n) for n in range(90))
    assert rig.lookup(*range(100)).prefix == 90
    more = rig.prepare([key(90)], [meta(90, 89)])
    assert [skip.reason for skip in more.skipped] == [SkipReason.NO_ROOM]


def test_blocks_after_a_refused_parent_are_refused_too(rigged):
    rig = rigged(2)
    job = rig.prepare([key(n) for n in range(4)], [meta(n, n - 1 if n else None) for n in range(4)])
    assert [skip.reason for skip in job.skipped] == [SkipReason.NO_ROOM, SkipReason.PARENT_REFUSED]
    rig.commit(job)


def test_eviction_takes_leaves_before_their_parents(rigged):
    rig = rigged(4)
    rig.store(1, 2, 3)
    rig.store(10)
    rig.store(20)
    assert ("removed", "cpu", 3) in rig.story()
    rig.store(21)
    assert [entry for entry in rig.story() if entry[0] == "removed"] == [
        ("removed", "cpu", 3),
        ("removed", "cpu", 2),
    ]
    assert rig.lookup(1).prefix == 1, "the root outlives its children"


def test_a_key_that_failed_is_void_and_the_rest_of_the_job_is_not(rigged):
    """L09: the choice: the blocks that were copied are stored and announced, the failed one never is."""
    rig = rigged()
    job = rig.prepare([key(n) for n in range(4)])
    worker = rig.attach("e0", b"w0", role=Role.WORKER)
    rig.ask(Fail, session=worker, job=job.job, keys=(key(2),))
    reply = rig.commit(job, failed=[key(3)])
    assert isinstance(reply, Committed)
    assert reply.stored == (key(0), key(1))
    assert rig.lookup(2, 3).states == (KeyState.MISS, KeyState.MISS)


def test_a_commit_that_names_another_pool_or_generation_stores_nothing(rigged):
    rig = rigged()
    job = rig.prepare([key(1)])
    for wrong in ({"pool_id": "f" * 32}, {"generation": 1 << 20}):
        named = {"pool_id": job.pool_id, "generation": job.generation} | wrong
        assert isinstance(rig.answers[rig.ask(Commit, job=job.job, **named)], Refused)
        assert rig.lookup(1).states == (KeyState.MISS,)
        job = rig.prepare([key(1)])
        assert job.keys == (key(1),), "the slot of the refused job is free again"


def test_a_store_that_finds_its_block_under_way_still_gets_it_to_its_tiers(rigged):
    """L45: pending is not never; a job that stores nothing takes the wish with it."""
    rig = rigged(4, [fs_spec()])
    first = rig.prepare([key(1), key(2)], scope=Scope(store_to=()))
    assert [skip.reason for skip in rig.prepare([key(1), key(2)]).skipped] == [SkipReason.PENDING] * 2
    rig.commit(first, failed=[key(2)])
    assert [block_id.key for block_id in rig.storage["disk"]] == [key(1)]
    again = rig.prepare([key(2)], scope=Scope(store_to=()))
    rig.commit(again)
    assert [block_id.key for block_id in rig.storage["disk"]] == [key(1)]


def test_an_aborted_job_gives_its_slots_back_at_once(rigged):
    rig = rigged(2)
    job = rig.prepare([key(1), key(2)])
    rig.ask(Abort, job=job.job)
    assert rig.store(3, 4, chain=False) == (key(3), key(4))
    assert isinstance(rig.commit(job), Refused)


def test_metadata_must_fit_the_keys_and_name_no_block_as_its_own_parent(rigged):
    """L123"""
    rig = rigged()
    for fields in (
        {"keys": (key(1), key(2)), "meta": (meta(1),)},
        {"keys": (key(1),), "meta": (meta(1, 1),)},
        {"keys": (key(1, group=3),)},
    ):
        number = rig.ask(PrepareStore, **fields)
        assert isinstance(rig.answers[number], Refused)
    assert rig.story() == []


def test_a_ring_of_parents_can_still_be_evicted(rigged):
    rig = rigged(2)
    rig.commit(rig.prepare([key(1)], [meta(1, 2)]))
    rig.commit(rig.prepare([key(2)], [meta(2, 1)]))
    assert rig.store(3, 4, chain=False) == (key(3), key(4))


def test_a_reset_voids_stores_under_way(rigged):
    rig = rigged()
    job = rig.prepare([key(1)])
    rig.reset()
    reply = rig.commit(job)
    assert reply == Committed(id=rig._request, stored=())
    assert rig.lookup(1).states == (KeyState.MISS,)


def test_touch_renews_a_block(rigged):
    rig = rigged(2)
    rig.store(1), rig.store(2)
    assert rig.answer(rig.ask(Touch, keys=(key(1),)), Done).count == 1
    rig.store(3)
    assert rig.lookup(1).prefix == 1
    assert rig.lookup(2).prefix == 0

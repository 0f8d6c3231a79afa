"""The contract on events and placement, through the real socket, files and stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvtierd.client import KeyState, Scope, SkipReason
from kvtierd.testing.daemon_rig import DaemonRig, Router, chain, fs_tier, keys_of, load, loose, store
from kvtierd.wire.kvevents import BlockRemoved, BlockStored

Make = Callable[..., DaemonRig]
FROM_DISK = Scope(load_from=("disk",))


def two_disks(folder_of: Make, **options: object) -> DaemonRig:
    """Two FS tiers that a router can tell apart by their locality."""
    rig = folder_of(**options)
    tiers = [
        fs_tier(rig.folder, "near", locality="LOCAL"),
        fs_tier(rig.folder, "far", locality="REMOTE"),
    ]
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], *tiers]))
    return rig.start()


def places(events: list[BlockStored | BlockRemoved]) -> list[str]:
    return [f"{type(e).__name__[5:]} {e.medium} {e.locality}" for e in events]


def test_a_removal_precedes_the_store_that_took_its_slot(make: Make) -> None:
    """L01."""
    rig = two_disks(make, slots=2)
    session = rig.attach()
    a, b, c = loose(3)
    for block in (a, b):
        store(session, [block])
    rig.settle()
    store(session, [c])
    rig.settle()
    said = [(type(event), event.block_hashes[0]) for event in rig.router.events if event.medium == "CPU"]
    assert said.index((BlockRemoved, a.meta.hashes[0])) < said.index((BlockStored, c.meta.hashes[0]))
    order = ["CPU None", "STORAGE LOCAL", "STORAGE REMOTE"]
    for batch in rig.router.batches:
        ranks = [order.index(f"{event.medium} {event.locality}") for event in batch.events]
        assert ranks == sorted(ranks)


def test_one_drain_holds_the_primary_then_each_secondary_in_file_order(make: Make) -> None:
    """L01, contract 2 and 5: an explicit removal from all tiers is one turn and leaves leaf first."""
    rig = two_disks(make)
    session = rig.attach()
    made = chain(2)
    store(session, made)
    rig.settle()
    assert session.evict(keys_of(made)) == 6
    rig.settle()
    batch = next(b for b in rig.router.batches if any(isinstance(e, BlockRemoved) for e in b.events))
    hashes = [made[1].meta.hashes[0], made[0].meta.hashes[0]]
    assert [event.block_hashes[0] for event in batch.events] == hashes * 3
    assert places(list(batch.events)) == [
        place
        for place in ("Removed CPU None", "Removed STORAGE LOCAL", "Removed STORAGE REMOTE")
        for _ in "ab"
    ]


def test_no_reset_ever_says_all_blocks_cleared(rig: DaemonRig) -> None:
    """Contract 5: it would wipe the engine's GPU entries."""
    session = rig.attach()
    store(session, chain(5))
    rig.settle()
    assert session.reset() == 10
    rig.settle()
    assert rig.router.counts["AllBlocksCleared"] == 0
    assert rig.router.counts["BlockRemoved"] == 10
    assert rig.router.resident == set()


def test_storing_a_block_five_times_from_two_clients_announces_it_once(rig: DaemonRig) -> None:
    """L04."""
    (block,) = loose(1)
    sessions = [rig.attach(engine_id=name) for name in ("e0", "e1")]

    def five_times(session: object) -> None:
        for _ in range(5):
            store(session, [block])  # type: ignore[arg-type]

    threads = [threading.Thread(target=five_times, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rig.settle()
    stored = [("BlockStored", "CPU", None), ("BlockStored", "STORAGE", "LOCAL")]
    assert rig.router.told(block) == stored
    assert [session.evict([block.key]) for session in sessions] == [2, 0]
    rig.settle()
    assert rig.router.told(block) == [
        *stored,
        ("BlockRemoved", "CPU", None),
        ("BlockRemoved", "STORAGE", "LOCAL"),
    ]


def test_a_second_store_to_the_pool_does_not_forget_the_copy_on_disk(rig: DaemonRig) -> None:
    """L03."""
    session = rig.attach()
    (block,) = loose(1)
    store(session, [block])
    rig.settle()
    session.evict([block.key], ["cpu"])
    store(session, [block])
    rig.settle()
    session.evict([block.key], ["disk"])
    rig.settle()
    removals = [told for told in rig.router.told(block) if told[:2] == ("BlockRemoved", "STORAGE")]
    assert len(removals) == 1
    assert load(session, [block]) == ["cpu"]


@pytest.mark.timeout(120)
def test_every_announced_file_can_be_loaded_at_once(make: Make) -> None:
    """L08: 1,000 of 1,000, from the disk alone, while the store of the others goes on."""
    rig = make(slots=1024, paranoid=False).start()
    session = rig.attach()
    made = {block.meta.hashes[0]: block for block in loose(1000)}
    todo = list(made.values())
    served: list[str] = []

    def probe(router: Router) -> bool:
        events = router.events
        for event in events[probe.seen :]:  # type: ignore[attr-defined]
            if isinstance(event, BlockStored) and event.medium == "STORAGE":
                block = made[event.block_hashes[0]]
                session.evict([block.key], ["cpu"])
                served.extend(load(session, [block], scope=FROM_DISK))
                session.evict([block.key], ["cpu"])
        probe.seen = len(events)  # type: ignore[attr-defined]
        return len(served) >= 1000

    probe.seen = len(rig.router.events)  # type: ignore[attr-defined]
    while todo:
        batch, todo = todo[:50], todo[50:]
        assert len(store(session, batch)) == len(batch)
        rig.router.poll()
        probe(rig.router)
    rig.router.wait_for(probe, 30, "1,000 files")
    assert served == ["disk"] * 1000


def test_leaving_memory_is_told_of_memory_only(rig: DaemonRig) -> None:
    """L11."""
    session = rig.attach()
    (block,) = loose(1)
    store(session, [block])
    rig.settle()
    session.evict([block.key], ["cpu"])
    rig.settle()
    assert rig.router.told(block)[2:] == [("BlockRemoved", "CPU", None)]
    assert load(session, [block]) == ["disk"]


def test_a_block_promoted_after_a_restart_is_announced_in_full(rig: DaemonRig) -> None:
    """L13."""
    made = chain(3)
    store(rig.attach(), made)
    rig.settle()
    rig.restart()
    session = rig.attach()
    seen = len(rig.router.events)
    assert load(session, made) == ["disk"] * 3
    rig.settle()
    promoted = [e for e in rig.router.events[seen:] if e.medium == "CPU" and isinstance(e, BlockStored)]
    for event in promoted:
        block = next(b for b in made if b.meta.hashes == event.block_hashes)
        assert event.token_ids == block.meta.token_ids
        assert event.parent_block_hash == block.meta.parent
        assert (event.block_size, event.group_idx, event.kv_cache_spec_kind) == (4, 0, "full_attention")
    assert len(promoted) == 3


def test_a_load_names_the_tier_that_served_it(rig: DaemonRig) -> None:
    """L16."""
    session = rig.attach()
    (block,) = loose(1)
    store(session, [block])
    rig.settle()
    assert load(session, [block]) == ["cpu"]
    assert (rig.counter("cpu", "load_from_cpu"), rig.counter("cpu", "load_from_disk")) == (1, 0)
    session.evict([block.key], ["cpu"])
    assert load(session, [block]) == ["disk"]
    assert (rig.counter("cpu", "load_from_cpu"), rig.counter("cpu", "load_from_disk")) == (1, 1)


def test_a_leased_hit_outlives_a_flood(make: Make) -> None:
    """L48: with a lease the right bytes, without one the right bytes from below; never other bytes."""
    rig = make(slots=8).start()
    session = rig.attach()
    leased, bare = loose(2, "kept")
    store(session, [leased, bare])
    rig.settle()
    with session.lookup([leased.key], lease=30.0) as found:
        assert (found.states, found.leased) == ((KeyState.HIT,), 1)
        for block in loose(32, "flood"):
            assert store(session, [block])
        assert load(session, [leased]) == ["cpu"]
    assert session.lookup([bare.key]).states == (KeyState.COLD,)
    assert load(session, [bare]) == ["disk"]


def test_without_a_lease_a_flooded_hit_is_a_clean_miss(make: Make) -> None:
    """L48."""
    rig = make(slots=8, tiers=[]).start()
    session = rig.attach()
    (block,) = loose(1, "bare")
    store(session, [block])
    assert session.lookup([block.key]).states == (KeyState.HIT,)
    for other in loose(16, "flood"):
        store(session, [other])
    assert load(session, [block]) == []


def test_a_load_from_disk_makes_room_in_a_full_pool(make: Make) -> None:
    """L52: half of the pool is promoted into at a time; a load of more goes on in waves."""
    rig = make(slots=16).start()
    session = rig.attach()
    old, new = loose(16, "old"), loose(16, "new")
    for made in (old, new):
        assert len(store(session, made)) == 16
        rig.settle()
    assert session.lookup(keys_of(old)).states == (KeyState.COLD,) * 16
    assert load(session, old) == ["disk"] * 16


def test_a_load_of_ten_with_room_for_four_gives_the_first_four(make: Make) -> None:
    """L57."""
    rig = make(slots=14).start()
    session = rig.attach()
    wanted, others = chain(10, "wanted"), loose(10, "others")
    store(session, wanted)
    rig.settle()
    session.evict(keys_of(wanted), ["cpu"])
    store(session, others)
    rig.settle()  # a block on its way to the disk is pinned
    with session.load(keys_of(others)) as held:
        assert len(held.keys) == 10
        assert load(session, wanted) == ["disk"] * 4
        assert session.lookup(keys_of(wanted)).states == (KeyState.HIT,) * 4 + (KeyState.COLD,) * 6
    assert load(session, wanted) == ["cpu"] * 4 + ["disk"] * 6


def test_a_chain_longer_than_the_pool_keeps_its_head(make: Make) -> None:
    """L58: 100 blocks, room for 90; the tail is refused in words, then goes first when others come."""
    rig = make(slots=90, tiers=[]).start()
    session = rig.attach()
    made = chain(100)
    job = session.prepare_store(keys_of(made), meta=[block.meta for block in made])
    assert len(job.commit()) == 90
    assert [skip.reason for skip in job.skipped] == [SkipReason.NO_ROOM, *[SkipReason.PARENT_REFUSED] * 9]
    assert session.lookup(keys_of(made)).prefix == 90
    for block in loose(10, "other"):
        assert store(session, [block])
    assert session.lookup(keys_of(made)).prefix == 80


def test_a_burst_of_three_pools_leaves_the_newest_blocks(make: Make) -> None:
    """The issue: eviction happens at allocation, never on a timer."""
    rig = make(slots=32, tiers=[]).start()
    session = rig.attach()
    made = loose(96)
    for start in range(0, 96, 4):
        assert len(store(session, made[start : start + 4])) == 4
    assert set(session.lookup(keys_of(made[64:])).states) == {KeyState.HIT}
    assert set(session.lookup(keys_of(made[:64])).states) == {KeyState.MISS}
    assert load(session, made[64:]) == ["cpu"] * 32


def test_a_refused_store_says_so(make: Make) -> None:
    """The issue: every slot is leased, so nothing can be stored and that is an answer."""
    rig = make(slots=4, tiers=[]).start()
    session = rig.attach()
    made = loose(4)
    store(session, made)
    extra = chain(2, "extra")
    with session.load(keys_of(made)) as held:
        assert len(held.keys) == 4
        job = session.prepare_store(keys_of(extra), meta=[block.meta for block in extra])
        assert (job.keys, job.job) == ((), 0)
        assert [skip.reason for skip in job.skipped] == [SkipReason.NO_ROOM, SkipReason.PARENT_REFUSED]
        assert job.commit() == ()
        assert session.put(extra[0].key, b"x" * 4096) is False
    assert session.put(extra[0].key, b"x" * 4096, extra[0].meta) is True


def test_a_pool_that_is_leased_to_the_last_slot_says_so_at_once(make: Make) -> None:
    """L51, L104: refused in under 5 ms; released, the next store is admitted."""
    rig = make(slots=10_000, tiers=[], paranoid=False).start()
    session = rig.attach()
    made, (extra,) = loose(10_000), loose(1, "extra")
    assert len(session.prepare_store(keys_of(made)).commit()) == 10_000
    with session.lookup(keys_of(made), lease=30.0) as found:
        assert found.leased == 10_000
        took = []
        for _ in range(50):
            begin = time.perf_counter()
            job = session.prepare_store([extra.key])
            took.append(time.perf_counter() - begin)
            assert [skip.reason for skip in job.skipped] == [SkipReason.NO_ROOM]
        assert sorted(took)[25] < 0.005
    assert store(session, [extra])
    assert load(session, [extra]) == ["cpu"]


def test_a_commit_makes_its_blocks_visible_to_everybody(make: Make) -> None:
    """The issue: 0 misses in 10,000 lookups on another connection, each right after the commit."""
    rig = make(slots=10_000, tiers=[], paranoid=False).start()
    writer, reader = rig.attach(), rig.attach(engine_id="e1")
    made = loose(10_000)
    misses = 0
    for start in range(0, 10_000, 4):
        some = made[start : start + 4]
        writer.prepare_store(keys_of(some)).commit()
        misses += sum(reader.lookup([block.key]).states != (KeyState.HIT,) for block in some)
    assert misses == 0

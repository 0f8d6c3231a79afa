"""Slots that an engine may still be copying into: real processes that die, go silent or say their word."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvtierd.client import KeyState, RequestRefused, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.engine_process import EngineProcess
from kvtierd.testing.workload import payload

Make = Callable[..., DaemonRig]


Engines = Callable[..., EngineProcess]


def quarantined(rig: DaemonRig) -> int:
    return int(rig.status()["quarantined_slots"])


def room(session: Session, slots: int, prefix: str) -> int:
    """How many of ``slots`` blocks get a slot now; nothing is kept."""
    job = session.prepare_store(keys_of(loose(slots, prefix)))
    count = len(job.keys)
    job.abort()
    return count


def test_two_processes_map_one_pool_and_see_the_same_bytes(rig: DaemonRig, engine: Engines) -> None:
    """The issue: no payload byte crosses the socket."""
    session = rig.attach()
    other = engine(rig)
    assert other.greeting == {"pool_id": session.pool_id, "connected": True}
    (block,) = loose(1)
    job = session.prepare_store([block.key], meta=[block.meta])
    job.views()[0][:] = data = payload(block.key, 4096)
    assert other("peek", job.slots[0]) == data[:8].hex()
    job.commit()
    theirs = other("reserve", 1, "theirs")["slots"]
    other("scribble", "x")
    assert bytes(session.slot(theirs[0])) == b"x" * 4096
    assert other("commit") == 1
    assert session.get(loose(1, "theirs")[0].key) == b"x" * 4096


def test_a_killed_engine_gives_its_slots_back(make: Make, engine: Engines) -> None:
    """L44, L101: half-written blocks vanish, leases end, and the same engine id is welcome at once."""
    rig = make(slots=8, tiers=[]).start()
    session = rig.attach()
    store(session, chain(3))
    child = engine(rig)
    assert len(child("lease", 3, "chain")["slots"]) == 3
    assert len(child("reserve", 4, "half")["slots"]) == 4
    child("scribble", "h")
    assert session.lookup(keys_of(loose(4, "half"))).states == (KeyState.MISS,) * 4
    assert room(session, 8, "new") == 1
    child.kill()
    wait_for(lambda: room(session, 8, "new") == 8, "all slots")
    assert quarantined(rig) == 0
    assert engine(rig).greeting["connected"]


def test_slots_of_a_lost_connection_wait_for_their_process(make: Make, engine: Engines) -> None:
    """DESIGN 4: a copy cannot be called back; until its process speaks, nobody else gets its slots."""
    rig = make(slots=8, tiers=[]).start()
    session = rig.attach()
    store(session, chain(3))
    child = engine(rig)
    child("lease", 3, "chain")
    slots = child("reserve", 4, "half")["slots"]
    assert child("drop") == 1
    wait_for(lambda: quarantined(rig) == 7, "the quarantine")
    made = loose(8, "mine")
    job = session.prepare_store(keys_of(made), meta=[block.meta for block in made])
    assert len(job.keys) == 1
    assert not set(job.slots) & set(slots)
    job.views()[0][:] = payload(job.keys[0], 4096)
    job.commit()
    child("scribble", "z")
    assert load(session, [made[0]]) == ["cpu"], "the late copy hit nobody"
    assert session.lookup(keys_of(loose(4, "half"))).prefix == 0
    assert quarantined(rig) == 7
    assert child("commit") == 0, "a job of the lost connection is not stored"
    assert child("revive") >= 1
    assert quarantined(rig) == 7
    assert child("acknowledge") is True
    assert quarantined(rig) == 0
    assert room(session, 8, "new") == 8


def test_slots_of_a_lost_connection_are_freed_by_death(make: Make, engine: Engines) -> None:
    """DESIGN 4: the liveness descriptor speaks for a process that cannot."""
    rig = make(slots=8, tiers=[]).start()
    session = rig.attach()
    child = engine(rig)
    child("reserve", 8, "half")
    child("drop")
    wait_for(lambda: quarantined(rig) == 8, "the quarantine")
    assert room(session, 8, "new") == 0
    child.kill()
    wait_for(lambda: room(session, 8, "new") == 8, "all slots")


def test_every_process_of_an_engine_has_to_speak(make: Make, engine: Engines) -> None:
    """DESIGN 4: the scheduler's death says nothing of a worker that still copies."""
    rig = make(slots=8, tiers=[]).start()
    session = rig.attach()
    scheduler, worker = engine(rig, "e1"), engine(rig, "e1", "worker")
    scheduler("reserve", 8, "half")
    scheduler.kill()
    fence = wait_for(lambda: worker("poll"), "the worker to be told")
    assert fence >= 1
    assert quarantined(rig) == 8
    assert room(session, 8, "new") == 0
    assert worker("acknowledge") is True
    assert quarantined(rig) == 0
    assert room(session, 8, "new") == 8


@pytest.mark.parametrize("by", ["acknowledge", "release"])
def test_an_expired_job_is_not_stored_and_its_slots_wait(make: Make, engine: Engines, by: str) -> None:
    """L44: a store that never ends is void at its deadline; its owner's late word frees the slots."""
    rig = make(slots=8, tiers=[], changes={"engine": {"job_ttl": "200ms", "shutdown_grace": "4s"}}).start()
    session = rig.attach()
    child = engine(rig)
    child("reserve", 8, "half")
    wait_for(lambda: quarantined(rig) == 8, "the job to expire")
    assert room(session, 8, "new") == 0
    if by == "acknowledge":
        assert wait_for(lambda: child("poll"), "the notice") >= 1
        assert child("acknowledge") is True
    else:
        assert child("commit") == 0
    assert quarantined(rig) == 0
    assert session.lookup(keys_of(loose(8, "half"))).prefix == 0
    assert room(session, 8, "new") == 8


def test_bytes_under_an_expired_lease_stay_until_its_holder_speaks(make: Make, engine: Engines) -> None:
    """L48: also when the block is evicted meanwhile."""
    rig = make(slots=4, tiers=[], changes={"engine": {"lease_ttl": "200ms", "shutdown_grace": "4s"}}).start()
    session = rig.attach()
    made = chain(4)
    store(session, made)
    child = engine(rig)
    child("lease", 4, "chain")
    wait_for(lambda: quarantined(rig) == 4, "the lease to expire")
    assert session.evict(keys_of(made)) == 4
    assert room(session, 4, "new") == 0
    assert child("leased") == [payload(block.key, 8).hex() for block in made]
    assert wait_for(lambda: child("poll"), "the notice") >= 1
    child("acknowledge")
    assert room(session, 4, "new") == 4


def test_an_engine_that_cannot_be_given_the_pool_is_not_waited_for(make: Make, engine: Engines) -> None:
    """L81: no descriptor is left for its liveness pipe; what others of its name hold later is freed."""
    rig = make(slots=8, tiers=[]).start()
    with rig.descriptors(3), rig.attach(engine_id="child") as poor:  # its socket twice, and half a pipe
        assert not poor.connected
    wait_for(lambda: "the pool could not be handed over" in rig.daemon.log_tail(), "the line in the log")
    child = engine(rig)
    child("reserve", 8, "half")
    child.kill()
    session = rig.attach()
    wait_for(lambda: room(session, 8, "new") == 8, "all slots")


def test_a_goodbye_is_a_word(make: Make, engine: Engines) -> None:
    """A process that says goodbye touches the pool no more: no quarantine."""
    rig = make(slots=8, tiers=[]).start()
    session = rig.attach()
    child = engine(rig)
    child("reserve", 8, "half")
    child("close")
    assert quarantined(rig) == 0
    assert room(session, 8, "new") == 8


def test_a_worker_voids_keys_but_neither_reserves_nor_commits(rig: DaemonRig) -> None:
    """DESIGN 4: only the scheduler reserves and commits; a failed copy is never visible."""
    scheduler, worker = rig.attach(), rig.attach(role="worker")
    made = loose(4)
    job = scheduler.prepare_store(keys_of(made), meta=[block.meta for block in made])
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, 4096)
    assert worker.fail(job.job, [made[2].key])
    for forbidden in (lambda: worker.prepare_store([made[0].key]), lambda: worker.load([made[0].key])):
        with pytest.raises(RequestRefused, match="not_allowed"):
            forbidden()
    assert job.commit(failed=[made[0].key]) == (made[1].key, made[3].key)
    states = (KeyState.MISS, KeyState.HIT, KeyState.MISS, KeyState.HIT)
    assert scheduler.lookup(keys_of(made)).states == states
    rig.settle()
    assert {e.block_hashes[0] for e in rig.router.events} == {made[1].meta.hashes[0], made[3].meta.hashes[0]}


def test_a_layout_without_sessions_makes_room_for_another(make: Make) -> None:
    """The issue: its blocks get removals; while it is attached the other is refused in words."""
    rig = make(slots=16, tiers=[]).start()
    other = msgspec.structs.replace(LAYOUT, model="other")
    first = rig.attach()
    assert len(store(first, loose(16))) == 16
    with pytest.raises(RequestRefused, match=r"pool_exhausted.*pool\.bytes"):
        rig.attach(other, engine_id="e1")
    first.close()
    second = rig.attach(other, engine_id="e1")
    rig.layouts.remove(LAYOUT)  # it would need room of its own to be asked
    assert len(store(second, loose(16))) == 16
    status = rig.settle()
    assert rig.router.counts["BlockRemoved"] == 16
    assert sum(layout["blocks"] for layout in status["layouts"]) == 16

"""The pool outlives the daemon: served again at once, nothing told twice, no slot reused under a copy."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtierd.client import KeyState, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, keys_of, layout_of, load, loose, store
from kvtierd.testing.engine_process import EngineProcess
from kvtierd.wire import slot_records
from kvtierd.wire.frames import bodies, checked

Make = Callable[..., DaemonRig]
Engines = Callable[..., EngineProcess]


@pytest.fixture
def kept(make: Make, tmp_path: Path) -> Callable[..., DaemonRig]:
    """Make a rig whose pool is a file in a memory-backed folder where there is one."""

    def build(**options: Any) -> DaemonRig:
        rig = make(**{"tiers": [], **options})
        rig.edit(lambda body: body["pool"].update(backing="file"))
        return rig.start()

    return build


def crash(rig: DaemonRig, *sessions: Session) -> None:
    """Kill the daemon and start the next one; the router stays and hears both, the sessions come back."""
    rig.daemon.kill()
    rig.daemon.start()
    for session in sessions:
        wait_for(lambda session=session: not session.lookup([]).reason, "a session to be back")  # type: ignore[misc]


def room(session: Session, slots: int, prefix: str) -> int:
    """How many of ``slots`` blocks get a slot now; nothing is kept."""
    job = session.prepare_store(keys_of(loose(slots, prefix)))
    count = len(job.keys)
    job.abort()
    return count


def quarantined(rig: DaemonRig) -> int:
    return int(rig.status()["quarantined_slots"])


def settled(rig: DaemonRig) -> None:
    """Wait until the restart's difference was told, and compare.

    Changes of a killed daemon's last moment are taken back once more, which readers ignore that know of them.
    """

    def told() -> bool:
        rig.router.poll(0.005)
        return not rig.status()["events"]["journal"]["holding"]

    wait_for(told, "the difference to be told")
    rig.catch_up(rig.router, rig.settle())
    rig.router.counts.pop("unknown_removals", None)
    rig.agree()


def test_a_killed_daemons_blocks_are_hits_of_the_next_one_and_nobody_is_told_twice(kept: Make) -> None:
    rig = kept(slots=64)
    session = rig.attach()
    blocks = chain(20)
    store(session, blocks)
    rig.settle()
    wait_for(lambda: rig.status()["events"]["journal"]["settled"], "the journal to be sure", timeout=5)
    pool_id, heard = session.pool_id, len(rig.router.events)
    before = rig.router.counts["resets"]
    crash(rig, session)
    assert load(rig.attach(engine_id="other"), blocks) == ["cpu"] * 20
    assert load(session, blocks) == ["cpu"] * 20, "the engine of before came back by itself"
    assert session.pool_id == pool_id
    settled(rig)
    assert rig.status()["pool"]["kept"] == {"state": "yes"}
    # A heartbeat that was lost in the kill makes the router ask for all: no second telling, but 20 more.
    resets = rig.router.counts["resets"] - before
    assert len(rig.router.events) == heard + 20 * resets
    assert rig.tier("cpu")["counters"]["restored"] == 20


def test_what_was_not_committed_is_lost_and_its_slots_are_free_when_nobody_copies(
    kept: Make, engine: Engines
) -> None:
    rig = kept(slots=8)
    store(rig.attach(), chain(3))
    child = engine(rig)
    child("reserve", 5, "half")
    child("scribble", "h")
    child.kill()
    crash(rig)
    session = rig.attach()
    assert session.lookup(keys_of(loose(5, "half"))).states == (KeyState.MISS,) * 5
    wait_for(lambda: room(session, 8, "new") == 8, "the slots of the dead engine")
    assert quarantined(rig) == 0


def test_a_copy_that_outlives_the_daemon_hits_nobody(kept: Make, engine: Engines) -> None:
    """DESIGN 4 across a restart: into reserved and out of leased slots, by a process that is late."""
    rig = kept(slots=8)
    session = rig.attach()
    store(session, chain(3))
    child = engine(rig)
    leased = child("lease", 3, "chain")["slots"]
    before = child("leased")
    reserved = child("reserve", 4, "half")["slots"]
    crash(rig, session)
    assert quarantined(rig) == 7
    made = loose(8, "mine")
    job = session.prepare_store(keys_of(made), meta=[block.meta for block in made])
    assert len(job.keys) == 1
    assert not set(job.slots) & {*leased, *reserved}
    job.abort()
    session.evict(keys_of(chain(3)))
    child("scribble", "z")
    assert room(session, 8, "more") == 1
    assert child("leased") == before, "what it reads stays in place, whatever was evicted meanwhile"
    assert child("revive") >= 1, "it finds a fence that it has not acknowledged"
    assert quarantined(rig) == 7
    assert child("commit") == 0, "a job of before is not stored"
    assert child("acknowledge") is True
    assert quarantined(rig) == 0
    assert room(session, 8, "new") == 8
    rig.agree()


def test_slots_of_an_engine_that_never_comes_back_are_freed_by_its_death_alone(
    kept: Make, engine: Engines
) -> None:
    rig = kept(slots=8)
    child = engine(rig)
    child("reserve", 5, "half")
    crash(rig)
    crash(rig)
    session = rig.attach()
    assert (quarantined(rig), room(session, 8, "new")) == (5, 3), "two restarts on it is still kept aside"
    child.kill()
    wait_for(lambda: room(session, 8, "new") == 8, "all slots")


def test_every_process_of_the_engine_has_to_speak(kept: Make, engine: Engines) -> None:
    rig = kept(slots=8)
    scheduler, worker = engine(rig, "tp"), engine(rig, "tp", "worker")
    scheduler("reserve", 5, "half")
    crash(rig)
    assert scheduler("revive") >= 1
    assert scheduler("acknowledge") is True
    assert quarantined(rig) == 5, "the worker may be copying"
    worker.kill()
    wait_for(lambda: quarantined(rig) == 0, "the worker's death to count")


def test_a_quarantine_goes_on_across_a_restart(kept: Make, engine: Engines) -> None:
    """A client that dropped its connection but lives may still be copying, whatever the daemon does."""
    rig = kept(slots=8)
    session = rig.attach()
    child = engine(rig)
    child("reserve", 4, "half")
    assert child("drop") == 1
    wait_for(lambda: quarantined(rig) == 4, "the quarantine")
    crash(rig, session)
    assert quarantined(rig) == 4
    assert room(session, 8, "new") == 4
    child("revive")
    child("acknowledge")
    assert room(session, 8, "new") == 8


def test_closing_the_liveness_pipe_does_not_free_slots_of_a_process_that_lives(
    kept: Make, engine: Engines
) -> None:
    rig = kept(slots=8)
    child = engine(rig)
    child("reserve", 4, "half")
    assert child("hush") == 1
    child("drop")
    wait_for(lambda: quarantined(rig) == 4, "the quarantine")
    assert room(rig.attach(), 8, "new") == 4
    child.kill()
    wait_for(lambda: quarantined(rig) == 0, "its death")


def test_each_layout_gets_its_own_blocks_back(kept: Make) -> None:
    """And keeps them while its engine is on its way back."""
    rig = kept(slots=32)
    other = layout_of("other", 2 * 4096)
    mine, theirs = rig.attach(), rig.attach(other, engine_id="e1")
    store(mine, chain(12, "a"))
    store(theirs, chain(5, "b"))
    crash(rig)
    third = rig.attach(layout_of("third", 4096), engine_id="e2")
    store(third, chain(32, "c"))
    crash(rig, mine, theirs)
    assert load(mine, chain(12, "a")) == ["cpu"] * 12
    assert load(theirs, chain(5, "b")) == ["cpu"] * 5
    settled(rig)


def test_kills_leave_one_pool_on_disk_and_nothing_else_grows(kept: Make) -> None:
    """L98: five kills; there is one region, and each start goes on with it."""
    rig = kept(slots=64)
    session = rig.attach()
    for turn in range(5):
        store(session, chain(4, f"t{turn}"))
        crash(rig, session)
        assert load(session, chain(4, f"t{turn}")) == ["cpu"] * 4
    run = rig.folder / "run"
    names = sorted(name for name in os.listdir(run) if name.startswith("pool"))
    assert [name for name in names if "slots" not in name] == ["pool", "pool.live"]
    wait_for(lambda: len([name for name in os.listdir(run) if "slots" in name]) == 1, "one slot table")
    # One pipe for each process that lives: this one, which attached many times.
    wait_for(lambda: len(os.listdir(run / "pool.live")) == 1, "one pipe")
    settled(rig)


def test_a_clean_stop_leaves_nothing_or_the_whole_pool(kept: Make) -> None:
    """As ``events.on_stop`` says."""
    rig = kept(slots=64)
    store(rig.attach(), chain(8))
    rig.settle()
    assert rig.daemon.stop() == 0
    assert not [name for name in os.listdir(rig.folder / "run") if name.startswith("pool")]
    rig.edit(lambda body: body["events"].update(on_stop="keep"))
    rig.start()
    session = rig.attach()
    assert session.lookup(keys_of(chain(8))).prefix == 0
    store(session, chain(8))
    rig.settle()
    heard = len(rig.router.events)
    assert rig.daemon.stop() == 0
    rig.start()
    assert load(rig.attach(), chain(8)) == ["cpu"] * 8
    settled(rig)
    assert len(rig.router.events) == heard


@pytest.mark.parametrize("damage", ["size", "table", "none", "foreign", "boot"])
def test_a_pool_that_cannot_be_believed_is_begun_anew_and_taken_back(kept: Make, damage: str) -> None:
    rig = kept(slots=64)
    store(rig.attach(), chain(8))
    rig.settle()
    rig.daemon.kill()
    run = rig.folder / "run"
    (table,) = (run / name for name in os.listdir(run) if "slots" in name)
    data = bytearray(table.read_bytes())
    if damage == "size":
        rig.edit(lambda body: body["pool"].update(bytes="128KiB"))
    elif damage == "table":
        data[60] ^= 1
        table.write_bytes(data)
    elif damage == "none":
        table.unlink()
    elif damage == "foreign":
        (run / "pool").rename(run / "aside")
        (run / "pool").write_bytes((run / "aside").read_bytes())
        (run / "aside").unlink()
    else:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        assert boot in data
        rebuilt = _with_boot(bytes(data))
        table.write_bytes(rebuilt)
    rig.start()
    session = rig.attach()
    assert session.lookup(keys_of(chain(8))).prefix == 0
    assert rig.status()["pool"]["kept"]["state"] == "no"
    store(session, chain(3))
    settled(rig)


def _with_boot(data: bytes) -> bytes:
    """Return a slot table as of another run of the machine."""
    file = io.BytesIO(data[len(slot_records.MAGIC) :])
    first = next(bodies(file))
    of = msgspec.msgpack.decode(first, type=slot_records.Header)
    return slot_records.header(msgspec.structs.replace(of, boot="another")) + file.read()


def test_a_torn_end_is_cut_and_the_rest_is_served(kept: Make) -> None:
    rig = kept(slots=64)
    session = rig.attach()
    store(session, chain(8))
    rig.settle()
    rig.daemon.kill()
    run = rig.folder / "run"
    (table,) = (run / name for name in os.listdir(run) if "slots" in name)
    data = table.read_bytes()
    table.write_bytes(data + checked(bytes(64))[:20])
    rig.daemon.start()
    assert load(rig.attach(), chain(8)) == ["cpu"] * 8
    settled(rig)


def test_events_of_the_pool_may_be_off(kept: Make) -> None:
    """The pool is kept all the same."""
    rig = kept(slots=16)
    rig.daemon.stop()
    rig.edit(lambda body: body["tiers"][0].update(events=False))
    rig.start()
    session = rig.attach()
    store(session, chain(4))
    crash(rig, session)
    assert load(session, chain(4)) == ["cpu"] * 4
    settled(rig)


def test_an_evicted_block_does_not_come_back(kept: Make) -> None:
    rig = kept(slots=8)
    session = rig.attach()
    for turn in range(12):
        store(session, loose(8, f"t{turn}-"))
    session.evict(keys_of(loose(2, "t11-")))
    crash(rig, session)
    assert session.lookup(keys_of(loose(8, "t10-"))).prefix == 0
    assert session.lookup(keys_of(loose(2, "t11-"))).prefix == 0
    assert load(session, loose(8, "t11-")[2:]) == ["cpu"] * 6
    settled(rig)
    assert rig.status()["pool"]["slot_table"]["degraded"] is None

"""Stores and loads that meet: of one block at once, with a reset, of more than the pool holds.

``KVTIERD_INTERLEAVES`` and ``KVTIERD_LARGE_LOAD`` (bytes) make two of them larger than the ordinary run has
time for; they have passed with 10,000 and with 8 GiB.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.client import BlockKey, Client, KeyState, Session, hash_of
from kvtierd.client.pipeline import Pipeline
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import (
    LAYOUT,
    DaemonRig,
    Router,
    chain,
    fs_tier,
    keys_of,
    layout_of,
    load,
    loose,
    store,
)
from kvtierd.testing.workload import WorkBlock, payload

Make = Callable[..., DaemonRig]

INTERLEAVES = int(os.environ.get("KVTIERD_INTERLEAVES", "1000"))
LARGE_LOAD = int(os.environ.get("KVTIERD_LARGE_LOAD", 192 << 20))
LARGE_BLOCK = 1 << 20

GATED = '''
import pathlib, threading
from kvtierd.edges.backends.memory import MemoryBackend

class Gated(MemoryBackend):
    """Reads wait for as long as a file is there; beside it is one for each read that waits or has waited."""

    def __init__(self, name, gate):
        super().__init__(name)
        self.gate = pathlib.Path(gate)

    def read(self, transfers):
        for number in range(1000):
            if not (begun := self.gate.with_suffix(f".{number}")).exists():
                break
        begun.touch()
        while self.gate.exists():
            threading.Event().wait(0.01)
        return super().read(transfers)

def make(name, options):
    return Gated(name, options["gate"])
'''


@pytest.fixture
def gate(tmp_path: Path, tier_type: Callable[[str, str], None]) -> Path:
    """Install the type ``gated``; return the file that stops its reads while it is there."""
    tier_type("gated", GATED)
    return tmp_path / "gate"


def gated(make: Make, gate: Path, slots: int) -> DaemonRig:
    """A daemon with a gated tier below a small pool, and one cold block of chain(1) in it."""
    rig = make(slots=slots)
    tape = {"name": "tape", "type": "gated", "locality": "REMOTE", "options": {"gate": str(gate)}}
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], tape]))
    rig.start()
    session = rig.attach(engine_id="first")
    store(session, chain(1))
    rig.settle()
    session.evict(keys_of(chain(1)), ["cpu"])
    session.close()
    gate.touch()
    return rig


def test_a_read_that_outlives_a_reset_never_lands_in_a_block_stored_after_it(make: Make, gate: Path) -> None:
    """L15: one slot, so that the new block can have no other; the old load is cancelled by the reset."""
    rig = gated(make, gate, slots=1)
    session, other = rig.attach(), rig.attach(engine_id="other")
    served: list[list[str]] = []
    loading = threading.Thread(target=lambda: served.append(load(session, chain(1), deadline=8.0)))
    loading.start()
    wait_for(gate.with_suffix(".0").exists, "the read to begin")
    pipeline = Pipeline(other)
    reset = pipeline.reset()  # it is over when the tape is empty, for which its read has to end
    pipeline.flush()
    loading.join(5)
    assert served == [[]], "cancelled long before its deadline"
    assert not reset.done
    (new,) = loose(1, "new")
    assert store(other, [new]) == (), "the late read may still write to the only slot"
    gate.unlink()
    assert pipeline.wait([reset])
    assert reset.result == 1
    wait_for(lambda: store(other, [new]) == (new.key,), "the slot to be free")
    rig.settle()
    assert load(session, [new]) == ["cpu"]
    assert session.lookup(keys_of(chain(1))).states == (KeyState.MISS,)


def test_a_load_that_ends_many_polls_later_is_delivered_once(make: Make, gate: Path) -> None:
    """L59: an engine that polls finds the answer to a slow load once, however often it looked before."""
    rig = gated(make, gate, slots=4)
    pipeline = Pipeline(rig.attach())
    call = pipeline.load(keys_of(chain(1)), deadline=8.0)
    pipeline.flush()
    wait_for(gate.with_suffix(".0").exists, "the read to begin")
    for _ in range(5):
        pipeline.poll()
        assert not call.done
    gate.unlink()

    def ended() -> bool:
        pipeline.poll()
        return call.done

    wait_for(ended, "the load to end", poll=0.001)
    got = call.result
    assert [bytes(view) for view in got.views()] == [payload(chain(1)[0].key, 4096)]
    assert rig.status()["leases"] == 1
    for _ in range(5):
        pipeline.poll()
        assert call.result is got
    pipeline.wait([pipeline.release(got)])
    assert rig.status()["leases"] == 0
    assert rig.counter("cpu", "load_from_tape") == 1


# -- one block, stored and loaded at once ------------------------------------------------------------------

ROUND = struct.Struct("<Q")


def fill(view: memoryview, number: int) -> None:
    view[:] = ROUND.pack(number) * (len(view) // ROUND.size)


def rounds_in(views: list[memoryview]) -> set[int]:
    """Return which rounds wrote what a load gives: one, unless it is torn."""
    return {number for view in views for (number,) in ROUND.iter_unpack(bytes(view))}


def test_a_store_and_a_load_of_one_block_meet_in_any_order_on_one_connection(make: Make) -> None:
    """L53: the load gives nothing, or all of what this round stored; never an earlier round's bytes."""
    rig = make(slots=8, paranoid=False).start()
    session = rig.attach()
    pipeline, rng = Pipeline(session), random.Random(53)
    (block,) = chain(1)
    keys = [block.key]
    for number in range(1, INTERLEAVES + 1):
        early = [pipeline.load(keys) for _ in range(rng.randrange(2))]
        prepared = pipeline.prepare_store(keys, [block.meta])
        early += [pipeline.load(keys) for _ in range(rng.randrange(2))]
        assert pipeline.wait([prepared, *early])
        (view,) = prepared.result.views()
        fill(view, number)
        waits = rng.choice((0.0, 0.05))
        between = [pipeline.load(keys, waits) for _ in range(rng.randrange(2))]
        committed = pipeline.commit(prepared.result)
        after = pipeline.load(keys, waits)
        assert pipeline.wait([committed, *between, after])
        assert committed.result == (block.key,)
        misses = [call.result.keys for call in (*early, *between)]
        assert misses == [()] * len(misses), "nothing is there before the commit"
        assert rounds_in(after.result.views()) == {number}
        pipeline.wait([pipeline.release(call.result) for call in (*early, *between, after)])
        assert session.evict(keys) >= 1


def test_a_store_and_a_load_of_one_block_meet_in_any_order_on_two_connections(make: Make) -> None:
    """L53: as above, with a loader that never knows how far the storer is, over pool and disk."""
    rig = make(slots=8, paranoid=False).start()
    storing, loading = rig.attach(), rig.attach(engine_id="loader")
    (block,) = chain(1)
    oldest = newest = 0
    stop = threading.Event()
    seen: dict[str, int] = {"hits": 0, "misses": 0}
    errors: list[object] = []

    def loader() -> None:
        try:
            for turn in itertools.count():
                if stop.is_set():
                    return
                least = oldest
                with loading.load([block.key], deadline=(0.0, 0.02)[turn % 2]) as got:
                    rounds = rounds_in(got.views())
                if rounds:
                    (number,) = rounds
                    assert least <= number <= newest, (least, number, newest)
                seen["hits" if rounds else "misses"] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loader)
    thread.start()
    try:
        for number in range(1, INTERLEAVES + 1):
            job = storing.prepare_store([block.key], [block.meta])
            for view in job.views():
                newest = number
                fill(view, number)
            job.commit()
            if number % 3:
                storing.evict([block.key])
                oldest = number + 1
            if errors:
                break
    finally:
        stop.set()
        thread.join(20)
    assert errors == []
    assert min(seen.values()) > 0, seen


def test_nothing_is_told_or_served_of_a_block_before_it_is_committed(rig: DaemonRig) -> None:
    """L62: written, but not acknowledged: a miss for everybody, and not a word on the stream."""
    storing, other = rig.attach(), rig.attach(engine_id="other")
    made = chain(2)
    job = storing.prepare_store(keys_of(made), meta=[block.meta for block in made])
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, len(view))
    for session in (storing, other):
        assert load(session, made) == []
    heard = rig.router.counts["batches"]
    rig.router.wait_for(lambda r: r.counts["batches"] > heard + 2, what="two heartbeats")
    assert rig.router.events == []
    assert job.commit() == tuple(keys_of(made))
    assert load(other, made) == ["cpu"] * 2


# -- more than the pool holds ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_client_loads_many_pools_from_disk_and_never_waits_a_second_without_word(make: Make) -> None:
    """L117: the engine that stored it is gone; each call of the next brings blocks or ends in a second."""
    layout = layout_of("large", LARGE_BLOCK)
    count = max(64, LARGE_LOAD // LARGE_BLOCK)
    slots = max(16, min(512, count // 8))
    rig = make(layout=layout, slots=slots, disk_bytes=2 * count * LARGE_BLOCK, paranoid=False)
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], fs_tier(rig.folder)]))
    rig.start()
    part = slots // 4
    chains = [chain(part, f"part{number}") for number in range(count // part)]
    made = [block for some in chains for block in some]
    first = rig.attach(layout, engine_id="first")
    for number, some in enumerate(chains, 1):
        assert stored(first, some) == part
        on_disk = (number - 1) * part
        wait_for(lambda least=on_disk: rig.tier("disk")["blocks"] >= least, "the disk to keep up", timeout=60)  # type: ignore[misc]
    wait_for(lambda: rig.tier("disk")["blocks"] == len(made), "all of it on the disk", timeout=120)
    rig.client.close()
    second = rig.attach(layout, engine_id="second")
    longest, at, empty = 0.0, 0, 0
    began = time.monotonic()
    while at < len(made):
        asked = made[at : at + slots]  # more than may be promoted at a time
        start_of_call = time.monotonic()
        with second.load(keys_of(asked), deadline=0.5) as got:
            longest = max(longest, time.monotonic() - start_of_call)
            for key, view in zip(got.keys, got.views(), strict=True):
                assert view[:8] == view[-8:] == head(key)
            at += len(got.keys)
            empty = 0 if got.keys else empty + 1
        assert empty < 20, f"no progress after {at} blocks"
    spent = time.monotonic() - began
    assert longest < 1.0, f"{longest:.2f} s without a word"
    assert rig.status()["loads_waiting"] == 0
    print(f"{len(made) * LARGE_BLOCK >> 20} MiB in {spent:.1f} s, the longest call {longest:.2f} s")


def head(key: BlockKey) -> bytes:
    return hash_of(key)[:8]


def stored(session: Session, blocks: list[WorkBlock]) -> int:
    """Store large blocks, which are told apart by their first and last bytes."""
    job = session.prepare_store(keys_of(blocks), meta=[block.meta for block in blocks])
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:8] = view[-8:] = head(key)
    return len(job.commit())


def test_after_a_restart_under_load_every_client_is_back_in_seconds_and_none_hangs(make: Make) -> None:
    """L112: the daemon is killed while six clients store and load; no call takes longer than its deadline."""
    rig = make(slots=64).start()
    stop, longest, back, errors = threading.Event(), [0.0] * 6, [0.0] * 6, []
    restarted = float("inf")

    def client(number: int) -> None:
        made, mine = chain(4, f"client{number}"), Client(rig.daemon.socket, deadline=1.0)
        session = mine.attach(LAYOUT, engine_id=f"c{number}")
        try:
            while not stop.is_set():
                began = time.monotonic()
                stored = len(store(session, made))
                got = load(session, made, deadline=0.2)
                longest[number] = max(longest[number], time.monotonic() - began)
                if began > restarted and not back[number] and (stored or got):
                    back[number] = time.monotonic() - restarted
                session.evict(keys_of(made))
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    rig.layouts.add(LAYOUT)
    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        rig.router.wait_for(lambda r: len(r.events) > 100, what="the load")
        rig.daemon.kill()
        rig.router.close()
        rig.router = Router()
        rig.start()
        restarted = time.monotonic()
        wait_for(lambda: all(back) or errors, "all clients to be served again", timeout=20)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert errors == []
    assert max(back) < 5.0, back
    assert max(longest) < 5.0, "three calls that wait for a second each, and a load"
    assert rig.status()["pool"]["bytes"] == 64 * 4096

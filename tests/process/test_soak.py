"""Many clients at once, crashes in the middle, and at each quiet point one truth."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvtierd.client import KeyState, Scope, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import (
    BIG,
    FILE,
    DaemonRig,
    Router,
    chain,
    fs_tier,
    keys_of,
    load,
    loose,
    store,
)
from kvtierd.testing.workload import WorkBlock

Make = Callable[..., DaemonRig]


class Lossy(Router):
    """Loses one message in twenty on the way."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def feed(self, number: int, payload: bytes) -> int | None:
        if self.wanted is None and self._rng.random() < 0.05:
            self.counts["lost"] += 1
            return self.wanted
        return super().feed(number, payload)


class Crowd:
    """Threads that each use a session of their own until told to stop."""

    def __init__(self, seed: int, *sessions: Session) -> None:
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self.loaded = self.stored = 0
        self._chains = [chain(12, f"chain{number}") for number in range(12)]
        self._threads = [
            threading.Thread(target=self._live, args=(session, random.Random(seed + number)))
            for number, session in enumerate(sessions)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        assert self.errors == []

    def _live(self, session: Session, rng: random.Random) -> None:
        try:
            while not self._stop.is_set():
                self._act(session, rng, rng.choice(self._chains)[: rng.randint(1, 12)])
        except BaseException as error:
            self.errors.append(error)

    def _act(self, session: Session, rng: random.Random, made: list[WorkBlock]) -> None:
        keys = keys_of(made)
        match rng.randrange(14):
            case 0 | 1 | 2 | 3:
                scope = rng.choice((None, None, Scope(store_to=("near",)), Scope(store_to=())))
                self.stored += len(store(session, made, scope=scope, rich=rng.random() < 0.9))
            case 4 | 5 | 6 | 7:
                scope = rng.choice((None, None, Scope(load_from=("far",))))
                self.loaded += len(load(session, made, scope=scope, deadline=rng.choice((0.0, 0.01, 1.0))))
            case 8:
                session.lookup(keys, promote=True, lease=rng.choice((None, 0.05)))
            case 9:
                session.evict(keys, rng.choice((None, ["cpu"], ["near"], ["far", "cpu"])))
            case 10:
                session.prefetch(keys)
            case 11:
                session.touch(keys)
            case 12:
                session.prepare_store(keys, meta=[block.meta for block in made]).abort()
            case 13 if rng.random() < 0.1:
                session.reset(rng.choice((None, ["cpu"], ["far"])))


def crowded(make: Make) -> DaemonRig:
    """A pool and two disks that are all too small for what the crowd stores."""
    rig = make(slots=40, changes={"engine": {"job_ttl": "5s", "lease_ttl": "5s", "shutdown_grace": "4s"}})
    below = [
        fs_tier(rig.folder, "near", locality="LOCAL", max_bytes=60 * FILE),
        fs_tier(rig.folder, "far", max_bytes=90 * FILE),
    ]
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], *below]))
    return rig.start()


def meanwhile(rig: DaemonRig, crowd: Crowd, loads: int) -> None:
    """Read the stream until the crowd has loaded so many blocks."""
    rig.router.wait_for(
        lambda _: crowd.loaded >= loads or bool(crowd.errors) or bool(rig.complaints()), 30, "the crowd"
    )


@pytest.fixture
def lossy() -> Iterator[Lossy]:
    """A router with a bad line."""
    with Lossy(random.Random(1)) as router:
        yield router


def test_a_crowd_never_gets_a_wrong_byte_and_leaves_one_truth(make: Make, lossy: Lossy) -> None:
    """L50, L53, L105, L18: invariants after every turn; a router that loses messages ends equal too."""
    rig = crowded(make)
    rig.follow(lossy)
    sessions = [rig.attach(engine_id=f"e{number}") for number in range(4)]
    for round_number in range(3):
        with Crowd(round_number * 10, *sessions) as crowd:
            meanwhile(rig, crowd, 150)
            lossy.poll()
        rig.agree(lossy)
        status = rig.status()
        assert (status["jobs"], status["loads_waiting"], status["quarantined_slots"]) == (0, 0, 0)
    with Router() as late:
        rig.follow(late)
        rig.agree(late)
    assert lossy.counts["lost"] > 0
    assert lossy.counts["gaps"] > 0


def test_a_stop_under_load_is_clean(make: Make) -> None:
    """L30: exit code 0 within the grace period; the last word of the stream is the truth on the disks."""
    rig = crowded(make)
    sessions = [rig.attach(engine_id=f"e{number}") for number in range(3)]
    with Crowd(7, *sessions) as crowd:
        meanwhile(rig, crowd, 80)
        assert rig.daemon.stop() == 0, rig.daemon.log_tail()
    while rig.router.poll(0.2):
        pass
    assert {entry.medium for entry in rig.router.resident} <= {"STORAGE"}
    before = set(rig.router.resident)
    rig.start()
    rig.agree()
    assert rig.router.resident == before


@pytest.mark.timeout(120)
def test_crashes_in_the_middle_of_writes_leave_no_half_block(make: Make) -> None:
    """L65, L71, L98: ten kills; what was announced is a hit after each, whole; no temporary is left.

    A router that comes new after each one learns exactly what is there.
    """
    rig = make(slots=2048, paranoid=False).start()
    small, big = loose(150, "small"), loose(10, "big")
    for number in range(10):
        few, many = rig.attach(BIG), rig.attach()
        store(few, big)
        store(many, small)
        least = 15 * number
        rig.router.wait_for(lambda r, n=least: sum(e.medium == "STORAGE" for e in r.resident) >= n)  # type: ignore[misc]
        known = {entry.hash for entry in rig.router.resident if entry.medium == "STORAGE"}
        rig.restart(crash=True)
        rig.agree()
        assert {entry.medium for entry in rig.router.resident} <= {"STORAGE"}
        left = partial((rig.folder / "disk").rglob, ".tmp-*")  # a record may be on its way
        wait_for(lambda rest=left: not list(rest()), "no temporary to be left")  # type: ignore[misc]
        for session, blocks in ((rig.attach(BIG), big), (rig.attach(), small)):
            states = session.lookup(keys_of(blocks)).states
            found = [block for block, state in zip(blocks, states, strict=True) if state is KeyState.COLD]
            announced = [block for block in blocks if block.meta.hashes[0] in known]
            assert set(keys_of(announced)) <= set(keys_of(found)), "announced, so it must be there"
            assert load(session, found) == ["disk"] * len(found)
            session.reset(["cpu"])
            if number % 3 == 2:
                session.reset()
        rig.settle()


def test_fifty_loads_of_one_file_are_one_read(rig: DaemonRig) -> None:
    """L54."""
    (block,) = loose(1)
    sessions = [rig.attach(engine_id=f"e{number}") for number in range(50)]
    store(sessions[0], [block])
    rig.settle()
    sessions[0].evict([block.key], ["cpu"])
    barrier = threading.Barrier(50)
    served: list[list[str]] = []

    def fetch(session: Session) -> None:
        barrier.wait(20)
        served.append(load(session, [block]))

    threads = [threading.Thread(target=fetch, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(len, served)) == [1] * 50
    assert rig.counter("disk", "read_ok") == 1


def test_a_store_that_wants_the_disk_gets_it_while_another_is_under_way(rig: DaemonRig) -> None:
    """L45: pending is not never."""
    first, second = rig.attach(engine_id="e0"), rig.attach(engine_id="e1")
    (block,) = loose(1)
    job = first.prepare_store([block.key], meta=[block.meta], scope=Scope(store_to=()))
    assert store(second, [block]) == ()
    assert job.commit() == (block.key,)
    wait_for(lambda: block.key in rig.copies(), "the copy on disk", timeout=2)


def test_everything_of_a_large_store_is_told(make: Make) -> None:
    """EVENTS: at most 4,096 events a batch, none lost."""
    rig = make(slots=10_000, tiers=[], paranoid=False).start()
    session = rig.attach()
    made = chain(10_000)
    assert len(store(session, made)) == 10_000
    assert session.reset() == 10_000
    rig.settle()
    sizes = [len(batch.events) for batch in rig.router.batches if batch.events]
    assert max(sizes) <= 4096
    assert sum(sizes) == 20_000

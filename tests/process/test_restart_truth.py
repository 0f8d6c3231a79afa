"""Whatever ends the daemon, readers that stayed connected end with what the next one has.

Three readers each time: with replay, with neither replay nor a late start, and one that joins after all.
"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtierd.client import Client, Session
from kvtierd.errors import KvtierdError
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, Router, chain, keys_of, loose, store

Make = Callable[..., DaemonRig]


OPEN: list[Router] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the readers of a test, however it ends."""
    yield
    while OPEN:
        OPEN.pop().close()


def bare(rig: DaemonRig) -> Router:
    """Connect a reader that never asks for anything."""
    router = Router()
    OPEN.append(router)
    router.connect(rig.daemon.endpoint)
    router.following = True
    rig.follow(router)
    return router


def agree(rig: DaemonRig, *others: Router) -> None:
    """Compare all readers, and one that joins now, with the inventory.

    After a crash changes of the last moment are taken back once more, which readers ignore that know of them.
    A SUB socket subscribes again only while somebody polls it.
    """

    def back() -> bool:
        for router in (rig.router, *others):
            router.poll(0.005)
        return not journal(rig)["holding"]

    wait_for(back, "readers to be back")
    for router in (rig.router, *others):
        rig.catch_up(router, rig.settle())
        router.counts.pop("unknown_removals", None)
    with Router() as late:
        rig.follow(late)
        rig.agree(*others, late)


def settle(rig: DaemonRig) -> None:
    """Wait until all that was told has left the daemon for certain."""
    rig.settle()
    wait_for(lambda: rig.status()["events"]["journal"]["settled"], "the journal to settle")


def journal(rig: DaemonRig) -> dict[str, Any]:
    found: dict[str, Any] = rig.status()["events"]["journal"]
    return found


def again(rig: DaemonRig, *, crash: bool = True) -> None:
    """End the daemon and start it anew, with every reader left connected."""
    if crash:
        rig.daemon.kill()
    else:
        assert rig.daemon.stop() == 0
    rig.daemon.start()
    rig.client.close()
    rig.client = Client(rig.daemon.socket, deadline=10.0)


@contextmanager
def load_on(rig: DaemonRig) -> Iterator[None]:
    """Store and evict without a pause, until the daemon is gone."""
    running, stop = threading.Event(), threading.Event()

    def work() -> None:
        with Client(rig.daemon.socket, deadline=10.0) as client:
            try:
                session = client.attach(rig.layout, engine_id="busy")
                for number in itertools.count():
                    made = chain(4, f"load{number % 40}")
                    store(session, made)
                    if number % 5 == 4:
                        session.evict(keys_of(made[2:]))
                    if number == 10:
                        running.set()
                    if stop.is_set():
                        return
            except KvtierdError:
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert running.wait(20.0), "no load"
        yield
    finally:
        stop.set()
        thread.join(30.0)


def pumped(rig: DaemonRig, router: Router, batches: int) -> None:
    """Let readers hear some batches of the load."""
    for reader in (rig.router, router):
        heard = reader.counts["batches"] + batches
        reader.wait_for(lambda r, heard=heard: r.counts["batches"] >= heard, what="some load")  # type: ignore[misc]


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_killed_under_load_ten_times(make: Make) -> None:
    rig = make(slots=32, disk_bytes=1 << 20).start()
    router = bare(rig)
    rig.layouts.add(rig.layout)
    for round_number in range(10):
        with load_on(rig):
            pumped(rig, router, 5 + 7 * round_number)
            rig.daemon.kill()
        again(rig)
        agree(rig, router)


def filled(make: Make, **options: Any) -> tuple[DaemonRig, Router, Session]:
    rig = make(**options).start()
    router = bare(rig)
    session = rig.attach()
    store(session, chain(6))
    store(session, loose(6))
    settle(rig)
    rig.agree(router)
    return rig, router, session


@pytest.mark.parametrize("crash", [True, False])
def test_only_the_difference_is_told_and_numbers_go_on(make: Make, crash: bool) -> None:
    """After a quiet moment a kill loses nothing; the disk's blocks are not told again.

    The heartbeat is slower than readers come back: one that they miss would be a gap.
    """
    rig, router, _ = filled(make, heartbeat="800ms")
    for reader in (rig.router, router):
        reader.counts.clear()
    again(rig, crash=crash)
    agree(rig, router)
    for reader in (rig.router, router):
        assert reader.counts["BlockRemoved"] == 12, "the pool's blocks"
        assert reader.counts["BlockStored"] == 0
        assert reader.counts["gaps"] == reader.counts["replays"] == reader.counts["unknown_removals"] == 0
    assert journal(rig)["confirmed"] == 12
    assert {event.medium for event in router.events[-12:]} == {"CPU"}


def test_files_that_vanish_and_come_back_while_it_is_down(make: Make) -> None:
    rig, router, _ = filled(make)
    blocks, aside = rig.folder / "disk" / "v1", rig.folder / "aside"
    rig.daemon.kill()
    shutil.move(blocks, aside)
    rig.daemon.start()
    agree(rig, router)
    assert not router.resident
    settle(rig)
    rig.daemon.kill()
    shutil.rmtree(blocks)
    shutil.move(aside, blocks)
    rig.daemon.start()
    agree(rig, router)
    assert len(router.resident) == 12


@pytest.mark.parametrize("crash", [True, False])
def test_a_tier_file_that_changed_while_it_was_down(make: Make, crash: bool) -> None:
    """Old labels are taken back before new ones are told."""
    rig, router, _ = filled(make)
    for change, localities in (
        (lambda tier: tier.update(locality="REMOTE"), {"REMOTE"}),
        (lambda tier: tier.update(events=False), set()),
        (lambda tier: tier.update(events=True, locality="LOCAL", name="other"), {"LOCAL"}),
    ):
        rig.edit(lambda body, change=change: change(body["tiers"][1]))  # type: ignore[misc]
        again(rig, crash=crash)
        agree(rig, router)
        assert {entry.locality for entry in router.resident} == localities
        settle(rig)
    rig.edit(lambda body: body["tiers"].pop())
    again(rig, crash=crash)
    agree(rig, router)
    assert not router.resident


def test_a_state_dir_that_was_lost(make: Make) -> None:
    """Found blocks are removed, then stored; numbers are above all before; who can ask starts over."""
    rig, router, _ = filled(make)
    rig.daemon.kill()
    shutil.rmtree(rig.folder / "state")
    rig.daemon.start()
    agree(rig)
    assert rig.router.counts["resets"] == 1
    rig.catch_up(router)
    truth = rig.router.resident
    assert {entry for entry in router.resident if entry.medium != "CPU"} == truth
    assert journal(rig)["lost"] == "there is none"


def test_a_state_dir_that_cannot_be_written_is_said_and_costs_no_event(make: Make) -> None:
    rig = make()
    (rig.folder / "state").rmdir()
    (rig.folder / "state").write_text("in the way")
    rig.start()
    store(rig.attach(), chain(3))
    rig.agree()
    assert "announced journal" in journal(rig)["degraded"]


def test_killed_before_readers_are_back(make: Make) -> None:
    """The difference is still owed then."""
    rig, router, _ = filled(make)
    for _ in range(3):
        rig.daemon.kill()
        rig.daemon.start()
    agree(rig, router)
    assert not any(entry.medium == "CPU" for entry in router.resident)


def test_a_clean_stop_leaves_readers_with_the_disk(make: Make) -> None:
    rig, router, session = filled(make)
    session.close()
    assert rig.daemon.stop() == 0
    for reader in (rig.router, router):
        reader.wait_for(lambda r: len(r.resident) == 12, what="the pool's removals")
    rig.daemon.start()
    agree(rig, router)
    assert json.loads(rig.daemon.config.read_text())["state_dir"] == str(rig.folder / "state")

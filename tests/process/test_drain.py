"""The way out: what is written down, when, and what cannot hold it up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, fs_tier, load, store

Make = Callable[..., DaemonRig]


def lazy(make: Make, **engine: object) -> DaemonRig:
    """A daemon whose disk gets only what the pool gives up."""
    rig = make(slots=64, changes={"engine": {"shutdown_grace": "4s", **engine}})
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], fs_tier(rig.folder, demote="on_evict")]))
    return rig.start()


def test_a_stop_writes_down_what_only_the_pool_holds(make: Make) -> None:
    """The cache of a pod that is replaced is on the disk, whatever the tier's demotion."""
    rig = lazy(make)
    made = chain(20)
    store(rig.attach(), made)
    rig.settle()
    assert rig.tier("disk")["blocks"] == 0
    assert rig.daemon.stop() == 0
    while rig.router.poll(0.2):
        pass
    assert {entry.medium for entry in rig.router.resident} == {"STORAGE"}
    rig.start()
    assert load(rig.attach(), made) == ["disk"] * 20


@pytest.mark.parametrize("wish", ["drain", "keep"])
def test_the_last_engine_that_leaves_begins_it_early(make: Make, wish: str) -> None:
    """A goodbye or a death; another engine that is still there keeps it from beginning."""
    rig = lazy(make, on_last_engine_gone=wish)
    made = chain(20)
    first, last = rig.attach(engine_id="e0"), rig.attach(engine_id="e1")
    store(first, made)
    first.close()
    ticks = rig.status()["turns"] + 3
    wait_for(lambda: rig.status()["turns"] > ticks, "some ticks")
    assert rig.tier("disk")["blocks"] == 0, "one is still there"
    rig.client.close()  # forgets no session: this process says goodbye with the last one
    last.close()
    if wish == "drain":
        wait_for(lambda: rig.tier("disk")["blocks"] == 20, "the pool to be written down")
    else:
        ticks = rig.status()["turns"] + 5
        wait_for(lambda: rig.status()["turns"] > ticks, "some ticks")
        assert rig.tier("disk")["blocks"] == 0
    again = rig.attach(engine_id="e2")
    assert load(again, made) == ["cpu"] * 20, "serving goes on"


def test_a_second_signal_ends_a_drain_at_once(make: Make) -> None:
    """Whatever the tier still has to do."""
    rig = make(slots=64, changes={"engine": {"shutdown_grace": "30s"}})
    rig.start()
    store(rig.attach(), chain(20))
    process = rig.daemon._process
    assert process is not None
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert time.monotonic() - begin < 10
    rig.daemon._process = None

"""Storage whose calls never return, as on a dead mount: its tier stalls, nothing else notices (L82)."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, fs_tier, keys_of, load, store
from kvtierd.testing.local_daemon import short_folder

BACKEND = '''
from kvtierd.edges.backends.memory import MemoryBackend

class Stuck(MemoryBackend):
    """One verb opens a FIFO, which blocks in the kernel until somebody opens its other end."""

    def __init__(self, name, fifo, verb):
        super().__init__(name)
        self.fifo, self.verb = fifo, verb

    def wait(self, verb):
        if verb == self.verb:
            open(self.fifo, "rb").close()

    def open(self):
        self.wait("open")

    def write(self, transfers):
        self.wait("write")
        return super().write(transfers)

    def scan(self):
        self.wait("scan")
        yield from super().scan()

    def close(self):
        self.wait("close")

def make(name, options):
    return Stuck(name, options["fifo"], options["verb"])
'''


@pytest.fixture
def verb():
    """The verb that hangs."""
    return "write"


@pytest.fixture
def rig(distribution, verb):
    site = distribution("stuck-tiers", {"stuck": "stuck_tiers:make"})
    (site / "stuck_tiers.py").write_text(BACKEND)
    with short_folder("stuck") as folder:
        os.mkfifo(folder / "fifo")
        stuck = {"name": "tape", "type": "stuck", "deadline": "200ms", "writers": 2}
        stuck["options"] = {"fifo": str(folder / "fifo"), "verb": verb}
        rig = DaemonRig(folder, slots=256, tiers=[stuck, fs_tier(folder)])
        try:
            yield rig.start()
            assert rig.complaints() == []
        finally:
            rig.close()


def stalls(rig):
    return rig.status()["movers"]["tape"]["stalls"]


def test_a_tier_that_never_answers_costs_its_own_blocks_only_and_sigterm_works(rig):
    blocks = chain(16)
    with rig.attach() as session:
        assert len(store(session, blocks)) == 16
        wait_for(lambda: stalls(rig)["now"] == 2, "both writers to be stuck")
        assert stalls(rig)["reason"] == "a write of 8 blocks took longer than 0.2 s"
        wait_for(lambda: rig.tier("disk")["blocks"] == 16, "the healthy tier to have all blocks")
        more = chain(16, "more")
        assert len(store(session, more)) == 16
        wait_for(lambda: rig.tier("disk")["blocks"] == 32, "the healthy tier to go on")
        session.evict(keys_of(blocks), tiers=["cpu"])
        assert load(session, blocks) == ["disk"] * 16
        assert session.lookup(keys_of(more)).prefix == 16
    tape = rig.tier("tape")
    assert (tape["stored"], tape["used_bytes"], tape["condition"]) == (0, 0, "stalled")
    began = time.monotonic()
    assert rig.daemon.stop() == 0
    assert time.monotonic() - began < 8, "within the grace of 4 seconds and some"


def test_a_tier_that_answers_again_is_used_again(rig):
    with rig.attach() as session:
        store(session, chain(16))
        wait_for(lambda: stalls(rig)["now"] == 2, "both writers to be stuck")
        ends = [os.open(rig.folder / "fifo", os.O_RDWR)]  # from now on every open goes through
        try:
            wait_for(lambda: stalls(rig)["now"] == 0, "the writers to come back")

            def arrives():
                store(session, chain(4, f"probe {time.monotonic_ns()}"))
                return rig.tier("tape")["stored"] > 16

            wait_for(arrives, "the tier to take blocks again", poll=0.1)
        finally:
            for end in ends:
                os.close(end)
        rig.agree()
    assert rig.daemon.stop() == 0


@pytest.mark.parametrize("verb", ["open", "scan"])
def test_a_mount_that_hangs_at_the_start_delays_neither_engines_nor_the_stop(rig, verb):
    """Engines are served without it, whatever it does; the stop leaves its thread where it is."""
    lines = rig.daemon.log.read_text().splitlines()
    made, ready = (next(line for line in lines if what in line)[:23] for what in ("pool ", "ready: "))
    took = datetime.fromisoformat(ready) - datetime.fromisoformat(made)
    assert took < timedelta(seconds=3), "of which half a second is the tier's"
    with rig.attach() as session:
        blocks = chain(16)
        assert len(store(session, blocks)) == 16
        wait_for(lambda: rig.tier("disk")["blocks"] == 16, "the healthy tier to have all blocks")
        session.evict(keys_of(blocks), tiers=["cpu"])
        assert load(session, blocks) == ["disk"] * 16
    tape = rig.tier("tape")
    assert tape["scanning"]
    if verb == "open":
        assert tape["condition"] == "stalled"
        assert tape["reason"] == "its storage does not answer" or "takes longer than 0.2 s" in tape["reason"]
    began = time.monotonic()
    assert rig.daemon.stop() == 0
    assert time.monotonic() - began < (3 if verb == "open" else 8)


@pytest.mark.parametrize("verb", ["open"])
def test_a_mount_that_answers_late_is_used_from_then_on(rig):
    with rig.attach() as session:
        store(session, chain(16))
        end = os.open(rig.folder / "fifo", os.O_RDWR)
        try:
            wait_for(lambda: rig.tier("tape")["blocks"] == 16, "what waited to be written")
        finally:
            os.close(end)
        assert rig.tier("tape")["condition"] == "ok"
        rig.agree()
    assert rig.daemon.stop() == 0


@pytest.mark.parametrize("verb", ["close"])
def test_a_mount_that_hangs_at_the_end_does_not_hold_the_end(rig):
    with rig.attach() as session:
        store(session, chain(16))
        rig.settle()
    began = time.monotonic()
    assert rig.daemon.stop() == 0
    assert time.monotonic() - began < 4
    assert "did not close" in rig.daemon.log.read_text()

"""A tier that is slow, at a real daemon: a type of our own, whose storage takes its time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.client import Scope, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, fs_tier, keys_of, load, loose, store

Make = Callable[..., DaemonRig]

BACKEND = '''
import pathlib, threading
from kvtierd.edges.backends.memory import MemoryBackend

class Slow(MemoryBackend):
    """Writes as many bytes a second as a file says; reads at full speed."""

    def __init__(self, name, rate):
        super().__init__(name)
        self.rate = pathlib.Path(rate)

    def write(self, transfers):
        rate = float(self.rate.read_text())
        threading.Event().wait(sum(len(transfer.data) for transfer in transfers) / rate)
        return super().write(transfers)

def make(name, options):
    return Slow(name, options["rate"])
'''


@pytest.fixture
def rate(tmp_path: Path, tier_type: Callable[[str, str], None]) -> Path:
    """Install the type ``slow``; return the file that holds its bytes per second."""
    tier_type("slow", BACKEND)
    return tmp_path / "rate"


def timed_stores(session: Session, count: int, prefix: str, scope: Scope | None = None) -> list[float]:
    """Store blocks one by one; return the seconds that each took, sorted."""
    took = []
    for block in loose(count, prefix):
        begin = time.perf_counter()
        assert store(session, [block], scope=scope)
        took.append(time.perf_counter() - begin)
    return sorted(took)


def test_a_slow_tier_costs_its_own_copies_only_and_recovers(make: Make, rate: Path) -> None:
    """L60: at 40 KB/s and 4 KiB a block, what cannot be written in 10 seconds is dropped and counted."""
    rate.write_text("4e4")
    rig = make(slots=2048, paranoid=False)
    slow = {"name": "tape", "type": "slow", "locality": "REMOTE", "options": {"rate": str(rate)}}
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], slow, fs_tier(rig.folder)]))
    rig.start()
    session = rig.attach()
    before = timed_stores(session, 300, "before", Scope(store_to=("disk",)))
    timed_stores(session, 16, "first")
    wait_for(lambda: rig.tier("tape")["stored"] > 0, "the tier to find out how slow it is")
    conditions = []
    for number in range(20):
        during = timed_stores(session, 30, f"during {number} ")
        conditions.append(rig.tier("tape")["condition"])
        assert during[15] < max(0.005, 5 * before[150]), "stores to the pool do not notice"
    tape = rig.tier("tape")
    assert tape["counters"]["cascade_dropped_slow"] > 100
    assert (tape["condition"], tape["reason"]) == ("slow", "writes cannot keep up")
    changes = sum(one != other for one, other in itertools.pairwise(conditions))
    assert changes <= 2, conditions
    wait_for(lambda: rig.tier("tape")["stored"] >= 4, "the first ones")
    wait_for(lambda: rig.tier("disk")["blocks"] == 916, "the healthy tier to have everything")
    some = loose(16, "first")[:4]
    session.evict(keys_of(some), ["cpu", "disk"])
    assert load(session, some) == ["tape"] * 4, "it still serves"
    rate.write_text("1e9")
    wait_for(lambda: not rig.tier("tape")["wanted"], "the backlog to be written", timeout=20)
    new = loose(50, "after")
    assert len(store(session, new)) == 50
    rig.settle()
    session.evict(keys_of(new), ["cpu", "disk"])
    assert load(session, new) == ["tape"] * 50
    assert rig.tier("tape")["condition"] == "ok"

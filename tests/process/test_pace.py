"""How long the daemon keeps anybody waiting while others are busy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.client import Client
from kvtierd.testing.daemon_rig import DaemonRig, keys_of, loose, store

Make = Callable[..., DaemonRig]

BUSY = """
import sys, threading
from kvtierd.client import Client
from kvtierd.testing.daemon_rig import LAYOUT, keys_of, loose, store

client = Client(sys.argv[1], deadline=20.0)
stop = threading.Event()
done = [0] * 17

def storing(number):
    with client.attach(LAYOUT, engine_id=f"store{number}") as session:
        while not stop.is_set():
            done[number] += len(store(session, loose(4, f"s{number}.{done[number]}.")))

def looking():
    keys = keys_of(loose(10_000))
    with client.attach(LAYOUT, engine_id="look") as session:
        while not stop.is_set():
            assert session.lookup(keys).prefix == 10_000
            done[16] += 1

threads = [threading.Thread(target=storing, args=(n,)) for n in range(16)]
threads.append(threading.Thread(target=looking))
for thread in threads: thread.start()
print("busy", flush=True)
sys.stdin.read()
stop.set()
for thread in threads: thread.join(30)
print(sum(done[:16]), done[16], flush=True)
"""


def waited(rig: DaemonRig) -> float:
    """Return the seconds that the daemon's loop and this thread have waited for a core: not their doing."""
    tasks = (f"/proc/{rig.daemon.pid}/task/{rig.daemon.pid}", "/proc/thread-self")
    return sum(int(Path(task, "schedstat").read_text().split()[1]) for task in tasks) / 1e9


def test_a_ping_is_answered_while_ten_thousand_keys_are_looked_up(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """L80: 10,000 blocks on the disk, one client that asks for all of them, 16 that store.

    A ping waits for the turn under way and, as often as not, for one more with the next such lookup in it.
    """
    rig = make(slots=2048, paranoid=False).start()
    session = rig.attach()
    made = loose(10_000)
    for start in range(0, 10_000, 1000):
        assert len(store(session, made[start : start + 1000])) == 1000
        rig.settle()
    session.reset(["cpu"])
    assert session.lookup(keys_of(made)).prefix == 10_000
    command = [sys.executable, "-c", BUSY, rig.daemon.socket]
    lags = []
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as busy,
        Client(rig.folder / "run" / "control.sock", deadline=10.0) as control,
    ):
        assert busy.stdout is not None
        assert busy.stdout.readline() == "busy\n"
        end = time.monotonic() + 2
        while time.monotonic() < end:
            queued, begin = waited(rig), time.perf_counter()
            control.status()
            lag = time.perf_counter() - begin
            lags.append((lag - (waited(rig) - queued)) * 1e3)
            rig.router.poll()
        said, _ = busy.communicate("", timeout=60)
    stores, lookups = map(int, said.split())
    lags.sort()
    at = {f"p{part}": lags[len(lags) * part // 100] for part in (50, 90, 99)}
    with capsys.disabled():
        figures = ", ".join(f"{name} {value:.1f} ms" for name, value in at.items())
        print(f"\n{lookups} lookups of 10,000 keys and {stores} stores; a ping takes {figures}", end="")
    assert stores > 100
    assert lookups > 10
    assert at["p50"] < 50
    assert at["p90"] < 100
    rig.client.close()
    rig.settle()

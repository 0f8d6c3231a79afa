"""Sizes: of the pool, of what the daemon takes besides it, and of what dead clients cost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.client import Client, Unavailable
from kvtierd.edges.hub import LIBZMQ_MIN, require_libzmq
from kvtierd.errors import ConfigError
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, load, loose, store

Make = Callable[..., DaemonRig]


def resident(rig: DaemonRig, kind: str) -> int:
    """Return a part of the daemon's resident bytes: RssAnon, RssShmem."""
    lines = Path(f"/proc/{rig.daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


@pytest.mark.parametrize("backing", ["memfd", "file"])
@pytest.mark.parametrize("bytes_", [(64 << 20) + 4096, (33 << 20)])
def test_a_pool_takes_what_it_was_given_and_no_power_of_two(make: Make, bytes_: int, backing: str) -> None:
    """L100: 1.05 times the asked bytes at most, all of them resident from the start."""
    rig = make(slots=1)
    rig.edit(lambda body: body["pool"].update(bytes=bytes_, backing=backing))
    rig.start()
    taken = resident(rig, "RssShmem") + (resident(rig, "RssFile") if backing == "file" else 0)
    assert resident(rig, "RssShmem") <= 1.05 * bytes_
    assert bytes_ <= taken + 4096
    assert rig.status()["pool"]["bytes"] == bytes_ - bytes_ % 4096


def test_what_it_takes_besides_the_pool_stays_within_its_bounds(make: Make) -> None:
    """L103: churn of many times the pool; status tells the bounds."""
    rig = make(slots=64, paranoid=False)
    rig.edit(lambda body: body["tiers"][1].update(max_bytes=400 * 8192))
    rig.edit(lambda body: body["events"].update(ring_bytes="1MiB"))
    rig.start()
    session = rig.attach()
    for number in range(60):
        store(session, chain(50, f"churn{number}"))
    rig.settle()
    memory = rig.status()["memory"]
    assert memory["anonymous_bytes"] == pytest.approx(resident(rig, "RssAnon"), rel=0.2)
    assert memory["anonymous_bytes"] < memory["bounds"]["process"] + memory["bounds"]["rings"]
    assert 100 <= memory["index_entries"] <= 500
    assert memory["bounds"]["connections"] == 2 * (64 + 16) << 20


MANY = """
import sys
from kvtierd.client import Client
from kvtierd.testing.daemon_rig import LAYOUT, keys_of, loose
client = Client(sys.argv[1], deadline=20.0)
sessions = [client.attach(LAYOUT, engine_id=f"dead{n}") for n in range(200)]
held = [session.load(keys_of(loose(4)), deadline=1.0) for session in sessions]
jobs = [session.prepare_store(keys_of(loose(1, f"half{n}."))) for n, session in enumerate(sessions[:20])]
assert all(one.keys for one in held)
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_hundred_dead_clients_are_cleared_away_without_a_pause(make: Make) -> None:
    """L101, L102: leases, jobs and slots; others are answered meanwhile."""
    rig = make(slots=64, paranoid=False).start()
    session = rig.attach()
    store(session, loose(4))
    rig.settle()
    with subprocess.Popen(
        [sys.executable, "-c", MANY, rig.daemon.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as many:
        assert many.stdout is not None
        assert many.stdout.readline() == "ready\n"
        status = rig.status()
        assert (len(status["sessions"]), status["leases"], status["jobs"]) == (201, 200, 20)
        many.kill()
        worst, end = 0.0, time.monotonic() + 10
        while (status := rig.status())["quarantined_slots"] or len(status["sessions"]) > 1:
            begin = time.perf_counter()
            assert load(session, loose(4)) == ["cpu"] * 4
            worst = max(worst, time.perf_counter() - begin)
            assert time.monotonic() < end
    assert (status["leases"], status["jobs"]) == (0, 0)
    assert worst < 0.2
    rig.router.poll()


CRAMPED = """
import resource, sys, time
from kvtierd.client import Client
from kvtierd.testing.daemon_rig import LAYOUT
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20),) * 2)
begin = time.monotonic()
try:
    session = Client(sys.argv[1], deadline=5.0).attach(LAYOUT, engine_id="cramped")
    said = f"connected {session.connected}"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(f"{time.monotonic() - begin:.3f}", said)
"""


def test_an_engine_that_cannot_map_the_pool_hears_so_at_once(make: Make) -> None:
    """L115: a reason within a second, and nothing of it stays in the daemon."""
    rig = make(slots=1)
    rig.edit(lambda body: body["pool"].update(bytes="64MiB"))
    rig.start()
    done = subprocess.run(
        [sys.executable, "-c", CRAMPED, rig.daemon.socket],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    seconds, _, said = done.stdout.strip().partition(" ")
    assert float(seconds) < 1.0
    assert "Cannot allocate memory" in said, said
    wait_for(lambda: not rig.status()["sessions"], "its session to be gone")


def test_a_client_of_another_machine_hears_that_nobody_is_there(make: Make) -> None:
    """L115: the socket's folder is not shared with it."""
    rig = make()
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=r"engine\.sock"):
        Client(rig.daemon.socket).status()
    assert time.monotonic() - begin < 1.0


def test_a_libzmq_with_known_holes_is_refused() -> None:
    """L130."""
    require_libzmq(LIBZMQ_MIN)
    with pytest.raises(ConfigError, match=r"libzmq 4\.3\.0.*install 4\.3\.3"):
        require_libzmq((4, 3, 0))

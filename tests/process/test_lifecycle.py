"""Start, readiness, refusal to start, stop, crash and restart."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtierd.client import Client, KeyState, Unavailable
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import BLOCK, LAYOUT, DaemonRig, chain, keys_of, load, loose, store

Make = Callable[..., DaemonRig]


def refused(rig: DaemonRig) -> tuple[int, str]:
    """Serve a tier file that cannot be served; return the exit code and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd", "serve", "--config", str(rig.daemon.config)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@contextmanager
def served(rig: DaemonRig, umask: int = 0o022) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon whose start is watched from the first moment."""
    with (
        rig.daemon.log.open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-m", "kvtierd", "serve", "--config", str(rig.daemon.config)],
            stderr=log,
            umask=umask,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


# -- start -------------------------------------------------------------------------------------------


def test_status_answers_while_the_pool_is_made_and_engines_wait_until_it_is(make: Make) -> None:
    """L106, L110, L111: control.sock (0600) tells the state, engine.sock (0660) is there when it answers."""
    rig = make(slots=1)
    rig.edit(lambda body: body["pool"].update(bytes="512MiB", prefault_threads=1))
    rig.edit(lambda body: body.update(runtime_dir=str(rig.folder / "new" / "run")))
    folder = rig.folder / "new" / "run"
    control, engine = folder / "control.sock", folder / "engine.sock"
    seen: set[str] = set()
    filled: list[int] = []
    modes: set[tuple[str, int]] = set()

    def look() -> None:
        modes.update((path.name, stat.S_IMODE(path.stat().st_mode)) for path in folder.glob("*.sock"))

    def ready() -> bool:
        look()
        before = engine.exists()
        try:
            status = Client(control).status()
        except Unavailable:
            return False
        assert engine.exists() or status["state"] == "starting"
        assert not before or status["pool"]["prefaulted_bytes"] == 512 << 20
        seen.add(status["state"])
        filled.append(status["pool"]["prefaulted_bytes"])
        return engine.exists()

    with served(rig, umask=0) as process:
        wait_for(ready, "engine.sock", timeout=30, poll=0.002)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(engine))
        assert process.poll() is None
        look()
    assert "starting" in seen
    assert filled == sorted(filled)
    assert len(set(filled)) > 2
    assert modes == {("engine.sock", 0o660), ("control.sock", 0o600), ("takeover.sock", 0o600)}
    assert process.returncode == 0
    assert not engine.exists()
    assert not control.exists()


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_pool_that_does_not_fit_is_refused_in_numbers(make: Make, backing: str) -> None:
    """L99: exit code 73 with needed, available and the setting; nothing is left behind."""
    rig = make()
    rig.edit(lambda body: body["pool"].update(bytes="64TiB", backing=backing))
    before = set(Path("/dev/shm").iterdir())
    code, said = refused(rig)
    assert code == 73
    assert "pool.bytes" in said
    assert str(64 << 40) in said
    assert "needed" in said
    assert "available" in said
    assert list((rig.folder / "run").iterdir()) == []
    assert list((rig.folder / "disk").iterdir()) == []
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_second_daemon_on_one_folder_is_refused(rig: DaemonRig, make: Make) -> None:
    """The first one keeps its socket, its stream and its blocks."""
    made = chain(3)
    session = rig.attach()
    store(session, made)
    second = make()
    second.edit(lambda body: body.update(runtime_dir=str(rig.folder / "run")))
    code, said = refused(second)
    assert code == 73
    assert "another daemon has it" in said
    assert str(rig.daemon.pid) in said
    assert load(session, made) == ["cpu"] * 3
    assert load(rig.attach(), made) == ["cpu"] * 3


def test_a_stale_socket_does_not_stop_a_start(make: Make) -> None:
    """L98: what a killed daemon leaves is replaced."""
    rig = make()
    for name in ("engine.sock", "control.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(rig.folder / "run" / name))
    rig.start()
    assert rig.attach().connected


def test_an_impossible_locality_is_refused_at_start(make: Make) -> None:
    """L35, L88: spelling counts, and the message names the key."""
    rigs = []
    for wrong in ("local", "Local", "GLOBAL", ""):
        rig = make()
        rig.edit(lambda body, wrong=wrong: body["tiers"][1].update(locality=wrong))  # type: ignore[misc]
        rigs.append(rig)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(refused, rigs))
    for code, said in answers:
        assert code == 78
        assert "locality" in said
        assert "LOCAL or REMOTE" in said


def test_a_tier_that_cannot_be_as_it_is_written_is_refused(make: Make) -> None:
    """L93, L95: a disk without a limit, a policy that is none; ``unlimited`` is said aloud."""

    def change(body: dict[str, Any], **changes: object) -> None:
        body["tiers"][1].update(changes)
        if changes.get("max_bytes", "") is None:
            del body["tiers"][1]["max_bytes"]

    rigs = [make(), make(), make()]
    rigs[0].edit(lambda body: change(body, max_bytes=None))
    rigs[1].edit(lambda body: change(body, policy="fifo"))
    rigs[2].edit(lambda body: change(body, policy="LRU"))
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(refused, rigs))
    for (code, said), key in zip(answers, ("max_bytes", "policy", "policy"), strict=True):
        assert code == 78
        assert f"tiers[1].{key}" in said or key in said
    open_ended = make()
    open_ended.edit(lambda body: change(body, max_bytes="unlimited"))
    open_ended.start()
    assert "max_bytes is unlimited: only the filesystem's size bounds it" in open_ended.daemon.log.read_text()


def test_the_daemon_is_light(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon's process never imports torch, and beside its pool it stays small."""
    rig = make(slots=16384, paranoid=False).start()  # a pool of 64 MiB
    session = rig.attach()
    store(session, loose(200))
    rig.settle()
    resident, _ = rig.resources()
    with capsys.disabled():
        print(f"\nresident beside the pool: {(resident - (64 << 20)) / 2**20:.1f} MiB", end="")
    assert resident - (64 << 20) < 150 << 20
    maps = Path(f"/proc/{rig.daemon.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    check = "import sys, kvtierd.daemon, kvtierd.cli.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=30).returncode == 0


# -- clients before and after --------------------------------------------------------------------------


def test_a_client_may_start_before_the_daemon(make: Make) -> None:
    """L111: until then everything is a miss at once; then it connects by itself."""
    rig = make()
    session = rig.attach()
    made = chain(4)
    start = time.monotonic()
    assert not session.connected
    assert session.lookup(keys_of(made)).states == (KeyState.MISS,) * 4
    assert store(session, made) == ()
    assert load(session, made) == []
    assert session.inventory() == []
    assert session.put(made[0].key, b"x" * BLOCK) is False
    assert time.monotonic() - start < 1.0
    rig.start()
    wait_for(lambda: store(session, made) == tuple(keys_of(made)), "the client to come back")
    assert load(session, made) == ["cpu"] * 4


def test_a_daemon_killed_under_its_clients_is_a_cache_that_misses(rig: DaemonRig) -> None:
    """L112: verbs answer at once while it is away; the same session comes back with a new pool."""
    session = rig.attach()
    made = chain(4)
    store(session, made)
    rig.settle()
    pool_id = session.pool_id
    job = session.prepare_store([key.key for key in loose(1, "open")])
    held = session.load(keys_of(made))
    rig.daemon.kill()
    start = time.monotonic()
    for _ in range(20):
        assert session.lookup(keys_of(made)).states == (KeyState.MISS,) * 4
        assert load(session, made) == []
        assert session.evict(keys_of(made)) == 0
    assert store(session, made) == ()
    assert time.monotonic() - start < 1.0
    assert bytes(held.views()[0]), "the old mapping stays readable"
    rig.restart(crash=True)
    assert job.commit() == (), "a job of the old pool is not stored"
    held.release()
    wait_for(lambda: session.lookup(keys_of(made)).prefix == 4, "the client to come back")
    assert session.connected
    assert session.pool_id != pool_id
    assert load(session, made) == ["disk"] * 4


# -- stop and restart --------------------------------------------------------------------------------


def test_a_stop_drains_writes_and_events(rig: DaemonRig) -> None:
    """L28, L29, L71: SIGTERM writes what is wanted below, tells of the pool's end, ends with 0 in time."""
    session = rig.attach()
    made = chain(40)
    store(session, made)
    start = time.monotonic()
    assert rig.daemon.stop() == 0
    assert time.monotonic() - start < 4.0
    rig.router.wait_for(lambda r: len(r.resident) == 40, 5, "the removals from the pool")
    assert {entry.medium for entry in rig.router.resident} == {"STORAGE"}
    removed = [e.block_hashes[0] for e in rig.router.events if type(e).__name__ == "BlockRemoved"]
    assert removed == [block.meta.hashes[0] for block in reversed(made)], "leaf first"
    rig.start()
    wait_for(lambda: session.lookup(keys_of(made)).prefix == 40, "the client to come back")
    assert session.lookup(keys_of(made)).states == (KeyState.COLD,) * 40
    for some in (made[:20], made[20:]):
        assert load(session, some) == ["disk"] * 20


def test_a_stop_ends_with_a_client_and_a_dead_subscriber_around(rig: DaemonRig) -> None:
    """L29: neither an attached session with a job, nor a subscriber that reads no more, holds it up."""
    session = rig.attach()
    job = session.prepare_store(keys_of(loose(3)))
    assert len(job.keys) == 3
    with socket.create_connection(("127.0.0.1", int(rig.daemon.endpoint.rpartition(":")[2]))):
        start = time.monotonic()
        assert rig.daemon.stop() == 0
    assert time.monotonic() - start < 4.0
    assert session.lookup(keys_of(loose(3))).prefix == 0


def test_nothing_follows_the_end_of_the_stream(rig: DaemonRig) -> None:
    """L30: the removals at the stop are the last that a subscriber hears."""
    session = rig.attach()
    store(session, chain(5))
    rig.settle()
    assert rig.daemon.stop() == 0
    while rig.router.poll(0.3):
        pass
    last = [event for event in rig.router.events if event.medium == "CPU"]
    assert [type(event).__name__ for event in last[-5:]] == ["BlockRemoved"] * 5
    assert len(rig.router.resident) == 5


def test_two_signals_in_a_row_are_one_clean_end(make: Make) -> None:
    """An operator who asks twice gets out with 0 and no traceback."""
    rig = make()
    rig.edit(lambda body: body["engine"].update(shutdown_grace="30s"))
    with served(rig) as process:
        wait_for(lambda: Path(rig.daemon.socket).exists(), "engine.sock")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_batch_numbers_go_on_after_a_stop_and_never_back_after_a_crash(rig: DaemonRig) -> None:
    """EVENTS: a router drops what comes with an old number."""
    session = rig.attach()
    store(session, loose(5))
    rig.settle()

    def number() -> int:
        """The last batch's; there is none before the first heartbeat."""
        found = wait_for(lambda: rig.status()["events"]["sequence"], "a batch")
        assert found is not None
        return int(found)

    numbers = [number()]
    for crash in (False, True):
        if crash:
            rig.restart(crash=True)
        else:
            rig.restart()
            assert rig.router.counts["gaps"] == 0
            assert rig.router.counts["repeats"] == 0
        numbers.append(number())
    assert numbers == sorted(set(numbers))


def test_a_stop_during_the_start_is_obeyed(make: Make) -> None:
    """SIGTERM while the pool is made: out at once, nothing left."""
    rig = make(slots=1)
    rig.edit(lambda body: body["pool"].update(bytes="512MiB", prefault_threads=1))
    with served(rig) as process:
        wait_for(lambda: (rig.folder / "run" / "control.sock").exists(), "control.sock", poll=0.001)
        process.terminate()
        assert process.wait(10) == 0
    assert not os.listdir(rig.folder / "run")


def test_another_layout_has_another_namespace_after_a_restart_too(rig: DaemonRig) -> None:
    """L74, L127: equal hashes of two tenants or two hash seeds never meet, in the pool or on the disk."""
    others = [
        msgspec.structs.replace(LAYOUT, tenant="b"),
        msgspec.structs.replace(LAYOUT, hash_algorithm="sha256", hash_seed="1"),
    ]
    made = chain(3)
    store(rig.attach(), made)
    rig.settle()
    for _ in range(2):
        for number, layout in enumerate(others):
            other = rig.attach(layout, engine_id=f"other{number}")
            assert other.lookup(keys_of(made)).states == (KeyState.MISS,) * 3
            assert load(other, made) == []
        rig.restart()
    assert load(rig.attach(), made) == ["disk"] * 3

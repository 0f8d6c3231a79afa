"""Another process takes over from the running daemon: engines notice nothing but one slower call."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Session
from kvtierd.edges.handover import Peer
from kvtierd.errors import Unavailable
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.engine_process import EngineProcess
from kvtierd.testing.workload import payload
from kvtierd.wire import handover

Make = Callable[..., DaemonRig]
Engines = Callable[..., EngineProcess]


class Caller(threading.Thread):
    """An engine that never stops asking, and notes how long each call took and what it got."""

    def __init__(self, session: Session, block: Any) -> None:
        super().__init__(daemon=True)
        self._session, self._block = session, block
        self._end = threading.Event()
        self.seconds: list[float] = []
        self.missed = 0

    def run(self) -> None:
        while not self._end.is_set():
            began = time.perf_counter()
            data = self._session.get(self._block.key)
            self.seconds.append(time.perf_counter() - began)
            self.missed += data != payload(self._block.key, 4096)

    def end(self) -> None:
        self._end.set()
        self.join(10)


@pytest.fixture(params=["memfd", "file"])
def running(make: Make, request: pytest.FixtureRequest) -> DaemonRig:
    rig = make(slots=64)
    rig.edit(lambda body: body["pool"].update(backing=request.param))
    return rig.start()


def taken_over(rig: DaemonRig) -> None:
    assert rig.daemon.take_over() == 0
    wait_for(lambda: rig.status()["state"] == "ready", "the new daemon")

    def told() -> bool:
        rig.router.poll(0.005)
        return not rig.status()["events"]["journal"]["holding"]

    wait_for(told, "the difference to be told")


def test_engines_go_on_over_the_same_connection_and_miss_nothing(running: DaemonRig) -> None:
    session = running.attach()
    blocks = chain(10)
    store(session, blocks)
    running.settle()
    pid, epoch = running.status()["pid"], session.epoch
    caller = Caller(running.attach(engine_id="caller"), blocks[0])
    caller.start()
    taken_over(running)
    caller.end()
    assert running.status()["pid"] != pid
    assert caller.missed == 0
    assert max(caller.seconds) < 1.0, "one slower call"
    assert load(session, blocks) == ["cpu"] * 10
    assert session.epoch == epoch, "it never had to connect again"
    store(session, loose(5))
    running.agree()


def test_a_store_and_a_load_go_on_in_the_middle(running: DaemonRig) -> None:
    session = running.attach()
    store(session, chain(3))
    job = session.prepare_store(keys_of(loose(4)), meta=[block.meta for block in loose(4)])
    got = session.load(keys_of(chain(3)))
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, len(view))
    taken_over(running)
    assert [bytes(view) for view in got.views()] == [payload(key, 4096) for key in got.keys]
    got.release()
    assert len(job.commit()) == 4
    assert load(session, loose(1)) == ["cpu"]
    assert running.status()["quarantined_slots"] == 0
    running.agree()


def test_one_takeover_after_another(running: DaemonRig) -> None:
    session = running.attach()
    for turn in range(3):
        store(session, chain(4, f"t{turn}"))
        taken_over(running)
        for before in range(turn + 1):
            assert load(session, chain(4, f"t{before}")) == ["cpu"] * 4
    running.agree()


def test_the_tiers_below_go_on(running: DaemonRig) -> None:
    session = running.attach()
    store(session, chain(10))
    running.settle()
    taken_over(running)
    running.settle()
    session.evict(keys_of(chain(10)), tiers=["cpu"])
    assert load(session, chain(10)) == ["disk"] * 10
    running.agree()


def test_slots_of_a_lost_connection_stay_quarantined(running: DaemonRig, engine: Engines) -> None:
    child = engine(running)
    child("reserve", 4, "half")
    child("drop")
    wait_for(lambda: running.status()["quarantined_slots"] == 4, "the quarantine")
    taken_over(running)
    assert running.status()["quarantined_slots"] == 4
    child.kill()
    wait_for(lambda: running.status()["quarantined_slots"] == 0, "its death")


def test_a_killed_successor_starts_from_what_was_handed_over(make: Make) -> None:
    rig = make(slots=64)
    rig.edit(lambda body: body["pool"].update(backing="file"))
    rig.start()
    session = rig.attach()
    store(session, chain(6))
    taken_over(rig)
    store(session, chain(6, "later"))
    rig.daemon.kill()
    rig.daemon.start()
    wait_for(lambda: not session.lookup([]).reason, "the session")
    assert load(session, chain(6)) + load(session, chain(6, "later")) == ["cpu"] * 12
    wait_for(lambda: not rig.status()["events"]["journal"]["holding"], "the difference to be told")
    rig.catch_up(rig.router, rig.settle())
    rig.router.counts.pop("unknown_removals", None)  # after a kill the last moment is taken back twice


def test_the_service_manager_follows_to_the_new_process(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit of Type=notify goes on: with its main process, its watchdog and the pool that it keeps."""
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))

        def listen() -> None:
            while (data := manager.recv(4096)) != b"end":  # its queue is short, and a manager reads at once
                heard.extend(data.decode().splitlines())

        def said(what: str) -> bool:
            return what in heard

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        rig = make(slots=16).start()
        wait_for(lambda: said("READY=1") and said("WATCHDOG=1"), "the old daemon to be ready")
        store(rig.attach(), chain(3))
        monkeypatch.delenv("NOTIFY_SOCKET")
        monkeypatch.delenv("WATCHDOG_USEC")
        taken_over(rig)
        pid = rig.status()["pid"]
        wait_for(lambda: said(f"MAINPID={pid}"), "the new main process")
        assert not said("STOPPING=1")
        heard.clear()
        wait_for(lambda: said("WATCHDOG=1"), "the watchdog to be fed by the new daemon")
        assert "slot_table" in rig.status()["pool"], "the manager keeps the pool: it goes on being recorded"
        assert rig.daemon.stop() == 0
        assert said("STOPPING=1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"end", str(tmp_path / "notify"))
        listener.join(10)


# -- when it does not happen ----------------------------------------------------------------------------


def requester(rig: DaemonRig) -> Peer:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(rig.folder / "run" / "takeover.sock"))
    return Peer(sock)


def ask(rig: DaemonRig, **changes: Any) -> tuple[Peer, handover.Message]:
    peer = requester(rig)
    fields = {
        "format": handover.FORMAT,
        "daemon": "kvtierd test",
        "pool_bytes": 64 * 4096,
        "backing": rig.backing,
        "pool_path": "",
    }
    peer.send(handover.Ask(**{**fields, **changes}))
    return peer, peer.receive()


def offered(rig: DaemonRig) -> Peer:
    """Return a peer that was given the pool and all that is in it."""
    peer, answer = ask(rig)
    assert isinstance(answer, handover.Offer)
    while isinstance(part := peer.receive(), handover.Part) and part.table:
        pass
    assert len(peer.descriptors) == 1
    return peer


def test_a_downgrade_and_another_pool_are_refused_with_a_reason(running: DaemonRig) -> None:
    running.backing = running.status()["pool"]["backing"]["state"]  # type: ignore[attr-defined]
    session = running.attach()
    for changes, reason in (({"format": 0}, "downgrade"), ({"pool_bytes": 1 << 20}, "another one")):
        peer, answer = ask(running, **changes)
        peer.close()
        assert isinstance(answer, handover.Refusal)
        assert reason in answer.reason
    store(session, chain(3))
    running.edit(lambda body: body["pool"].update(bytes="1MiB"))
    with pytest.raises(Unavailable, match="refused: the pool is another one"):
        running.daemon.take_over()
    assert load(session, chain(3)) == ["cpu"] * 3
    assert session.epoch == 1


@pytest.mark.parametrize("moment", ["asked", "offered", "nonsense", "given", "taken"])
def test_if_the_new_daemon_fails_the_old_one_goes_on(running: DaemonRig, moment: str) -> None:
    """Whatever was closed for the other one is opened again; engines have one slower call."""
    running.backing = running.status()["pool"]["backing"]["state"]  # type: ignore[attr-defined]
    session = running.attach()
    blocks = chain(8)
    store(session, blocks)
    running.settle()
    job = session.prepare_store(keys_of(loose(2)), meta=[block.meta for block in loose(2)])
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, len(view))
    if moment == "asked":
        requester(running).close()
    else:
        peer = offered(running)
        if moment == "nonsense":
            peer.send(handover.Taken())
        elif moment != "offered":
            peer.send(handover.Ready())
            assert isinstance(peer.receive(), handover.Handed)
        if moment == "taken":
            peer.send(handover.Refusal("nonsense"))
        peer.close()
    wait_for(lambda: running.status()["state"] == "ready", "the old daemon")
    assert load(session, blocks) == ["cpu"] * 8
    assert len(job.commit()) == 2
    assert session.epoch == 1
    running.settle()
    taken_over(running)
    assert load(session, blocks) == ["cpu"] * 8
    running.agree()


def test_without_a_running_daemon_there_is_nothing_to_take_over(make: Make) -> None:
    rig = make()
    process = rig.daemon.launch("--takeover")
    assert process.wait(20) == 73
    assert "is a daemon running there?" in rig.daemon.log_tail()
    rig.daemon.stop()


def test_a_stop_of_the_new_daemon_is_clean(running: DaemonRig) -> None:
    store(running.attach(), chain(3))
    taken_over(running)
    pid = running.status()["pid"]
    os.kill(pid, signal.SIGTERM)
    assert running.daemon.stop() == 0
    left = set(os.listdir(running.folder / "run"))
    assert not left, left

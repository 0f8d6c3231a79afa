"""A changed tier file in a daemon that runs: all of it is taken over, or nothing and every reason is told."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.cli.main import main
from kvtierd.errors import ExitCode
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import FILE, DaemonRig, Router, fs_tier, loose, store

Make = Callable[..., DaemonRig]
Capture = pytest.CaptureFixture[str]


def disk(rig: DaemonRig, **options: Any) -> Callable[[dict[str, Any]], object]:
    """Return the edit that gives the rig's FS tier these options."""
    return lambda body: body["tiers"][1].update(options)


def reload(rig: DaemonRig, capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    socket = rig.daemon.socket.replace("engine.sock", "control.sock")
    capsys.readouterr()
    code = main(["reload", "--json", "--socket", socket, *arguments])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


def started(make: Make, **tier: Any) -> DaemonRig:
    rig = make(slots=64)
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], fs_tier(rig.folder, **tier)]))
    return rig.start()


def test_a_lowered_limit_is_in_force_and_readers_hear_of_what_had_to_leave(
    make: Make, capsys: Capture
) -> None:
    rig = started(make)
    session = rig.attach()
    store(session, loose(40))
    rig.settle()
    rig.edit(disk(rig, max_bytes=400 * FILE))
    code, answer = reload(rig, capsys, "--dry-run")
    assert (code, answer["outcome"]) == (0, "applied")
    assert [c["key"] for c in answer["changes"]] == ["tiers.disk.max_bytes"]
    assert rig.tier("disk")["capacity_bytes"] is None, "a dry run changes nothing"
    rig.edit(disk(rig, max_bytes=20 * FILE, ttl="1h", deadline="20s"))
    rig.edit(lambda body: body["engine"].update(job_ttl="30s", max_requests=5))
    rig.edit(lambda body: body.setdefault("log", {}).update(level="debug"))
    code, answer = reload(rig, capsys)
    assert (code, answer["outcome"]) == (0, "applied")
    wait_for(lambda: rig.tier("disk")["used_bytes"] <= 20 * FILE, "the tier to shrink")
    rig.agree()
    status = rig.status()
    assert status["log"]["level"] == "debug"
    assert status["config"]["reloads"] == {"applied": 1, "refused": 0, "unchanged": 0}
    assert reload(rig, capsys)[1]["outcome"] == "unchanged"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["tiers"][1].update(readers=7), "tiers.disk.readers: needs a restart: "),
        (lambda body: body.update(runtime_dir="/elsewhere"), "runtime_dir: needs a restart: "),
        (lambda body: body["tiers"][1].update(max_byte=5), "did you mean 'max_bytes'?"),
    ],
)
def test_what_cannot_be_taken_over_leaves_everything_as_it_was(
    make: Make, capsys: Capture, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    rig = started(make)
    rig.edit(change)
    rig.edit(disk(rig, max_bytes=20 * FILE))
    code, answer = reload(rig, capsys)
    assert (code, answer["outcome"]) == (ExitCode.CONFIG, "refused")
    assert words in answer["problem"]
    assert rig.tier("disk")["capacity_bytes"] is None
    assert rig.status()["config"]["reloads"]["refused"] == 1
    wait_for(lambda: words in rig.daemon.log.read_text(), "the line in the log")


def test_a_hangup_signal_reloads(make: Make) -> None:
    rig = started(make)
    rig.edit(disk(rig, max_bytes=400 * FILE))
    assert rig.daemon.pid is not None
    os.kill(rig.daemon.pid, signal.SIGHUP)
    wait_for(lambda: rig.tier("disk")["capacity_bytes"], "the limit")
    assert rig.status()["config"]["reloads"]["applied"] == 1


def test_a_watched_file_is_reloaded_when_it_is_swapped_as_a_config_map_is(make: Make) -> None:
    """Kubernetes turns a link to a folder around: the file's own path and link never change."""
    rig = started(make)
    real = rig.daemon.config
    body = json.loads(real.read_text())
    data = rig.folder / "config"
    for name, limit in (("one", "unlimited"), ("two", 400 * FILE)):
        body["watch_file"] = "20ms"
        body["tiers"][1]["max_bytes"] = limit
        (data / name).mkdir(parents=True)
        (data / name / "file.json").write_text(json.dumps(body))
    (data / "..data").symlink_to("one")
    real.unlink()
    real.symlink_to(data / "..data" / "file.json")
    assert rig.daemon.stop() == 0
    rig.start()
    assert rig.tier("disk")["capacity_bytes"] is None
    swap(data / "..data", "two")
    wait_for(lambda: rig.tier("disk")["capacity_bytes"], "the limit of the other file")
    assert rig.status()["config"]["reloads"] == {"applied": 1, "refused": 0, "unchanged": 0}


def swap(link: Path, target: str) -> None:
    """Turn a link around at one instant."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


def test_the_service_manager_hears_of_start_reload_and_stop(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(slots=64)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(20)
        manager.bind(str(rig.folder / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(rig.folder / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")

        def until(word: str) -> list[str]:
            heard: list[str] = []
            while word not in heard:
                heard += manager.recv(4096).decode().splitlines()
            return heard

        rig.start()
        until("READY=1")
        until("WATCHDOG=1")
        assert rig.daemon.pid is not None
        os.kill(rig.daemon.pid, signal.SIGHUP)
        assert any(line.startswith("MONOTONIC_USEC=") for line in until("RELOADING=1"))
        assert "STATUS=reload unchanged" in until("READY=1")
        assert rig.daemon.stop() == 0
        until("STOPPING=1")


def test_an_audience_that_is_added_has_the_inventory_and_the_others_go_on(
    make: Make, capsys: Capture
) -> None:
    rig = started(make)
    session = rig.attach()
    store(session, loose(10))
    rig.settle()
    sequence = rig.status()["events"]["sequence"]
    added = {"name": "late", "bind": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0"}
    rig.edit(lambda body: body["events"]["audiences"].append(added))
    code, answer = reload(rig, capsys)
    assert (code, answer["outcome"]) == (0, "applied")
    late = rig.status()["events"]["audiences"]["late"]
    router = Router()
    router.connect(late["bind"], late["replay"])
    router.wait_for(lambda r: len(r.resident) == 20, what="the inventory")
    store(session, loose(3, "more"))
    rig.settle()
    router.wait_for(lambda r: r.resident == rig.router.resident, what="what the first audience has")
    router.close()
    assert rig.status()["events"]["sequence"] >= sequence
    rig.edit(lambda body: body["events"]["audiences"].pop())
    assert reload(rig, capsys)[0] == 0
    assert "late" not in rig.status()["events"]["audiences"]

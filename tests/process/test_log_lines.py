"""The daemon's log as machines read it: lines that ids join, a level that changes, and nothing secret."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.client import BlockMeta, Client, RequestRefused
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, keys_of, load, loose, store

Make = Callable[..., DaemonRig]
TOKEN = 987_654_321


def lines(rig: DaemonRig, name: str) -> list[dict[str, Any]]:
    """Return the log's lines of one event; every line must be JSON."""
    every = map(json.loads, rig.daemon.log.read_text().splitlines())
    return [line for line in every if line["event"] == name]


def test_ids_lead_from_a_request_to_the_work_of_tiers_and_nothing_tells_what_is_in_a_block(
    make: Make,
) -> None:
    rig = make(changes={"log": {"level": "debug", "format": "json"}}).start()
    session = rig.attach()
    (block,) = loose(1)
    job = session.prepare_store([block.key], meta=[BlockMeta(hashes=(5,), token_ids=(TOKEN,), block_size=1)])
    for view in job.views():
        view[:] = b"\x07" * len(view)
    job.commit()
    rig.settle()
    session.evict([block.key], ["cpu"])
    session.load([block.key], deadline=5.0).release()
    with pytest.raises(RequestRefused) as refused:
        session.evict([block.key], ["tape"])

    def told() -> bool:
        return len(lines(rig, "operation_ended")) >= 2 and bool(refusals())

    def refusals() -> list[dict[str, Any]]:
        return [line for line in lines(rig, "request_answered") if line.get("code") == "unknown_tier"]

    wait_for(told, "the lines")
    prepared = next(line for line in lines(rig, "request_answered") if line["answer"] == "Prepared")
    assert prepared["engine"] == "e0"
    assert prepared["job"] > 0
    write, read = lines(rig, "operation_started")
    assert (write["kind"], read["kind"]) == ("write", "read")
    assert write["generations"] == [prepared["generation"]]
    ends = {line["op"]: line for line in lines(rig, "operation_ended")}
    assert ends[write["op"]]["ok"] == ends[read["op"]]["ok"] == 1
    assert ends[read["op"]]["generations"] == read["generations"]
    (refusal,) = refusals()
    assert f"(session {refusal['session']}, request {refusal['request']})" in str(refused.value)
    assert refusal["session"] == prepared["session"]
    text = rig.daemon.log.read_text()
    assert str(TOKEN) not in text
    assert block.key.hex() not in text
    rig.layouts.add(rig.layout)
    assert rig.daemon.stop() == 0
    names = [json.loads(line)["event"] for line in rig.daemon.log.read_text().splitlines()]
    assert names[0] == "started"
    assert names[-1] == "stopped"
    rig.start()


def test_the_level_changes_at_run_time_by_the_control_socket_alone(make: Make) -> None:
    rig = make(changes={"log": {"format": "json"}}).start()
    control = str(rig.folder / "run" / "control.sock")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvtierd", "log-level", *arguments, "--socket", control],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    asked = command()
    assert (asked.returncode, asked.stdout) == (0, "info\n")
    session = rig.attach()
    store(session, chain(2))
    assert not lines(rig, "request_answered")
    changed = command("debug", "--json")
    assert json.loads(changed.stdout) == {"level": "debug"}
    assert load(session, chain(2)) == ["cpu", "cpu"]
    wait_for(
        lambda: any(line["answer"] == "Loaded" for line in lines(rig, "request_answered")), "a debug line"
    )
    assert command("loud").returncode == 64
    with pytest.raises(RequestRefused, match=r"control\.sock"):
        Client(rig.daemon.socket).log_level("info")
    assert Client(control).log_level("warning") == "warning"
    quiet = len(rig.daemon.log.read_text().splitlines())
    session.lookup(keys_of(chain(2)))
    assert Client(control).log_level() == "warning"
    assert len(rig.daemon.log.read_text().splitlines()) <= quiet + 1, "only the change itself may still come"

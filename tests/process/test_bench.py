"""``kvtierd bench rpc`` measures a daemon of its own or a running one, and says when there is none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtierd.client import Client
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

pytestmark = pytest.mark.timeout(60)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtierd", "bench", "rpc", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_it_measures_hits_on_a_daemon_of_its_own() -> None:
    done = bench("--json", "--seconds", "0.3", "--keys", "16")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["hits"]
    assert result["keys"] == 16
    for trip in (result["lookup"], result["echo"]):
        assert 0 < trip["p50_us"] <= trip["p99_us"]
        assert trip["count"] > 10
    assert result["pipelined_per_s"] > 0


def test_on_a_running_daemon_it_stores_nothing() -> None:
    with (
        short_folder("bench") as folder,
        LocalDaemon(folder, pool_bytes=4 << 20, disk_bytes=8 << 20) as daemon,
    ):
        done = bench("--socket", daemon.socket, "--seconds", "0.3")
        assert done.returncode == 0, done.stderr
        assert "lookup of 16 missing keys" in done.stdout
        with Client(daemon.socket) as client:
            assert [tier["blocks"] for tier in client.status()["tiers"]] == [0, 0]


def test_without_a_daemon_it_says_so() -> None:
    with short_folder("bench") as folder:
        done = bench("--socket", str(folder / "engine.sock"))
    assert done.returncode == 69
    assert "no daemon answers" in done.stderr

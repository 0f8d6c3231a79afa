"""The benches that need no storage run, compare with an earlier run and draw; no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from kvtierd.client import Client
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

pytestmark = pytest.mark.timeout(90)

RUNS = {
    "rpc": ("--keys", "1", "--keys", "16", "--seconds", "0.6"),
    "pool": ("--block-bytes", "64KiB", "--seconds", "0.4"),
    "scale": ("--blocks", "1024", "--blocks", "2048"),
    "clients": ("--engines", "1", "--engines", "3", "--seconds", "0.3"),
    "busy": ("--block-bytes", "4KiB", "--rate", "50", "--seconds", "0.8"),
    "footprint": ("--seconds", "0.2", "--starts", "1"),
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtierd", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_bench_prints_figures_that_a_later_run_compares_itself_with(name, tmp_path) -> None:
    first = bench(name, *RUNS[name], "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["bench"] == name
    for figure in result["figures"]:  # a small index is not collected at all
        assert figure["value"] > 0 or "collection" in figure["name"], figure
    old, plot = tmp_path / "old.json", tmp_path / "out.svg"
    old.write_text(first.stdout)
    second = bench(name, *RUNS[name], "--compare", str(old), "--plot", str(plot))
    assert second.returncode == 0, second.stderr
    names = [figure["name"] for figure in result["figures"]]
    lines = second.stdout.splitlines()
    assert lines[0].split() == ["what", "kvtierd", "bare", "ratio", "before", "change"]
    assert [line.split("  ")[0] for line in lines[1:]] == names
    drawn = [text.text for text in ET.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert set(names) <= set(drawn)


def test_all_of_it_is_held_against_the_goals(tmp_path) -> None:
    done = bench("all", "--short", "--part", "pool", "--part", "clients", "--path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["what", "goal", "measured"]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "store of 16 blocks of 2 MiB / memcpy",
        "store, control a block",
        "load of 16 blocks of 2 MiB / memcpy",
        "load, control a block",
    ]
    assert bench("all", "--part", "nothing").returncode == 78


def test_a_result_of_another_bench_is_not_compared_with(tmp_path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"format": 1, "bench": "pool", "figures": []}')
    done = bench("scale", "--blocks", "1024", "--compare", str(old))
    assert done.returncode == 78
    assert "bench 'pool'" in done.stderr


def test_on_a_running_daemon_it_stores_nothing() -> None:
    with (
        short_folder("bench") as folder,
        LocalDaemon(folder, pool_bytes=4 << 20, disk_bytes=8 << 20) as daemon,
    ):
        done = bench("rpc", "--socket", daemon.socket, "--keys", "16", "--seconds", "0.3")
        assert done.returncode == 0, done.stderr
        assert "lookup of 16 missing keys" in done.stdout
        with Client(daemon.socket) as client:
            assert [tier["blocks"] for tier in client.status()["tiers"]] == [0, 0]


def test_without_a_daemon_it_says_so() -> None:
    with short_folder("bench") as folder:
        done = bench("rpc", "--socket", str(folder / "engine.sock"))
    assert done.returncode == 69
    assert "no daemon answers" in done.stderr

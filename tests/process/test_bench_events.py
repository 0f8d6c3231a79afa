"""``kvtierd bench events`` measures every part, and its readers miss nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def bench(*words: str) -> str:
    small = ("--rate", "200", "--seconds", "0.8", "--blocks", "3000")
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd", "bench", "events", *small, *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_part_is_measured_and_no_block_or_number_is_missing() -> None:
    found = json.loads(bench("--json"))
    assert all(figure["value"] > 0 for figure in found["figures"])
    result = found["details"]
    assert [one["blocks_per_batch"] for one in result["published"]] == [16, 256]
    sizes = {form["form"]: form["bytes_per_block"] for form in result["forms"]}
    assert sizes["array, no tokens"] < sizes["array"] < sizes["map"]
    assert sizes["map, no tokens"] < sizes["map"]
    assert all(form["events_per_second"] > 0 for form in result["forms"])
    for delay in (
        *(result["latency"][way] for way in ("publish", "bare", "commit")),
        result["stall"]["store"],
    ):
        assert 0 < delay["p50_us"] <= delay["p99_us"]
        assert delay["count"] > 10
    for replay in (result["snapshot"], result["catch_up"]):
        assert replay["replayed_blocks"] >= replay["resident_blocks"] >= 3000
        assert replay["first_number"] == replay["missing_numbers"] == 0
    assert result["catch_up"]["replayed_batches"] < 1 << 17, "whatever the past"


def test_a_person_gets_tables_of_the_parts_asked_for() -> None:
    text = bench("--part", "forms", "--part", "snapshot")
    assert "bytes/block" in text
    assert "replay, whole state" in text
    assert "stalled" not in text

"""Nothing that breaks around a real engine changes a token or ends a request (``faults.py`` breaks it)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import short_folder

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(run_script: Any, models: Path) -> Seen:
    with short_folder("fault") as folder:
        settings, result = folder / "settings.json", folder / "result.json"
        known = {"models": str(models), "folder": str(folder), "python": sys.executable}
        settings.write_text(json.dumps(known))
        run_script("faults.py", str(settings), str(result), timeout=400)
        found: Seen = json.loads(result.read_text())
        return found


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_daemon_that_is_killed_at_any_point_costs_no_token(backing: str, seen: Seen) -> None:
    kills = seen[backing]
    assert len(kills["points"]) == 10
    assert len(set(kills["points"])) > 4, "always at the same point"
    assert kills["wrong"] == []


def test_a_pool_in_a_file_is_kept_and_one_in_a_memfd_is_not(seen: Seen) -> None:
    assert set(seen["memfd"]["kept"]) == {0}
    assert min(seen["file"]["kept"]) > 0


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_after_the_last_kill_everything_is_stored_and_found_again(backing: str, seen: Seen) -> None:
    after = seen[backing]
    assert after["at_last"][0] == after["once_more"][0] == seen["expected"]
    assert sum(after["once_more"][1]) >= sum(after["at_last"][1]) > 0


@pytest.mark.parametrize("block", range(4))
def test_a_load_that_gets_only_its_first_blocks_is_completed_by_computing(block: int, seen: Seen) -> None:
    assert seen["lost"][block]["failed"] > 0
    assert seen["lost"][block]["tokens"] == seen["expected"]


@pytest.mark.parametrize("which", range(3))
def test_a_copy_that_fails_is_computed_instead(which: int, seen: Seen) -> None:
    """All of them (which would be asked for again without an end), every second, every third."""
    assert seen["copies"][which]["failed"] > 0
    assert seen["copies"][which]["tokens"] == seen["expected"]


def test_a_daemon_that_does_not_answer_delays_a_step_by_its_deadline_and_no_more(seen: Seen) -> None:
    late = seen["deadline"]
    assert late["tokens"] == late["after"] == seen["expected"]
    assert late["longest"] < 1.0  # two deadlines of 0.1 s, and a step on a busy machine

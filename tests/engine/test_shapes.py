"""Every shape of a real vLLM engine on kvtierd generates what a plain engine does (``shapes.py`` runs them).

The runs themselves fail where the event stream, folded, is not the daemon's inventory, or where an engine
leaves leases or slots behind. Each suite is one process with several engines, one after another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import short_folder

from .conftest import find_older

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

Seen = dict[str, Any]
PLAIN = {
    "usual": {
        "default": "plain",
        "chunks": "plain",
        "chunked_prefill": "plain",
        "asynchronous": "plain",
        "preemption": "plain_long",
    },
    "turns": {"decode_blocks": "plain_turns", "prompts_only": "plain_turns"},
    "hybrid": {"hybrid": "plain_hybrid", "hybrid_chunks": "plain_hybrid"},
    "ranks": {"two_ranks": "plain"},
    "pairs": {"data_parallel": "plain"},
    "older": {"default": "plain", "chunks": "plain"},
}
SHAPES = [(suite, shape) for suite, shapes in PLAIN.items() for shape in shapes]
ABORTS = ["turns", "older"]


@pytest.fixture(scope="session")
def tried(run_script: Any, models: Path) -> Callable[[str], Seen]:
    """Run a suite, once; what it saw."""

    @cache
    def run(suite: str) -> Seen:
        overlay = find_older() if suite == "older" else None
        with short_folder("shape") as folder:
            settings, result = folder / "settings.json", folder / "result.json"
            known = {"models": str(models), "folder": str(folder), "python": sys.executable}
            settings.write_text(json.dumps(known))
            run_script("shapes.py", suite, str(settings), str(result), timeout=400, overlay=overlay)
            seen: Seen = json.loads(result.read_text())
            return seen

    return run


@pytest.mark.parametrize(("suite", "shape"), SHAPES)
def test_tokens_are_those_of_a_plain_engine(suite: str, shape: str, tried: Callable[[str], Seen]) -> None:
    seen = tried(suite)
    expected = seen[PLAIN[suite][shape]]
    assert len(expected) >= 60
    for wave in {"cold", "warm", "from_disk", "renewed"} & seen[shape].keys():
        assert seen[shape][wave][0] == expected, wave


@pytest.mark.parametrize(("suite", "shape"), SHAPES)
def test_the_loads_are_real(suite: str, shape: str, tried: Callable[[str], Seen]) -> None:
    """More comes out of a cache than an empty daemon gave, and changed pool bytes change the tokens."""
    seen = tried(suite)
    got, expected = seen[shape], seen[PLAIN[suite][shape]]
    assert got["loads"] > 0
    assert sum(got["warm"][1]) > sum(got["cold"][1])
    changed = sum(a != b for a, b in zip(got["poisoned"][0], expected, strict=True))
    assert changed > len(expected) / 2


@pytest.mark.parametrize(("suite", "shape"), SHAPES)
def test_nothing_failed_on_the_way(suite: str, shape: str, tried: Callable[[str], Seen]) -> None:
    assert tried(suite)[shape]["failures"] == {}
    assert tried(suite)[shape]["complaints"] == []


def test_the_asynchronous_shape_had_a_scheduler_that_runs_ahead(tried: Callable[[str], Seen]) -> None:
    assert tried("usual")["asynchronous"]["scheduler"] == "AsyncScheduler"


def test_the_small_cache_did_preempt(tried: Callable[[str], Seen]) -> None:
    assert tried("usual")["preemption"]["preempted"] > 0


def test_four_blocks_make_one_chunk(tried: Callable[[str], Seen]) -> None:
    assert tried("usual")["chunks"]["blocks"] < tried("usual")["default"]["blocks"] / 2


def test_blocks_of_answers_are_stored_only_if_wanted(tried: Callable[[str], Seen]) -> None:
    assert tried("turns")["decode_blocks"]["blocks"] > tried("turns")["prompts_only"]["blocks"]


@pytest.mark.parametrize("suite", ABORTS)
def test_a_storm_of_aborts_changes_no_other_request(suite: str, tried: Callable[[str], Seen]) -> None:
    seen = tried(suite)
    for survivors in seen["aborts"]["survivors"]:
        assert len(survivors) >= len(seen["plain"]) / 2
        assert {number: seen["plain"][int(number)] for number in survivors} == survivors
    assert seen["aborts"]["failures"] == {}


@pytest.mark.parametrize("shape", ["aborts", "salts", "adapters"])
def test_the_loads_of_the_other_shapes_are_real_too(shape: str, tried: Callable[[str], Seen]) -> None:
    """Changed pool bytes change the tokens of each kind of request."""
    seen = tried("turns")[shape]
    for tokens, expected in zip(seen["poisoned"], seen["expected"], strict=True):
        changed = sum(a != b for a, b in zip(tokens, expected, strict=True))
        assert changed > len(expected) / 2
    assert seen["complaints"] == []


def test_new_weights_never_meet_blocks_of_the_old_ones(tried: Callable[[str], Seen]) -> None:
    seen = tried("turns")["new_weights"]
    changed = sum(a != b for a, b in zip(seen["before"], seen["expected"], strict=True))
    assert changed > len(seen["before"]) / 2
    assert seen["after"][0] == seen["again"][0] == seen["expected"]
    assert sum(seen["again"][1]) > sum(seen["after"][1])


def test_a_salt_finds_its_own_blocks_and_no_others(tried: Callable[[str], Seen]) -> None:
    seen = tried("turns")["salts"]
    tokens = seen["none"]["second"][0]
    for salt in ("none", "a", "b"):
        assert seen[salt]["first"][1] == [0], "somebody else's blocks were a hit"
        assert sum(seen[salt]["second"][1]) > sum(seen[salt]["rest"][1])
        assert seen[salt]["rest"][0] == seen[salt]["second"][0] == tokens


def test_adapters_and_salts_in_any_combination_share_nothing(tried: Callable[[str], Seen]) -> None:
    seen = tried("turns")["adapters"]
    for expected, got in zip(seen["expected"], seen["got"], strict=True):
        assert got["first"][1] == [0], "somebody else's blocks were a hit"
        assert got["rest"][0] == got["second"][0] == expected
        assert sum(got["second"][1]) > sum(got["rest"][1])
    assert (
        len({json.dumps(expected) for expected in seen["expected"]}) == 3
    )  # no, a, b: salts change no token


def test_two_data_parallel_ranks_were_two_engines_of_the_daemon(tried: Callable[[str], Seen]) -> None:
    seen = tried("pairs")["data_parallel"]
    assert (seen["ranks"], seen["engines"]) == ([0, 1], 2)


def test_a_paused_engine_keeps_its_blocks_and_a_sleeping_one_does_not(tried: Callable[[str], Seen]) -> None:
    """vLLM's sleep of level 1 and 2 clears every cache, the connector's too."""
    seen = tried("pairs")["asleep"]
    tokens, cold = seen["before"]
    assert 0 < seen["stored"] <= seen["kept"][0] == seen["kept"][1]
    for wave in ("paused", "woken", "again"):
        assert seen[wave][0] == tokens, wave
    assert seen["alone"] == [0]
    assert min(sum(seen["paused"][1]), sum(seen["again"][1])) > sum(cold)


def test_an_engine_that_got_new_weights_in_its_sleep_loads_nothing_of_the_old(
    tried: Callable[[str], Seen],
) -> None:
    """The call fell into loads and stores under way."""
    seen = tried("pairs")["asleep"]
    changed = sum(a != b for a, b in zip(seen["before"][0], seen["expected_anew"], strict=True))
    assert changed > len(seen["expected_anew"]) / 2
    assert seen["anew"][0] == seen["anew_again"][0] == seen["expected_anew"]
    assert seen["alone_anew"] == [0]
    assert sum(seen["anew_again"][1]) > sum(seen["anew"][1])
    assert seen["failures"] == {}


@pytest.mark.parametrize("suite", ["pairs", "older"])
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "salt", "adapter", "pictures", "all"])
def test_events_say_of_a_block_what_the_engines_own_say(
    kind: str, chunk: int, suite: str, tried: Callable[[str], Seen]
) -> None:
    """Parent, tokens, adapter and extra keys, of one block or several a chunk, stored, demoted, promoted."""
    seen = tried(suite)["metadata"][f"{kind}/{chunk}"]
    assert len(seen["engine"]) == 8
    for where in ("pool", "disk", "promoted"):
        assert seen[where] == seen["engine"], where
    extra = [what[5] for what in seen["engine"].values()]
    assert sum(keys is not None for keys in extra) == {"plain": 0, "salt": 1}.get(
        kind, 8 if kind != "pictures" else 7
    )

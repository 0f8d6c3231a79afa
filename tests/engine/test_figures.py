"""The glue's price in a real engine, held against its bounds (``engine_figures.py`` measures)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import LocalDaemon

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> dict[str, Any]:
    """What both engines measured; printed, so that a run with ``-s`` shows it."""
    folder: Path = tmp_path_factory.mktemp("f")
    daemon = LocalDaemon(folder, pool_bytes=64 << 20, disk_bytes=256 << 20)
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"model": str(folder / "models" / "llama"), "socket": daemon.socket}))
    run_script("tiny_model.py", str(folder / "models"))
    daemon.start()
    try:
        for phase in ("plain", "kept"):
            run_script("engine_figures.py", phase, str(settings), str(folder / f"{phase}.json"))
    finally:
        daemon.stop()
    plain, kept = (json.loads((folder / f"{phase}.json").read_text()) for phase in ("plain", "kept"))
    tokens = kept.pop("tokens")
    kept["same_tokens"] = {name: tokens[name] == plain["tokens"] for name in tokens}
    kept["misses"]["plain_first_token_ms"] = plain["misses"]["first_token_ms"]
    print(json.dumps(kept, indent=1))
    seen: dict[str, Any] = kept
    return seen


@pytest.mark.parametrize("part", ["misses", "hits", "promotions"])
def test_a_step_waits_for_the_daemon_at_most_twice(part: str, figures: dict[str, Any]) -> None:
    """Once for all lookups, once for the slots of all loads and stores; most steps do not wait at all."""
    seen = figures["steps"][part]
    assert figures["same_tokens"][part]
    assert seen["failures"] == {}
    assert seen["round_trips_in_one_step"] <= 2
    assert seen["round_trips"] <= 0.5 * seen["steps"] + 2


def test_lookups_of_waiting_requests_make_no_round_trips(figures: dict[str, Any]) -> None:
    seen = figures["steps"]["promotions"]
    assert seen["lookups"] > 20 * seen["round_trips"]


def test_a_prompt_without_a_hit_waits_for_nothing(figures: dict[str, Any]) -> None:
    """Of sixty prompts a few may share a cell of the daemon's presence with a block, and have to ask.

    What is left without a wait is the glue's own work before the first token's step, about 0.2 ms; the sixth
    fastest prompt's is looked at. ``test_first_token.py`` compares with a plain engine.
    """
    misses = figures["misses"]
    assert misses["prompts_that_waited"] <= 6, misses
    assert misses["in_glue_undisturbed_ms"] < 2, misses


def test_a_cached_long_prompt_is_much_faster_than_computing_it(figures: dict[str, Any]) -> None:
    long = figures["long"]
    assert long["loaded_ms"] < 0.5 * long["computed_ms"], long


def test_vllms_metrics_tell_hits_by_tier_and_what_they_cost(figures: dict[str, Any]) -> None:
    told = figures["vllm_metrics"]
    assert told["vllm:kvtierd_hit_blocks:('cpu',)"] > 0
    assert told["vllm:kvtierd_hit_blocks:('disk',)"] > 0
    assert told["vllm:kvtierd_hit_bytes:('cpu',)"] > 0
    assert told["vllm:kv_offload_load_bytes"] > 0
    assert told["vllm:kvtierd_wait_seconds"] > 0


def test_a_request_may_choose_its_tiers_and_is_told_what_is_wrong_with_its_wish(
    figures: dict[str, Any],
) -> None:
    errors = figures["wishes"]["errors"]
    assert errors["good"] is None
    assert "load_form" in errors["unknown key"]
    assert "tape" in errors["unknown tier"]
    assert figures["wishes"]["on_disk"] == 0

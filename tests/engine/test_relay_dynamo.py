"""A real engine's own events and kvtierd's, in one stream, in one worker of a real Dynamo indexer."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import LocalDaemon, short_folder

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BLOCK = 32
STEPS = (
    "generated",
    "reset",
    "evicted from the pool",
    "loaded from disk",
    "displaced on the device",
    "engine gone",
    "engine restarted",
)


def dynamo(log: Path) -> Any:
    """Start the indexer of the router tests."""
    python = os.environ.get("KVTIERD_DYNAMO_PYTHON", str(ROOT / ".venvs/dynamo/bin/python"))
    if not Path(python).exists():
        pytest.skip(f"NO REAL ROUTER TESTED: {python} is missing; set KVTIERD_DYNAMO_PYTHON")
    spec = importlib.util.spec_from_file_location("router_conftest", ROOT / "tests/router/conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.DynamoIndexer(python, log)


@pytest.fixture(scope="module")
def seen(run_script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the indexer answered at each step of the engine's life."""
    indexer = dynamo(tmp_path_factory.mktemp("dynamo") / "log")
    try:
        with short_folder("relay") as folder:
            yield live(folder, indexer, run_script)
    finally:
        indexer.close()


def live(folder: Path, indexer: Any, run_script: Any) -> dict[str, Any]:
    daemon = LocalDaemon(folder, pool_bytes=8 << 20, disk_bytes=64 << 20)
    engine = {"connect": f"ipc://{folder}/gpu", "replay": f"ipc://{folder}/gpu-replay"}
    body = json.loads(daemon.config.read_text())
    body["events"]["relay"] = [engine]
    daemon.config.write_text(json.dumps(body))
    settings = {
        "model": str(folder / "models" / "llama"),
        "socket": daemon.socket,
        "engine_events": engine["connect"],
        "engine_replay": engine["replay"],
        "indexer": indexer._url,
        "indexed": indexer.model,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    run_script("tiny_model.py", str(folder / "models"))
    with daemon:
        indexer.wait_ready()
        indexer.register(daemon.endpoint, daemon.replay, block_size=BLOCK)
        run_script("relay_phases.py", str(folder / "settings.json"), str(folder / "seen.json"))
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


@pytest.mark.parametrize("step", STEPS)
def test_the_prefix_in_gpu_pool_and_disk_is_right(seen: dict[str, Any], step: str) -> None:
    answered, expected = seen[step]
    assert answered == expected


def test_a_full_device_displaced_a_part_of_the_prefix(seen: dict[str, Any]) -> None:
    (gpu, cpu, _), _ = seen["displaced on the device"]
    assert gpu < cpu


def test_every_block_in_the_pool_was_announced_after_the_engines_own(seen: dict[str, Any]) -> None:
    relay = seen["relay"]
    assert relay["hold_timeouts"] == 0, relay
    (engine,) = relay["engines"]
    assert engine["cleared"] == 1
    assert engine["unrepaired"] == engine["malformed"] == engine["unknown_events"] == 0, engine

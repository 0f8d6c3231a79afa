"""A real vLLM engine stores and loads its KV cache through a real daemon (``engine_phases.py`` is its life).

Each phase runs once, in a process of its own; the tests say what must be true of what it saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import LocalDaemon

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

Seen = dict[str, Any]
BLOCK = 32


class Life:
    """The folder, daemon and settings that the phases share."""

    def __init__(self, folder: Path, run_script: Any) -> None:
        self.folder = folder
        self.daemon = LocalDaemon(folder, pool_bytes=8 << 20, disk_bytes=64 << 20)
        self.settings: Seen = {
            "model": str(folder / "models" / "llama"),
            "nobody": str(folder / "nobody.sock"),
            "socket": self.daemon.socket,
            "endpoint": self.daemon.endpoint,
            "engine_events": f"ipc://{folder}/gpu",
            "daemon": [sys.executable, "-m", "kvtierd", "serve", "--config", str(self.daemon.config)],
            "engine_replay": f"ipc://{folder}/gpu-replay",
        }
        self._run_script = run_script

    def phase(self, name: str) -> Seen:
        """Run one phase and return what it saw."""
        settings, result = self.folder / "settings.json", self.folder / f"{name}.json"
        settings.write_text(json.dumps(self.settings | {"daemon_pid": self.daemon.pid}))
        self._run_script("engine_phases.py", name, str(settings), str(result))
        seen: Seen = json.loads(result.read_text())
        return seen


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> Iterator[Life]:
    """A daemon that outlives the engines."""
    made = Life(tmp_path_factory.mktemp("v"), run_script)
    run_script("tiny_model.py", str(made.folder / "models"))
    made.daemon.start()
    yield made
    made.daemon.stop()


@pytest.fixture(scope="module")
def plain(life: Life) -> Seen:
    """An engine without a connector, then one without a daemon."""
    return life.phase("plain")


@pytest.fixture(scope="module")
def first(life: Life) -> Seen:
    """The first engine with the daemon."""
    return life.phase("first")


@pytest.fixture(scope="module")
def second(life: Life, first: Seen) -> Seen:  # the first engine has stored and is gone
    """The second engine; it kills the daemon."""
    return life.phase("second")


@pytest.mark.parametrize("when", ["stored", "from_pool", "from_disk", "healed"])
def test_tokens_equal_those_of_a_plain_engine(when: str, first: Seen, plain: Seen) -> None:
    assert first[when][0] == plain["tokens"]


def test_every_full_block_of_the_prompts_is_stored(first: Seen) -> None:
    assert first["blocks"] == first["full_blocks"]


def test_an_engine_that_lost_its_cache_loads_every_block_from_the_pool(first: Seen) -> None:
    assert first["pool_loads"] == first["blocks"]
    assert first["from_pool"][1] == first["cacheable"]


def test_blocks_that_are_only_on_disk_come_back_through_the_pool(first: Seen) -> None:
    assert first["disk_reads"] >= first["blocks"]
    assert first["promoted"] == first["blocks"]
    assert first["from_disk"][1] == first["cacheable"]


def test_changed_pool_bytes_change_the_tokens_so_the_loads_are_real(first: Seen, plain: Seen) -> None:
    assert all(got != want for got, want in zip(first["poisoned"][0], plain["tokens"], strict=True))


def test_no_call_to_the_daemon_failed(first: Seen) -> None:
    assert first["failures"] == {}


def test_the_daemons_events_name_exactly_the_stored_blocks(first: Seen) -> None:
    stored = [str(block) for block in first["event_blocks"]]
    assert sorted(first["events"]["CPU"]) == sorted(stored)
    assert sorted(first["events"]["STORAGE"]) == sorted(stored)


@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
def test_a_blocks_events_say_the_same_as_the_engines_own(medium: str, first: Seen) -> None:
    gpu = first["events"]["GPU"]
    for block, said in first["events"][medium].items():
        assert said == gpu[block], block


def test_a_salt_is_in_the_events_of_the_first_block(first: Seen) -> None:
    salted = [said for said in first["events"]["CPU"].values() if said[5]]
    assert [(said[0], said[5]) for said in salted] == [(None, ["tenant-a"])]


def test_the_stream_has_no_gap(first: Seen) -> None:
    numbers = first["sequences"]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_new_engine_hits_what_the_old_one_stored(first: Seen, second: Seen, plain: Seen) -> None:
    assert second["hits_at_once"] == [plain["tokens"], first["cacheable"]]


def test_blocks_lost_between_lookup_and_load_are_recomputed(second: Seen, plain: Seen) -> None:
    tokens, _, lost = second["losing"]
    assert lost > 0
    assert tokens == plain["tokens"]


def test_an_engine_goes_on_when_its_daemon_is_killed(second: Seen, plain: Seen) -> None:
    count = len(plain["tokens"])
    assert second["killed"][:count] == plain["tokens"]
    assert second["killed"][count:] == plain["fresh"]
    assert second["without"][0] == plain["tokens"]


def test_an_engine_finds_its_blocks_again_when_the_daemon_is_back(
    first: Seen, second: Seen, plain: Seen
) -> None:
    assert second["new_daemon"] == [plain["tokens"], first["cacheable"]]


def test_an_engine_runs_without_a_daemon(plain: Seen) -> None:
    assert plain["absent"][0] == plain["absent_again"][0] == plain["tokens"]


def test_a_lost_block_costs_a_recompute_and_not_the_request(plain: Seen) -> None:
    assert plain["policy"] is True


def test_the_daemon_never_imports_torch() -> None:
    code = "import sys, kvtierd.daemon; assert not {'torch', 'numpy', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)

"""vLLM's OpenAI server with two data-parallel engines on one daemon, started as the README says."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig
from kvtierd.testing.local_daemon import free_port, short_folder

from .conftest import ROOT, find_python

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK = 32
START = 200.0
EVERYBODY = [("scheduler", 0), ("scheduler", 1), ("worker", 0), ("worker", 1)]
README = (ROOT / "README.md").read_text()


def transfer_config(socket: str) -> dict[str, Any]:
    """The README's ``--kv-transfer-config``, for another socket."""
    (written,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", README, re.DOTALL)
    config: dict[str, Any] = json.loads(written)
    config["kv_connector_extra_config"]["kvtierd_socket"] = socket
    return config


class Server:
    """The process, and what a user asks of it."""

    def __init__(self, model: Path, socket: str, log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.model, self._log = str(model), log
        options = {
            "model": self.model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "block-size": BLOCK,
            "num-gpu-blocks-override": 64,
            "max-model-len": 640,
            "data-parallel-size": 2,
            "kv-transfer-config": json.dumps(transfer_config(socket)),
        }
        command = [find_python(), "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        }
        environment.pop("PYTHONHASHSEED", None)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ask(self, path: str, body: dict[str, Any] | None = None, rank: int | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: str, rank: int) -> tuple[str, int]:
        """The text that one rank makes of a prompt, and how many of its tokens came out of a cache."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = json.loads(self.ask("/v1/completions", body, rank))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def wait(self) -> None:
        wait_for(self._healthy, "the server", timeout=START, poll=0.5)
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-6000:]

    def _healthy(self) -> bool:
        if self._process.poll() is not None:
            return True
        try:
            self.ask("/health")
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)


@pytest.fixture(scope="module")
def rig() -> Iterator[DaemonRig]:
    with short_folder("server") as folder:
        made = DaemonRig(folder, slots=4096).start()
        yield made
        made.close()


@pytest.fixture(scope="module")
def server(rig: DaemonRig, models: Path) -> Iterator[Server]:
    made = Server(models / "llama", rig.daemon.socket, rig.folder / "vllm.log")
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def prompt(seed: int, blocks: int = 5) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(3, 512)}" for _ in range(blocks * BLOCK + 7))


def compute(server: Server, rig: DaemonRig, text: str) -> tuple[str, int]:
    """Have rank 0 compute a prompt, and wait until its blocks are stored, which goes on after the answer."""
    before = rig.tier("cpu")["stored"]
    answer = server.complete(text, rank=0)
    wait_for(lambda: rig.tier("cpu")["stored"] >= before + 5, "the prompt's blocks")
    return answer


def attached(rig: DaemonRig) -> list[tuple[str, int]]:
    """The role and the rank of each of the engines' sessions, sorted."""
    sessions = rig.status()["sessions"]
    return sorted((s["role"], s["dp_rank"]) for s in sessions if s["role"] != "tool")


def test_what_one_data_parallel_rank_stored_is_a_hit_for_the_other(server: Server, rig: DaemonRig) -> None:
    text = prompt(1)
    computed, cached = compute(server, rig, text)
    assert cached == 0
    assert server.complete(text, rank=1) == (computed, 5 * BLOCK)


def test_every_process_of_the_server_is_attached_with_its_rank(server: Server, rig: DaemonRig) -> None:
    """From the start; after a restart of the daemon each comes back with the next request to its rank."""
    wait_for(lambda: attached(rig) == EVERYBODY, f"{EVERYBODY} to be attached")


def test_the_servers_metrics_tell_the_hits_by_tier(server: Server, rig: DaemonRig) -> None:
    text = prompt(2)
    compute(server, rig, text)
    server.complete(text, rank=1)
    hits = r'^vllm:kvtierd_hit_blocks_total\{engine="1".*tier="cpu"\} (\S+)'

    def told() -> bool:
        found = re.search(hits, server.ask("/metrics"), re.MULTILINE)
        return found is not None and float(found[1]) >= 5

    wait_for(told, "the metric", timeout=20)


def test_the_server_goes_on_without_its_daemon_and_finds_it_again(server: Server, rig: DaemonRig) -> None:
    text = prompt(3)
    computed, _ = server.complete(text, rank=0)
    rig.restart(crash=True)
    assert server.complete(text, rank=1)[0] == computed
    seeds = itertools.count(100)

    def found() -> bool:
        fresh = prompt(next(seeds))  # each time another: a rank's own cache would have it the second time
        before = rig.tier("cpu")["stored"]
        first, _ = server.complete(fresh, rank=0)
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: rig.tier("cpu")["stored"] >= before + 5, "the prompt's blocks", timeout=2)
        second, cached = server.complete(fresh, rank=1)
        assert first == second
        return cached == 5 * BLOCK

    wait_for(found, "a hit on the new daemon", timeout=60)
    wait_for(lambda: attached(rig) == EVERYBODY, f"{EVERYBODY} to be attached")

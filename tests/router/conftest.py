"""Real routers as the tests see them, in their own environments, and the pod whose events they follow.

NVIDIA Dynamo's standalone KV indexer, and vLLM's router with policy kv_aware and a worker that only answers.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import random
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import BlockKey, Client, Group, Layout, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.local_daemon import LocalDaemon, free_port, is_idle, short_folder
from kvtierd.testing.workload import Chain, WorkBlock, payload

ROOT = Path(__file__).parents[2]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CREDIT = re.compile(r"credited_prefix_tokens=(\d+)")
NUMBER = re.compile(r"sequence advanced source=\S+ rank=(\d+) seq=(\d+)")
PATIENCE = 30.0
"""Seconds for a router to follow: on a busy machine a heartbeat, a replay and a lost replay take some."""


class DynamoIndexer:
    """One ``python -m dynamo.indexer`` and its HTTP interface; ``model`` names the only indexed model."""

    def __init__(self, python: str, log: Path, *, model: str = "m") -> None:
        self.model = model
        self.log = log
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DYN_LOG": "info"},
            )

    def wait_ready(self) -> None:
        """Wait until it answers; fails with its log when it ended instead."""
        wait_for(self._healthy, "the indexer to answer", timeout=PATIENCE)

    def _healthy(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail(f"the indexer ended with {self._process.returncode}:\n{self.log.read_text()}")
        try:
            return self._ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def register(self, endpoint: str, replay: str, *, block_size: int, instance: int = 1) -> None:
        """Make it follow one publisher."""
        body = {
            "instance_id": instance,
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "model_name": self.model,
            "block_size": block_size,
            "dp_rank": 0,
        }
        status, answer = self._ask("POST", "/register", body)
        assert status == 201, answer

    def query(self, tokens: Sequence[int], *, instance: int = 1) -> tuple[int, int]:
        """Return the tokens that it believes cached in (CPU or above, disk or above); (0, 0) if unknown."""
        return self.tiers(tokens, instance=instance)[1:]

    def tiers(self, tokens: Sequence[int], *, instance: int = 1) -> tuple[int, int, int]:
        """Return the tokens that it believes cached in (GPU, CPU or above, disk or above)."""
        status, answer = self._ask("POST", "/query", {"token_ids": list(tokens), "model_name": self.model})
        if status != 200:
            return 0, 0, 0
        found = json.loads(answer).get("instances", {}).get(str(instance), {})
        return found.get("gpu", 0), found.get("cpu", 0), found.get("disk", 0)

    def get(self, path: str) -> Any:
        """Return a JSON page of it, such as ``/dump`` or ``/workers``."""
        return json.loads(self._ask("GET", path)[1])

    def close(self) -> None:
        """Stop it, within ten seconds."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


class _Worker(http.server.BaseHTTPRequestHandler):
    """Answers whatever the router asks of an engine."""

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer({"id": "c", "object": "text_completion", "model": "m", "choices": [], "usage": {}})

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class VllmRouter:
    """One ``vllm-router`` with one worker, whose events come from ``endpoints`` (one for each dp rank)."""

    def __init__(
        self, program: str, log: Path, endpoints: Sequence[str], replays: Sequence[str], block: int
    ) -> None:
        self.log = log
        self._port = free_port()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Worker)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        worker = f"http://127.0.0.1:{self._server.server_port}"
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "policy": "kv_aware",
            "worker-urls": worker,
            "kv-event-source": f"{worker}={','.join(endpoints)}",
            "kv-event-replay-source": f"{worker}={','.join(replays)}",
            "kv-event-block-size": block,
            "kv-event-model": "m",
            "log-level": "debug",
            "prometheus-host": "127.0.0.1",
            "prometheus-port": free_port(),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with log.open("wb") as sink:
            self._process = subprocess.Popen([program, *words], stdout=sink, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Wait until it answers and subscribed; fails with its log when it ended instead."""
        wait_for(self._healthy, "the router to answer", timeout=PATIENCE)

    def _healthy(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail(f"the router ended with {self._process.returncode}:\n{self.log.read_text()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=PATIENCE) as answer:
                return answer.status == 200 and "kv_index subscriber for" in self.log.read_text()
        except OSError:
            return False

    def credited(self, tokens: Sequence[int]) -> int:
        """Send a prompt and return the tokens of it that it counts as cached, weighted by tier."""
        before = len(self.text())
        body = json.dumps({"model": "m", "prompt": list(tokens), "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            answer.read()
        found = wait_for(
            lambda: CREDIT.findall(self.text()[before:]),
            "the router to log what it credits",
            timeout=PATIENCE,
        )
        return int(found[-1])

    def text(self) -> str:
        """Return its log so far."""
        return COLOUR.sub("", self.log.read_text(errors="replace"))

    def numbers(self, rank: int = 0) -> list[int]:
        """Return the batch numbers that it took, replayed and live."""
        return [int(number) for of, number in NUMBER.findall(self.text()) if int(of) == rank]

    def close(self) -> None:
        """Stop it and its worker, within ten seconds."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Pod:
    """A daemon and an engine's session on it, with blocks that have real bytes.

    ``tokens`` in a block; the pool has room for 8 blocks, the disk for 20 (headers go on top of the payload).
    """

    tokens = 16
    block = 64 << 10
    layout = Layout(
        model="m", dtype="uint8", layout="test", groups=(Group(tokens_per_block=16, block_bytes=64 << 10),)
    )

    def __init__(self, folder: Path, **events: Any) -> None:
        self.daemon = LocalDaemon(
            folder,
            pool_bytes=8 * self.block,
            disk_bytes=20 * (self.block + (8 << 10)),
            changes={"events": {"heartbeat": "1s", **events}} if events else None,
        )
        self.ends: dict[str, dict[str, str]] = {}
        self.on_device: set[BlockKey] = set()
        """What the engine has itself, for :meth:`truth`; a test's fake engine says so."""
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def attached(self, dp_rank: int = 0) -> Iterator[Session]:
        """Be an engine of its own."""
        with Client(self.daemon.socket, deadline=5.0) as client:
            yield client.attach(self.layout, engine_id=f"engine-{dp_rank}", dp_rank=dp_rank)

    def daemon_status(self) -> dict[str, Any]:
        """Return the daemon's status."""
        with Client(self.daemon.socket, deadline=5.0) as client:
            return client.status()

    def start(self) -> None:
        """Start the daemon and attach."""
        self.daemon.start()
        self.settle()
        self.session = self._stack.enter_context(self.attached())
        self.ends = json.loads((self.daemon.folder / "run" / "events.json").read_text())

    def settle(self) -> None:
        """Wait for a quiet point: until then what the inventory says is not the last word."""
        wait_for(lambda: is_idle(self.daemon_status()), "the daemon to be idle", timeout=PATIENCE)

    def stop(self) -> int | None:
        """Detach and stop the daemon; returns its exit code."""
        self._stack.close()
        return self.daemon.stop()

    def kill(self) -> None:
        """End the daemon as a crash does."""
        self.daemon.kill()
        self._stack.close()

    def chain(self, seed: int, blocks: int) -> Chain:
        """Make a prompt of whole blocks."""
        made = Chain(self.tokens, b"router test")
        made.extend(random.Random(seed).choices(range(32_000), k=blocks * self.tokens))
        return made

    def store(self, blocks: list[WorkBlock]) -> None:
        """Store blocks and wait until they are on disk too, so that steps do not overlap."""
        keys = [block.key for block in blocks]
        job = self.session.prepare_store(keys, meta=[block.meta for block in blocks])
        assert list(job.keys) == keys
        for key, view in zip(job.keys, job.views(), strict=True):
            view[:] = payload(key, self.block)
        assert list(job.commit()) == keys
        wait_for(lambda: set(keys) <= self.resident("disk"), "the blocks to be on disk", timeout=PATIENCE)

    def load(self, blocks: list[WorkBlock]) -> None:
        """Load blocks and check their bytes."""
        keys = [block.key for block in blocks]
        got = self.session.load(keys, deadline=5.0)
        try:
            assert list(got.keys) == keys
            for key, view in zip(got.keys, got.views(), strict=True):
                assert bytes(view) == payload(key, self.block)
        finally:
            got.release()

    def resident(self, tier: str) -> set[BlockKey]:
        """Return what the daemon itself says is in a tier."""
        return {entry.key for entry in self.session.inventory(tier)}

    def truth(self, made: Chain) -> tuple[int, int]:
        """Return the prompt's tokens in CPU, and those extended by disk, by the daemon's own inventory."""
        return self.whole_truth(made)[1:]

    def whole_truth(self, made: Chain) -> tuple[int, int, int]:
        """Return the prompt's tokens on the GPU, those extended by CPU, and those extended by disk."""
        ends, end = [], 0
        for held in (self.on_device, self.resident("cpu"), self.resident("disk")):
            while end < len(made.blocks) and made.blocks[end].key in held:
                end += 1
            ends.append(end * self.tokens)
        return ends[0], ends[1], ends[2]


@pytest.fixture
def make_pod() -> Iterator[Callable[..., Pod]]:
    """Make pods that end with the test; arguments are settings of ``events``."""
    with contextlib.ExitStack() as stack:

        def make(**events: Any) -> Pod:
            pod = Pod(stack.enter_context(short_folder("router")), **events)
            stack.callback(pod.stop)
            pod.start()
            return pod

        yield make


@pytest.fixture(scope="session")
def vllm_router_program() -> str:
    """The program of the environment that ``vllm-router`` is installed in."""
    program = os.environ.get("KVTIERD_VLLM_ROUTER", str(ROOT / ".venvs/vllm-router/bin/vllm-router"))
    if not Path(program).exists():
        pytest.skip(f"NO REAL ROUTER TESTED: {program} is missing; set KVTIERD_VLLM_ROUTER")
    return program


@pytest.fixture
def start_vllm_router(vllm_router_program: str, tmp_path: Path) -> Iterator[Callable[..., VllmRouter]]:
    """Start routers on audiences' endpoints (one for each dp rank); they end with the test."""
    started: list[VllmRouter] = []

    def start(*ends: dict[str, str]) -> VllmRouter:
        log = tmp_path / f"vllm-router-{len(started)}.log"
        binds, replays = [end["bind"] for end in ends], [end["replay"] for end in ends]
        router = VllmRouter(vllm_router_program, log, binds, replays, Pod.tokens)
        started.append(router)
        router.wait_ready()
        return router

    yield start
    for router in started:
        router.close()


@pytest.fixture(scope="session")
def dynamo_python() -> str:
    """The interpreter of the environment that ``ai-dynamo-runtime`` is installed in."""
    python = os.environ.get("KVTIERD_DYNAMO_PYTHON", str(ROOT / ".venvs/dynamo/bin/python"))
    if not Path(python).exists():
        pytest.skip(f"NO REAL ROUTER TESTED: {python} is missing; set KVTIERD_DYNAMO_PYTHON")
    return python


@pytest.fixture
def start_indexer(dynamo_python: str, tmp_path: Path) -> Iterator[Callable[[], DynamoIndexer]]:
    """Start indexers that end with the test."""
    started: list[DynamoIndexer] = []

    def start() -> DynamoIndexer:
        indexer = DynamoIndexer(dynamo_python, tmp_path / f"indexer-{len(started)}.log")
        started.append(indexer)
        indexer.wait_ready()
        return indexer

    yield start
    for indexer in started:
        indexer.close()

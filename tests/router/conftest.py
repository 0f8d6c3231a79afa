"""Real routers as the tests see them: NVIDIA Dynamo's standalone KV indexer in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.local_daemon import free_port

ROOT = Path(__file__).parents[2]


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
        wait_for(self._healthy, "the indexer to answer", timeout=30)

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
        status, answer = self._ask("POST", "/query", {"token_ids": list(tokens), "model_name": self.model})
        if status != 200:
            return 0, 0
        found = json.loads(answer).get("instances", {}).get(str(instance), {})
        return found.get("cpu", 0), found.get("disk", 0)

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
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


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

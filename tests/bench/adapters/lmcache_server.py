"""LMCache's multi-process server, through the client of its own ``lmcache bench server``, on the CPU.

The argument is the transfer mode: ``engine_driven`` (shared memory; what its ``auto`` takes on a CPU) or
``lmcache_driven``. The server has its defaults but for the size of its memory and its ports.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import lines  # first: it takes standard output
import ports
import torch
from lmcache.cli.commands.bench.server_bench import client as bench
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

CHUNK = 256
"""Tokens of its objects by default: one store or load here."""
BLOCK = 16
DEADLINE = 180.0


class Daemon:
    def __init__(self, mode: str) -> None:
        self.mode = mode

    def open(self, pool_bytes: int, block_bytes: int, layers: int, prompt: int) -> list[int]:
        self.name = f"kvtierd_peers_{os.getpid()}"
        self.process, url = self._start(max(1, pool_bytes >> 30))
        heads = block_bytes // layers // 2 // BLOCK // 2 // 64
        self.blocks = max(CHUNK // BLOCK, prompt) + BLOCK  # its first block means: no data
        config = BenchConfig(
            rpc_url=url,
            http_url="",
            mode="cpu",
            transfer_mode=self.mode,
            tp_size=1,
            use_mla=False,
            num_tokens=CHUNK,
            kvcache_shape_spec=f"(2,{self.blocks},{BLOCK},{heads},64):float16:{layers}",
            num_blocks=self.blocks,
            block_size=BLOCK,
        )
        self.client = bench.ServerBenchClient(config, lambda text: None)
        self.client.start()
        self.rpc = self.client._require_started()
        self.caches = list(self.client._workers[0].kv_caches.values())
        self.requests = 0
        if layers > 1:  # touch all of its memory
            self.store((pool_bytes - (pool_bytes >> 2)) // (block_bytes * CHUNK // BLOCK))
            self.wipe()
        self.prompt = prompt * BLOCK
        self._store_prompt()
        return [self.process.pid]

    def _start(self, gigabytes: int) -> tuple[subprocess.Popen[bytes], str]:
        port, http = ports.free_ports(2)
        command = [
            sys.executable,
            *("-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http), "--eviction-policy", "LRU"),
            *("--l1-size-gb", str(gigabytes), "--supported-transfer-mode", self.mode),
            *(("--shm-name", self.name) if self.mode == "engine_driven" else ()),
        ]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        ports.wait_for_port(process, port, DEADLINE)
        return process, f"tcp://127.0.0.1:{port}"

    def _request(self, tokens: tuple[int, ...]) -> bench.RequestContext:
        self.requests += 1
        count = len(tokens)
        return bench.RequestContext(
            sequence_id=self.requests,
            request_id=f"request-{self.requests}",
            request_kind="bench",
            token_ids=tokens,
            num_full_tokens=count,
            total_chunks=count // CHUNK,
            chunk_size=CHUNK,
            block_offset=1,
            num_blocks=count // BLOCK,
        )

    def _store_prompt(self) -> None:
        self.prompt_tokens = tuple(random.Random(7).choices(range(32000), k=self.prompt))
        if self.prompt:
            self._commit(self._request(self.prompt_tokens))

    def grow(self, blocks: int, at_once: int) -> None:
        """Store prompts of ``at_once`` blocks."""
        for number in range(blocks // at_once):
            tokens = tuple(random.Random(number).choices(range(32000), k=at_once * BLOCK))
            for start in range(0, len(tokens), CHUNK):
                self._commit(self._request(tokens[start : start + CHUNK]))

    def _commit(self, request: bench.RequestContext) -> None:
        done = self.client.store(request, 0, request.num_full_tokens)
        if done is None or not done.succeeded:
            raise RuntimeError("LMCache's server refused a store")
        self._wait_visible(request)
        self.client.end_session(request)

    def _wait_visible(self, request: bench.RequestContext) -> None:
        """In its own mode it answers a store before the blocks can be found."""
        end = time.monotonic() + DEADLINE
        while self._find(request.token_ids, f"{request.request_id}-seen") < request.total_chunks:
            if time.monotonic() > end:
                raise TimeoutError("what LMCache stored was not found")

    def _find(self, tokens: tuple[int, ...], name: str) -> int:
        found, key = self._ask(tokens, name)
        self._let_go(key)
        return found

    def _ask(self, tokens: tuple[int, ...], name: str):  # type: ignore[no-untyped-def]
        """Look a prompt up as its vLLM connector does: ask, then ask for the result until it is there."""
        key = helpers._make_key(tokens, name, end=len(tokens))
        self.rpc.lookup(key, 1).result(timeout=DEADLINE)
        while (found := self.rpc.query_prefetch_status(name).result(timeout=DEADLINE)) is None:
            pass
        return found, key

    def _let_go(self, key) -> None:  # type: ignore[no-untyped-def]
        self.rpc.free_lookup_locks(key, 1).result(timeout=DEADLINE)
        self.rpc.end_session(key.request_id).result(timeout=DEADLINE)

    def pins(self, pin: bool) -> bool:
        """Say whether it has lookups of this kind."""
        return True

    def lookup(self, times: int, pin: bool) -> list[float]:
        seconds = []
        for _ in range(times):
            self.requests += 1
            start = time.perf_counter()
            found, key = self._ask(self.prompt_tokens, f"lookup-{self.requests}")
            seconds.append(time.perf_counter() - start)
            self._let_go(key)
            self._check(found)
        return seconds

    def lookups(self, seconds: float, lanes: int, pin: bool) -> float:
        start = time.perf_counter()
        counts = [0] * lanes

        def lane(number: int) -> None:
            while time.perf_counter() < start + seconds:
                counts[number] += 1
                self._check(self._find(self.prompt_tokens, f"lane-{start}-{number}-{counts[number]}"))

        threads = [threading.Thread(target=lane, args=(number,)) for number in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - start)

    def store(self, times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            tokens = tuple(random.SystemRandom().choices(range(32000), k=CHUNK))
            self.last = self._request(tokens)
            start = time.perf_counter()
            done = self.client.store(self.last, 0, CHUNK)
            seconds.append(time.perf_counter() - start)
            if done is None or not done.succeeded:
                raise RuntimeError("LMCache's server refused a store")
            self._wait_visible(self.last)
            self.client.end_session(self.last)
        return seconds

    def load(self, times: int) -> list[float]:
        """Load what was stored last; the lookup that it needs before is not timed."""
        before = [cache.clone() for cache in self.caches]
        seconds = []
        for _ in range(times):
            request = self._request(self.last.token_ids)
            self._check_chunks(self._ask(request.token_ids, request.request_id)[0], 1)
            for cache in self.caches:
                cache[:, 1 : 1 + CHUNK // BLOCK] = 0
            start = time.perf_counter()
            done = self.client.retrieve(request, 0, CHUNK)
            seconds.append(time.perf_counter() - start)
            self.client.end_session(request)
            if done is None or not done.succeeded:
                raise RuntimeError("LMCache's server did not bring what it had found")
            if not all(map(torch.equal, before, self.caches)):
                raise RuntimeError("a load brought other bytes than were stored")
        return seconds

    def wipe(self) -> None:
        """Forget everything, and store the prompt again."""
        self.rpc.clear(True).result(timeout=DEADLINE)
        if hasattr(self, "prompt"):
            self._store_prompt()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(DEADLINE)
        (Path("/dev/shm") / self.name).unlink(missing_ok=True)

    def _check(self, found: int) -> None:
        self._check_chunks(found, self.prompt // CHUNK)

    @staticmethod
    def _check_chunks(found: int, chunks: int) -> None:
        if found != chunks:
            raise RuntimeError(f"{found} of {chunks} chunks were found")


if __name__ == "__main__":
    lines.serve(Daemon(sys.argv[1]))

"""kvtierd as users run it: the daemon in a process of its own, its clients in this one."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import lines  # first: it takes standard output
import numpy as np

from kvtierd.cli.bench_rpc import chain_of
from kvtierd.client import AsyncClient, Client, Group, KeyState, Layout
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

BATCH = 16
"""Blocks of one store or load: 256 tokens."""
LEASE = 5.0
"""Seconds for which a lookup that pins holds what it found."""


class Daemon:
    def open(self, pool_bytes: int, block_bytes: int, layers: int, prompt: int) -> list[int]:
        self.stack = ExitStack()
        folder = self.stack.enter_context(short_folder("peers"))
        tiers = {"tiers": [{"name": "cpu", "type": "cpu", "policy": "lru"}]}
        daemon = LocalDaemon(folder, pool_bytes=pool_bytes, disk_bytes=0, changes=tiers)
        self.path = self.stack.enter_context(daemon).socket
        self.layout = Layout(
            model="bench",
            dtype="uint8",
            layout="none",
            groups=(Group(tokens_per_block=16, block_bytes=block_bytes),),
        )
        client = self.stack.enter_context(Client(self.path, deadline=5.0))
        self.session = client.attach(self.layout, engine_id="bench")
        # As in an engine: keys and values of each layer apart, and in each of them the blocks' parts.
        self.shape = (layers, 2, block_bytes // layers // 2)
        rng = np.random.default_rng()
        self.source = rng.integers(0, 256, (layers, 2, BATCH, self.shape[2]), dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.stores = 0
        self.last: tuple = ([], [])
        if layers > 1:  # this process has to touch the pool once, as an engine does that pins it
            self.store(pool_bytes // block_bytes // BATCH)
            self.wipe()
        self.prompt, metas = chain_of(prompt, b"prompt")
        if prompt:
            self._commit(self.session.prepare_store(self.prompt, metas))
        assert daemon.pid is not None
        return [daemon.pid]

    def grow(self, blocks: int, at_once: int) -> None:
        """Store blocks with nothing in them, in prompts of ``at_once`` blocks."""
        for number in range(blocks // at_once):
            self._commit(self.session.prepare_store(*chain_of(at_once, b"grow %d" % number)))

    def pins(self, pin: bool) -> bool:
        """Say whether it has lookups of this kind."""
        return True

    def lookup(self, times: int, pin: bool) -> list[float]:
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            found = self.session.lookup(self.prompt, lease=LEASE if pin else None)
            seconds.append(time.perf_counter() - start)
            found.release()
            self._check(found.states)
        return seconds

    def lookups(self, seconds: float, lanes: int, pin: bool) -> float:
        return asyncio.run(self._lookups(seconds, lanes, LEASE if pin else None))

    async def _lookups(self, seconds: float, lanes: int, lease: float | None) -> float:
        async with AsyncClient(self.path, deadline=5.0) as client:
            session = await client.attach(self.layout, engine_id="bench-lanes")
            start = time.perf_counter()
            done = 0

            async def lane() -> None:
                nonlocal done
                while time.perf_counter() < start + seconds:
                    found = await session.lookup(self.prompt, lease=lease)
                    await found.release()
                    self._check(found.states)
                    done += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(lanes):
                    group.create_task(lane())
            return done / (time.perf_counter() - start)

    def store(self, times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            self.stores += 1
            self.last = chain_of(BATCH, b"store %d" % self.stores)
            seconds.append(lines.timed(self._store))
        return seconds

    def load(self, times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            self.target[:] = 0
            seconds.append(lines.timed(self._load))
            if not np.array_equal(self.source, self.target):
                raise RuntimeError("a load brought other bytes than were stored")
        return seconds

    def wipe(self) -> None:
        """Forget what was stored; the prompt stays."""
        for number in range(1, self.stores + 1):
            self.session.evict(chain_of(BATCH, b"store %d" % number)[0])
        self.stores = 0

    def close(self) -> None:
        self.stack.close()

    def _store(self) -> None:
        job = self.session.prepare_store(*self.last)
        for number, view in enumerate(job.views()):
            np.frombuffer(view, np.uint8).reshape(self.shape)[:] = self.source[:, :, number]
        self._commit(job)

    def _load(self) -> None:
        got = self.session.load(self.last[0])
        for number, view in enumerate(got.views()):
            self.target[:, :, number] = np.frombuffer(view, np.uint8).reshape(self.shape)
        got.release(wait=False)  # as the engine's connector does

    @staticmethod
    def _commit(job) -> None:  # type: ignore[no-untyped-def]
        if len(job.commit()) != len(job.keys):
            raise RuntimeError("the daemon refused blocks")

    def _check(self, states) -> None:  # type: ignore[no-untyped-def]
        if states.count(KeyState.HIT) != len(self.prompt):
            raise RuntimeError("the prompt was not found whole")


if __name__ == "__main__":
    lines.serve(Daemon())

"""kvtierd's filesystem tier: its mover over its backend, as the daemon drives them, with checksums."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import lines  # first: it takes standard output
import uvloop

from kvtierd.cli import bench_tiers
from kvtierd.cli.bench_copies import Arena
from kvtierd.config.schema import FsTier


class Files:
    def open(
        self, folder: str, block_bytes: int, count: int, threads: int, direct: bool, memory: str
    ) -> None:
        io = "direct" if direct else "buffered"
        tier = FsTier(
            name="fs", path=Path(folder), max_bytes="unlimited", io=io, readers=threads, writers=threads
        )
        self.loop = uvloop.new_event_loop()
        self.stack = AsyncExitStack()
        self.arena = Arena(block_bytes, count, memory)
        self.bench = self._run(self.stack.enter_async_context(bench_tiers.opened(tier, self.arena)))

    def store(self) -> tuple[float, float]:
        return lines.cost(lambda: self._run(self.bench.store()))

    def load(self) -> tuple[float, float]:
        return lines.cost(lambda: self._run(self.bench.load()))

    def wrong(self) -> int:
        return self.arena.wrong()

    def wipe(self) -> None:
        self._run(self.bench.delete())

    def close(self) -> None:
        self._run(self.stack.aclose())
        self.loop.close()

    def _run(self, coroutine):  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(coroutine)


if __name__ == "__main__":
    asyncio.set_event_loop(None)
    lines.serve(Files())

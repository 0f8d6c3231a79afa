"""``kvtierd bench clients``: lookups of 16 keys by more and more engines at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from kvtierd.cli.bench_echo import percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.bench_rpc import BLOCK_BYTES, LAYOUT, chain_of
from kvtierd.client import AsyncClient, AsyncSession, BlockKey, Client
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

KEYS = 16


def measure(*, counts: Sequence[int], seconds: float) -> list[Figure]:
    """Measure with so many engines, each with one lookup on its way; ``seconds`` in all."""
    keys, metas = chain_of(KEYS, b"kvtierd bench clients")
    with short_folder("bench") as folder:
        pool = max(8 << 20, 4 * KEYS * BLOCK_BYTES)
        with (
            LocalDaemon(folder, pool_bytes=pool, disk_bytes=64 << 20) as daemon,
            Client(daemon.socket, deadline=5.0) as client,
        ):
            session = client.attach(LAYOUT, engine_id="bench-store")
            session.prepare_store(keys, metas).commit()
            found = [asyncio.run(_ask(daemon.socket, count, seconds / len(counts), keys)) for count in counts]
    figures = []
    for count, (times, rate) in zip(counts, found, strict=True):
        first = found[0]
        figures += [
            Figure(f"{count} engines: lookups", rate, "/s", first[1], more_is_better=True),
            Figure(f"{count} engines: p50", percentile(times, 0.5), "us", percentile(first[0], 0.5)),
            Figure(f"{count} engines: p99", percentile(times, 0.99), "us", percentile(first[0], 0.99)),
        ]
    return figures


async def _ask(path: str, count: int, seconds: float, keys: Sequence[BlockKey]) -> tuple[list[float], float]:
    times: list[float] = []
    clock = time.perf_counter

    async def engine(session: AsyncSession, end: float) -> None:
        before = clock()
        while before < end:
            found = await session.lookup(keys)
            assert found.prefix == len(keys), found.reason
            after = clock()
            times.append(after - before)
            before = after

    async with AsyncClient(path, deadline=5.0) as client:
        sessions = [await client.attach(LAYOUT, engine_id=f"bench-{n}") for n in range(count)]
        began = clock()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(engine(session, began + seconds))
        return times, len(times) / (clock() - began)

"""The measurement behind ``kvtierd bench tiers``: a tier beside memcpy, files or a raw client, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kvtierd.cli import bench_copies as copies
from kvtierd.cli.bench_copies import Arena, RawClient, Timing, timed
from kvtierd.config.schema import FsTier, ObjectTier, StorageTier
from kvtierd.core.effects import BlockAt, Delete, Read, Write
from kvtierd.core.model import Block, BlockId, block_key
from kvtierd.core.stimuli import Finished, Status
from kvtierd.edges.backends.base import Backend
from kvtierd.edges.backends.factory import make_backend
from kvtierd.edges.movers import Mover
from kvtierd.errors import ConfigError, KvtierdError, TierError

NAMESPACE = hashlib.sha256(b"kvtierd bench").hexdigest()[:32]
WRITE_BATCH = 64
"""Blocks of one write, as the daemon's cascade makes them: one write at a time."""

GB = 1e9
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure: ``total_bytes`` of blocks in each of ``rounds``; ``cold``: also past the cache."""

    block_bytes: tuple[int, ...]
    total_bytes: int
    rounds: int
    cold: bool
    io: Literal["auto", "direct", "buffered"] = "auto"


@dataclass
class Result:
    """The timings of one block size on one place, by the name of what was done, in order."""

    place: str
    block_bytes: int
    count: int
    readers: int
    writers: int
    timings: dict[str, list[Timing]] = field(default_factory=dict)

    def list_of(self, name: str) -> list[Timing]:
        """Return the timings of one thing."""
        return self.timings.setdefault(name, [])

    def rate(self, name: str) -> float:
        """Return GB/s, the median of the rounds."""
        seconds = statistics.median(one.seconds for one in self.timings[name])
        return self.block_bytes * self.count / GB / seconds

    def cpu(self, name: str) -> float:
        """Return processor seconds per GiB, the median of the rounds."""
        seconds = statistics.median(one.cpu_seconds for one in self.timings[name])
        return seconds / (self.block_bytes * self.count / GIB)

    def checksum_share(self, name: str) -> float:
        """Return the part of the processor time of a store or load that is the checksum's."""
        return self.cpu("checksum") / max(self.cpu(name), 1e-9)


class Bench:
    """A mover over one opened backend, driven as the daemon's core does."""

    def __init__(self, tier: StorageTier, backend: Backend, arena: Arena) -> None:
        self._arena = arena
        self._name = tier.name
        self._waiting: dict[int, asyncio.Future[Finished]] = {}
        self._op = 0
        self.mover = Mover(
            tier.name,
            backend,
            arena.view,
            lambda finished: self._waiting.pop(finished.op).set_result(finished),
            asyncio.get_running_loop(),
            stalled=lambda op: None,
            probed=lambda probed: None,
            readers=tier.readers,
            writers=tier.writers,
            deadline=tier.deadline,
        )
        self._blocks = [
            Block(BlockId(NAMESPACE, block_key(hashlib.sha256(b"%d" % i).digest())), arena.block_bytes)
            for i in range(arena.count)
        ]

    async def store(self) -> None:
        """Store all blocks."""
        for start in range(0, self._arena.count, WRITE_BATCH):
            numbers = range(start, min(start + WRITE_BATCH, self._arena.count))
            blocks = tuple(BlockAt(self._blocks[i], self._arena.source(i)) for i in numbers)
            await self._ask(lambda op, blocks=blocks: Write(op, self._name, blocks))  # type: ignore[misc]

    async def load(self) -> None:
        """Load all blocks."""
        blocks = [BlockAt(self._blocks[i], self._arena.target(i)) for i in range(self._arena.count)]
        parts = [tuple(blocks[i : i + WRITE_BATCH]) for i in range(0, len(blocks), WRITE_BATCH)]
        await asyncio.gather(
            *(self._ask(lambda op, part=part: Read(op, self._name, part)) for part in parts)  # type: ignore[misc]
        )

    async def delete(self) -> None:
        """Delete all blocks."""
        ids = tuple(block.id for block in self._blocks)
        await self._ask(lambda op: Delete(op, self._name, ids))

    async def _ask(self, effect: Callable[[int], Write | Read | Delete]) -> None:
        self._op += 1
        done = self._waiting[self._op] = asyncio.get_running_loop().create_future()
        self.mover.submit(effect(self._op))
        finished = await done
        for outcome in finished.outcomes:
            if outcome.status is not Status.OK:
                raise TierError(self._name, f"a block was not moved: {outcome.status.value} {outcome.reason}")


def measure_folder(path: Path, settings: Settings) -> list[Result]:
    """Measure a filesystem tier in a folder of its own below ``path``, which is removed at the end.

    Raises:
        TierError: the folder cannot be used.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvtierd-bench-", dir=path))
    except OSError as error:
        raise TierError("bench", f"cannot use {path}: {error.strerror}") from None
    try:
        free = shutil.disk_usage(folder).free
        if free < 4 * settings.total_bytes:
            raise TierError("bench", f"{path} has {free} bytes free; needs {4 * settings.total_bytes}")
        tier = FsTier(name="bench", path=folder / "tier", max_bytes="unlimited", io=settings.io)
        place = f"{path} ({filesystem_of(folder)}, io {settings.io})"
        return [_run(_folder_rounds(tier, folder, place, size, settings)) for size in settings.block_bytes]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def object_tier(url: str, endpoint: str | None, region: str | None) -> ObjectTier:
    """Return an object tier with the settings of a command line; credentials come from the environment.

    Raises:
        ConfigError: they cannot be.
    """
    given = {"name": "bench", "type": "object", "url": url, "endpoint": endpoint, "region": region}
    try:
        return ObjectTier.model_validate(given)
    except ValidationError as failure:
        problems = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in failure.errors()]
        raise ConfigError("; ".join(problems)) from None


def measure_store(tier: ObjectTier, settings: Settings) -> list[Result]:
    """Measure an object tier under a prefix of its own; its objects are deleted at the end."""
    own = tier.model_copy(update={"url": f"{tier.url.rstrip('/')}/kvtierd-bench-{secrets.token_hex(4)}"})
    return [_run(_store_rounds(own, size, settings)) for size in settings.block_bytes]


def _run(coroutine: Any) -> Result:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result: Result = runner.run(coroutine)
        return result


@contextlib.asynccontextmanager
async def _bench(tier: StorageTier, arena: Arena) -> AsyncIterator[Bench]:
    backend = make_backend(tier)
    backend.open()
    bench = Bench(tier, backend, arena)
    try:
        yield bench
    finally:
        if await bench.mover.close(tier.deadline):
            backend.close()


async def _folder_rounds(
    tier: FsTier, folder: Path, place: str, block_bytes: int, settings: Settings
) -> Result:
    count = max(1, settings.total_bytes // block_bytes)
    result = Result(place, block_bytes, count, tier.readers, tier.writers)
    plain = folder / "plain"
    with Arena(block_bytes, count) as arena:
        async with _bench(tier, arena) as bench:
            for _ in range(settings.rounds):
                _memory(result, arena)
                with timed(result.list_of("plain write")):
                    copies.plain_write(arena, plain)
                with timed(result.list_of("store")):
                    await bench.store()
                with timed(result.list_of("plain read")):
                    copies.plain_read(arena, plain)
                _check(arena)
                with timed(result.list_of("load")):
                    await bench.load()
                _check(arena)
                copies.fill_caches(tier.path)
                with timed(result.list_of("load, cached")):
                    await bench.load()
                _check(arena)
                if settings.cold:
                    await _cold(result, arena, bench, folder, plain)
                await bench.delete()
                plain.unlink()
    return result


async def _cold(result: Result, arena: Arena, bench: Bench, folder: Path, plain: Path) -> None:
    copies.drop_caches(folder)
    with timed(result.list_of("plain read, cold")):
        copies.plain_read(arena, plain)
    _check(arena)
    with timed(result.list_of("load, cold")):
        await bench.load()
    _check(arena)


async def _store_rounds(tier: ObjectTier, block_bytes: int, settings: Settings) -> Result:
    from kvtierd.edges.backends.object_store import connect, require_obstore

    count = max(1, settings.total_bytes // block_bytes)
    result = Result(tier.url, block_bytes, count, tier.readers, tier.writers)
    prefix = tier.url.rpartition("/")[2]
    raw = RawClient(require_obstore(tier.name), connect(tier), f"{prefix}-raw")
    with Arena(block_bytes, count) as arena:
        async with _bench(tier, arena) as bench:
            for _ in range(settings.rounds):
                _memory(result, arena)
                try:
                    await _store_round(result, arena, bench, raw)
                finally:
                    await bench.delete()
                    raw.delete(arena)
    return result


async def _store_round(result: Result, arena: Arena, bench: Bench, raw: RawClient) -> None:
    with timed(result.list_of("raw put")):
        raw.put(arena, result.writers)
    with timed(result.list_of("store")):
        await bench.store()
    with timed(result.list_of("raw get")):
        raw.get(arena, result.readers)
    _check(arena)
    with timed(result.list_of("load")):
        await bench.load()
    _check(arena)


def _memory(result: Result, arena: Arena) -> None:
    with timed(result.list_of("memcpy")):
        copies.memcpy(arena)
    _check(arena)
    with timed(result.list_of("checksum")):
        copies.checksum(arena)


def _check(arena: Arena) -> None:
    if wrong := arena.wrong():
        raise KvtierdError(f"{wrong} blocks came back with other bytes")


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that a path is on, as the kernel names it."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, point, name, *_ = line.split(" ")
        inside = os.path.commonpath([point, str(path.resolve())]) == point
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind


def as_json(results: list[Result]) -> str:
    """Return one JSON object with every figure and all rounds."""
    return json.dumps(
        [
            {
                "place": result.place,
                "block_bytes": result.block_bytes,
                "blocks": result.count,
                "readers": result.readers,
                "writers": result.writers,
                "figures": {
                    name: {
                        "gb_per_second": round(result.rate(name), 3),
                        "cpu_seconds_per_gib": round(result.cpu(name), 3),
                        "seconds": [round(one.seconds, 4) for one in timings],
                    }
                    for name, timings in result.timings.items()
                },
                "checksum_share": {name: round(result.checksum_share(name), 3) for name in ("store", "load")},
            }
            for result in results
        ]
    )


def report(results: list[Result]) -> Iterator[str]:
    """Yield the lines of a table for each block size."""
    from kvtierd.config.units import format_size

    for result in results:
        blocks = f"{result.count} blocks of {format_size(result.block_bytes)}"
        rounds = len(result.timings["store"])
        yield f"{result.place}: {blocks}, {result.writers} writers, {result.readers} readers, {rounds} rounds"
        yield f"  {'':<18}{'GB/s':>8}{'CPU-s/GiB':>12}{'of it checksum':>17}"
        for name in result.timings:
            share = f"{result.checksum_share(name):.0%}" if name == "store" or name.startswith("load") else ""
            yield f"  {name:<18}{result.rate(name):>8.2f}{result.cpu(name):>12.2f}{share:>17}".rstrip()

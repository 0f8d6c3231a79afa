"""The measurement behind ``kvtierd bench tiers``: a tier beside memcpy, files or a raw client, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kvtierd.cli import bench_copies as copies
from kvtierd.cli.bench_copies import Arena, RawClient, Timing, timed
from kvtierd.cli.bench_plain import PlainFiles
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
    """What to measure: ``total_bytes`` of blocks in each of ``rounds``; ``cold``: also past the cache.

    ``depths``: numbers of readers, and of writers, each measured; none: as many as a tier has by default.
    """

    block_bytes: tuple[int, ...]
    total_bytes: int
    rounds: int
    cold: bool
    io: Literal["auto", "direct", "buffered"] = "auto"
    depths: tuple[int, ...] = ()

    def cases(self, tier: StorageTier) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield each block size with the settings of a tier that it is measured with."""
        for block_bytes in self.block_bytes:
            for depth in self.depths or (None,):
                workers = {"readers": tier.readers, "writers": tier.writers}
                yield block_bytes, workers if depth is None else dict.fromkeys(workers, depth)


@dataclass
class Result:
    """The timings of one block size on one place, by the name of what was done, in order."""

    place: str
    block_bytes: int
    count: int
    readers: int
    writers: int
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    """How plain files pass the page cache, by the name of what was done: as the tier's do."""

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
            Block.of(BlockId(NAMESPACE, block_key(hashlib.sha256(b"%d" % i).digest())), arena.block_bytes)
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
        folder = Path(tempfile.mkdtemp(prefix="kvtierd-bench-", dir=path.resolve()))
    except OSError as error:
        raise TierError("bench", f"cannot use {path}: {error.strerror}") from None
    try:
        free = shutil.disk_usage(folder).free
        needed = (settings.rounds + 3) * settings.total_bytes
        if free < needed:
            raise TierError("bench", f"{path} has {free} bytes free; needs {needed}")
        tier = FsTier(name="bench", path=folder / "tier", max_bytes="unlimited", io=settings.io)
        place = f"{path} ({filesystem_of(folder)}, io {settings.io})"
        return [
            _run(_folder_rounds(tier.model_copy(update=workers), folder, place, size, settings))
            for size, workers in settings.cases(tier)
        ]
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
    return [
        _run(_store_rounds(own.model_copy(update=workers), size, settings))
        for size, workers in settings.cases(own)
    ]


def _run(coroutine: Any) -> Result:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result: Result = runner.run(coroutine)
        return result


@contextlib.asynccontextmanager
async def opened(tier: StorageTier, arena: Arena) -> AsyncIterator[Bench]:
    """Give a tier's bench, whose blocks are those of the arena; closed at the end."""
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
    with Arena(block_bytes, count) as arena, tempfile.TemporaryDirectory(dir=folder) as own:
        plain = PlainFiles(tier, Path(own), arena)
        async with opened(tier, arena) as bench:
            pair = _Pair(result, arena, bench, plain, folder)
            for number in range(settings.rounds):
                await pair.round(plain_first=number % 2 == 0, cold=settings.cold)
    return result


@dataclass(frozen=True)
class _Pair:
    """A filesystem tier and plain files in one folder, measured in turns; what they wrote is on the disk."""

    result: Result
    arena: Arena
    bench: Bench
    plain: PlainFiles
    folder: Path

    async def round(self, *, plain_first: bool, cold: bool) -> None:
        """Store and load all blocks once in each way; who goes first changes, as the disk remembers."""
        _memory(self.result, self.arena)
        policy = self.plain.write_policy
        self.result.policies |= {"plain write": policy, "plain read": self.plain.read_policy(cold=False)}
        await _in_turn(plain_first, self._plain_write, self._store)
        copies.fill_caches(self.folder)
        await _in_turn(
            plain_first,
            lambda: self._plain_read("plain read", cold=False),
            lambda: self._load("load, cached"),
        )
        if cold:
            self.result.policies["plain read, cold"] = self.plain.read_policy(cold=True)
            copies.drop_caches(self.folder)
            await _in_turn(
                plain_first,
                lambda: self._plain_read("plain read, cold", cold=True),
                lambda: self._load("load, cold"),
            )
        await self.bench.delete()

    async def _plain_write(self) -> None:
        with timed(self.result.list_of("plain write")):
            self.plain.write()
        copies.drop_caches(self.folder)  # or its write-back would run beside what is measured next

    async def _store(self) -> None:
        with timed(self.result.list_of("store")):
            await self.bench.store()
        await self._load("load")
        copies.drop_caches(self.folder)

    async def _plain_read(self, name: str, *, cold: bool) -> None:
        with timed(self.result.list_of(name)):
            self.plain.read(cold=cold)
        _check(self.arena)

    async def _load(self, name: str) -> None:
        with timed(self.result.list_of(name)):
            await self.bench.load()
        _check(self.arena)


async def _in_turn(in_order: bool, *acts: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for act in acts if in_order else reversed(acts):
        await act()


async def _store_rounds(tier: ObjectTier, block_bytes: int, settings: Settings) -> Result:
    from kvtierd.edges.backends.object_store import connect, require_obstore

    count = max(1, settings.total_bytes // block_bytes)
    result = Result(tier.url, block_bytes, count, tier.readers, tier.writers)
    prefix = tier.url.rpartition("/")[2]
    raw = RawClient(require_obstore(tier.name), connect(tier), f"{prefix}-raw")
    with Arena(block_bytes, count) as arena:
        async with opened(tier, arena) as bench:
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

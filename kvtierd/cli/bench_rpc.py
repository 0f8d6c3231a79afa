"""The measurement behind ``kvtierd bench rpc``: verbs of the blocking client beside bare echoes, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtierd.cli.bench_echo import echo, in_turns, percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.client import AsyncClient, BlockKey, BlockMeta, Client, Group, KeyState, Layout, Scope, Session
from kvtierd.core.effects import LookedUp
from kvtierd.core.stimuli import Lookup
from kvtierd.errors import Unavailable
from kvtierd.testing.cores import Places, on_cores, places
from kvtierd.testing.local_daemon import LocalDaemon, short_folder
from kvtierd.testing.workload import Chain
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import encode

PIPELINE = 64
POOL_ONLY = Scope(store_to=())
"""The disk tier of the daemon would have the processor otherwise."""
BLOCK_BYTES = 4096
LAYOUT = Layout(
    model="kvtierd-bench",
    dtype="uint8",
    layout="none",
    groups=(Group(tokens_per_block=16, block_bytes=BLOCK_BYTES),),
)


def measure(
    *, socket_path: str | None, counts: Sequence[int], seconds: float, together: bool = False
) -> list[Figure]:
    """Measure against the daemon at ``socket_path`` (misses only), or one of our own; ``seconds`` in all.

    Daemon and echo run on other cores than the client, or all on one with ``together``. A daemon that is
    there already stays where it is.

    Raises:
        Unavailable: no daemon answers.
    """
    share, at = seconds / len(counts), places(together=together)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(short_folder("bench"))
        if socket_path is None:
            pool = max(8 << 20, 6 * max(counts) * BLOCK_BYTES)
            with on_cores(at.servers):
                daemon = stack.enter_context(LocalDaemon(folder, pool_bytes=pool, disk_bytes=64 << 20))
        stack.enter_context(on_cores(at.client))
        if socket_path is not None:
            return [f for n in counts for f in _misses(socket_path, folder, n, share, at)]
        return [f for n in counts for f in _verbs(daemon.socket, folder, n, share, at)]


def chain_of(count: int, seed: bytes) -> tuple[list[BlockKey], list[BlockMeta]]:
    """Return the keys and metadata of one prompt of so many blocks."""
    chain = Chain(16, seed)
    chain.extend(list(range(16 * count)))
    return [block.key for block in chain.blocks], [block.meta for block in chain.blocks]


@contextlib.contextmanager
def _session(path: str) -> Iterator[Session]:
    with Client(path, deadline=5.0) as client:
        client.status()  # says so if no daemon is there; a lookup would be a miss
        session = client.attach(LAYOUT, engine_id="bench")
        yield session
        if (last := session.lookup([])).reason or session.epoch != 1:
            raise Unavailable(f"the daemon went away while it was measured ({last.reason or 'reconnected'})")


@contextlib.contextmanager
def _echo_of(folder: Path, keys: list[BlockKey], state: KeyState, at: Places) -> Iterator[Callable[[], None]]:
    answer = LookedUp(id=1 << 16, found=bytes((state,)) * len(keys), prefix=len(keys) if state else 0)
    asked = len(frame(encode(Lookup(id=1 << 16, keys=tuple(keys)))))
    with contextlib.ExitStack() as stack:
        with on_cores(at.servers):
            bare = echo(str(folder / f"echo-{len(keys)}.sock"), asked, len(frame(encode(answer))))
            call = stack.enter_context(bare)
        yield call


def _misses(path: str, folder: Path, count: int, seconds: float, at: Places) -> list[Figure]:
    keys, _ = chain_of(count, b"kvtierd bench %d" % count)
    with _session(path) as session, _echo_of(folder, keys, KeyState.MISS, at) as bare:
        times = in_turns({"lookup": lambda: session.lookup(keys), "echo": bare}, seconds)
    return _trips(f"lookup of {count} missing keys", times["lookup"], times["echo"])


def _trips(name: str, ours: list[float], bare: list[float]) -> list[Figure]:
    return [
        Figure(f"{name}, p{share * 100:g}", percentile(ours, share), "us", percentile(bare, share))
        for share in (0.5, 0.99)
    ]


def _verbs(path: str, folder: Path, count: int, seconds: float, at: Places) -> list[Figure]:
    keys, metas = chain_of(count, b"kvtierd bench %d" % count)
    with _session(path) as session, _echo_of(folder, keys, KeyState.HIT, at) as bare:
        if len(session.prepare_store(keys, metas, POOL_ONLY).commit()) != count:
            raise AssertionError("a daemon with room refused blocks")
        calls: dict[str, Callable[[], object]] = {
            "lookup": lambda: session.lookup(keys),
            "echo": bare,
            "load": lambda: session.load(keys).release(),
            "store": _storing(session, count),
        }
        times = in_turns(calls, 0.8 * seconds)
    figures = _trips(f"lookup of {count} resident keys", times["lookup"], times["echo"])
    for verb, what in (("load", "load and release"), ("store", "prepare, commit and evict")):
        median = percentile(times[verb], 0.5)
        figures.append(Figure(f"{what} of {count}, p50", median, "us", percentile(times["echo"], 0.5)))
    rate = asyncio.run(_pipelined(path, keys, 0.2 * seconds))
    figures.append(Figure(f"keys looked up, {count} a message", rate * count, "/s", more_is_better=True))
    return figures


def _storing(session: Session, count: int) -> Callable[[], None]:
    """Return a call that stores a new chain without copying a byte, and evicts it."""
    keys, metas = chain_of(count, b"kvtierd bench store %d" % count)

    def run() -> None:
        session.prepare_store(keys, metas, POOL_ONLY).commit()
        session.evict(keys)

    return run


async def _pipelined(path: str, keys: list[BlockKey], seconds: float) -> float:
    """Return lookups a second with ``PIPELINE`` of them in flight on one connection."""
    async with AsyncClient(path, deadline=5.0) as client:
        session = await client.attach(LAYOUT, engine_id="bench-pipelined")
        clock = time.perf_counter
        start = clock()
        counts = [0] * PIPELINE

        async def ask(lane: int) -> None:
            while clock() < start + seconds:
                await session.lookup(keys)
                counts[lane] += 1

        async with asyncio.TaskGroup() as group:
            for lane in range(PIPELINE):
                group.create_task(ask(lane))
        return sum(counts) / (clock() - start)

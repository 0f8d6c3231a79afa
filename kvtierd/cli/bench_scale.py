"""``kvtierd bench scale``: what the core costs with more and more blocks; each size in its own process.

Requests come through the wire's door, so that blocks weigh what they weigh in a daemon. Events go into the
stream's books only where those are measured.
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

from kvtierd.cli.bench_echo import percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.serve import tame_collector
from kvtierd.core.effects import Prepared
from kvtierd.core.geometry import UNIT
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import BlockKey, BlockMeta, Group, Layout, Medium, block_key
from kvtierd.core.policies import Auto
from kvtierd.core.stimuli import Asked, Attach, Commit, Lookup, PrepareStore
from kvtierd.core.tier import TierSpec
from kvtierd.testing.books import Books
from kvtierd.wire.messages import decode_client, encode

CHAIN = 64
"""Blocks in a prompt, and in a store."""
LOOKUP = 1024
TOKENS = 16
ROUNDS = 200
WAITS = 1000
_LAYOUT = Layout(
    model="kvtierd-bench-scale",
    dtype="uint8",
    layout="none",
    groups=(Group(tokens_per_block=16, block_bytes=UNIT),),
)


def measure(sizes: Sequence[int]) -> list[Figure]:
    """Measure with so many resident blocks; the smallest size is the bare one of the others.

    But for some: a lookup is also beside a bare dictionary of as many keys, whose time grows with the misses
    of the processor's caches; the longest garbage collection, with the stream's books, is beside one of
    everything, which the daemon avoids; the memory with those books includes the core's; a token is that of
    blocks with token ids, beside blocks without; what blocks hold is what their objects take, and the rest of
    the memory is that of an allocator and of tables that grew.
    """
    found = [_in_a_child(size) for size in sizes]
    booked = [_in_a_child(size, "books") for size in sizes]
    figures = []
    for size, values, books in zip(sizes, found, booked, strict=True):
        for name, unit in (
            ("lookup, a key", "us"),
            ("store with eviction, a block", "us"),
            ("memory", "B/block"),
        ):
            figures.append(Figure(f"{size:,} blocks: {name}", values[name], unit, found[0][name]))
        lookup, bare = values["lookup, a key"], values["lookup, bare"]
        figures.append(Figure(f"{size:,} blocks: lookup beside a dictionary's", lookup, "us", bare))
        waits, pause = values["lookup of 16, p99.9"], books["longest collection"]
        figures.append(Figure(f"{size:,} blocks: lookup of 16, p99.9", waits, "us"))
        figures.append(Figure(f"{size:,} blocks: longest collection", pause, "us", books["full collection"]))
        both = f"{size:,} blocks: memory with the stream's books"
        figures.append(Figure(both, books["memory"], "B/block"))
    tokens = (_in_a_child(sizes[0], "tokens")["memory"] - found[0]["memory"]) / TOKENS
    held, with_ids = held_by_a_block(sizes[0]), held_by_a_block(sizes[0], tokens=True)
    return [
        *figures,
        Figure(f"{sizes[0]:,} blocks: memory of a token", tokens, "B"),
        Figure(f"{sizes[0]:,} blocks: a block holds", held, "B"),
        Figure(f"{sizes[0]:,} blocks: a token holds", (with_ids - held) / TOKENS, "B"),
    ]


def held_by_a_block(size: int, *, tokens: bool = False) -> float:
    """Return the bytes of all objects of so many resident blocks, a block: the same in each run."""
    core = _Core(size, tokens=tokens)
    core.store(core.prepare(0))
    gc.collect()
    tracemalloc.start(1)
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, size // CHAIN):
            core.store(core.prepare(number))
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / (CHAIN * max(1, core.made - 1))
    finally:
        tracemalloc.stop()


def _in_a_child(size: int, *more: str) -> dict[str, float]:
    command = [sys.executable, "-m", "kvtierd.cli.bench_scale", str(size), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own module
    values: dict[str, float] = json.loads(done.stdout)
    return values


class _Core:
    """A ladder without edges, filled with prompts of ``CHAIN`` blocks, whose events ``books`` may take."""

    def __init__(self, blocks: int, *, tokens: bool = False, books: Books | None = None) -> None:
        self._tokens = tokens
        self._books = books
        self.blocks = blocks
        self.ladder = Ladder(
            pool_id="bench",
            pool_bytes=blocks * UNIT,
            primary=TierSpec("cpu", Medium.CPU, policy=Auto),
            secondaries=(),
            job_ttl=60.0,
            lease_ttl=60.0,
        )
        attach = Attach(id=1, layout=_LAYOUT, engine_id="bench", process=b"bench")
        self.ladder.handle(Asked(1, attach), 0.0)
        self.made = 0

    @staticmethod
    def hashes(number: int) -> list[int]:
        """Return the event hashes of a prompt, as random as hashes are."""
        return [(number * CHAIN + i) * 0x9E3779B97F4A7C15 % (1 << 64) for i in range(CHAIN)]

    def keys(self, number: int) -> tuple[BlockKey, ...]:
        """Return the keys of a prompt."""
        return tuple(block_key(bytes(24) + one.to_bytes(8, "big")) for one in self.hashes(number))

    def prepare(self, number: int) -> PrepareStore:
        """Return the request to store a prompt, as it comes out of the wire's door."""
        hashes = self.hashes(number)
        metas = tuple(
            BlockMeta(
                hashes=(one,),
                parent=hashes[i - 1] if i else None,
                token_ids=tuple(range(one % 100_000, one % 100_000 + TOKENS)) if self._tokens else (),
                block_size=TOKENS,
            )
            for i, one in enumerate(hashes)
        )
        request = decode_client(encode(PrepareStore(id=2, keys=self.keys(number), meta=metas)))
        assert isinstance(request, PrepareStore)
        return request

    def store(self, request: PrepareStore) -> None:
        """Store one prompt; the oldest goes when the pool is full."""
        (answer,) = self.ladder.handle(Asked(1, request), 0.0)
        prepared = getattr(answer, "reply", None)
        assert isinstance(prepared, Prepared)
        commit = Commit(id=3, job=prepared.job, generation=prepared.generation, pool_id="bench")
        self.ladder.handle(Asked(1, commit), 0.0)
        events = self.ladder.take_events()
        if self._books is not None:
            self._books.tell(events)
        self.made += 1

    def lookup(self, keys: Sequence[BlockKey]) -> Asked:
        """Return a lookup."""
        return Asked(1, Lookup(id=4, keys=tuple(keys)))


def _one(size: int, *, tokens: bool, books: bool) -> dict[str, float]:
    core = _Core(size, tokens=tokens, books=Books(namespace=_LAYOUT.namespace()) if books else None)
    tame_collector()
    before = _rss()
    with _collections() as pauses:
        for number in range(size // CHAIN):
            core.store(core.prepare(number))
    memory = (_rss() - before) / size
    lookups, bare = [], []
    index = dict.fromkeys(key for number in range(core.made) for key in core.keys(number))
    for at in range(ROUNDS):  # nothing was evicted yet
        prompts = [(at * 7 + i) % core.made for i in range(LOOKUP // CHAIN)]
        keys = [key for number in prompts for key in core.keys(number)]
        bare.append(_seconds(lambda keys: list(map(index.get, keys)), keys) / LOOKUP)
        keys = [key for number in prompts for key in core.keys(number)]  # others, as they come off the wire
        lookups.append(_seconds(core.ladder.handle, core.lookup(keys), 0.0) / LOOKUP)
    stores = [_seconds(core.store, core.prepare(core.made)) / CHAIN for _ in range(ROUNDS)]
    waits = _longest_waits(core)
    gc.unfreeze()
    return {
        "lookup, a key": statistics.median(lookups) * 1e6,
        "lookup, bare": statistics.median(bare) * 1e6,
        "store with eviction, a block": statistics.median(stores) * 1e6,
        "memory": memory,
        "lookup of 16, p99.9": waits,
        "longest collection": max(pauses, default=0.0) * 1e6,
        "full collection": _seconds(gc.collect) * 1e6,
    }


def _longest_waits(core: _Core) -> float:
    """Return the p99.9 of a lookup of 16 keys between stores, in us of the processor.

    Its own time, since a machine that is busy with others would hide what a collection takes.
    """
    times = []
    for at in range(2 * WAITS):
        asked = core.lookup(core.keys(core.made - 1)[:16])
        times.append(_seconds(core.ladder.handle, asked, 0.0, clock=time.thread_time))
        if at % 4 == 0:
            core.store(core.prepare(core.made))
    return percentile(times, 0.999)


@contextlib.contextmanager
def _collections() -> Iterator[list[float]]:
    """Give the processor seconds of each collection of the body."""
    seconds: list[float] = []
    began = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            seconds.append(time.thread_time() - began)

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def _seconds(
    act: Callable[..., object], *arguments: object, clock: Callable[[], float] = time.perf_counter
) -> float:
    began = clock()
    act(*arguments)
    return clock() - began


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(_one(int(sys.argv[1]), tokens="tokens" in sys.argv, books="books" in sys.argv)))

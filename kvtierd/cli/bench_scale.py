"""``kvtierd bench scale``: what the core costs with more and more blocks; each size in its own process."""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from kvtierd.cli.bench_figures import Figure
from kvtierd.core.effects import Prepared
from kvtierd.core.geometry import UNIT
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import BlockKey, BlockMeta, Group, Layout, Medium, block_key
from kvtierd.core.stimuli import Asked, Attach, Commit, Lookup, PrepareStore
from kvtierd.core.tier import TierSpec

CHAIN = 64
"""Blocks in a prompt, and in a store."""
LOOKUP = 1024
_LAYOUT = Layout(
    model="kvtierd-bench-scale",
    dtype="uint8",
    layout="none",
    groups=(Group(tokens_per_block=16, block_bytes=UNIT),),
)


def measure(sizes: Sequence[int]) -> list[Figure]:
    """Measure with so many resident blocks; the smallest size is the bare one of the others."""
    found = [_in_a_child(size) for size in sizes]
    figures = []
    for size, values in zip(sizes, found, strict=True):
        for name, unit in (
            ("lookup, a key", "us"),
            ("store with eviction, a block", "us"),
            ("memory", "B/block"),
        ):
            figures.append(Figure(f"{size:,} blocks: {name}", values[name], unit, found[0][name]))
    return figures


def _in_a_child(size: int) -> dict[str, float]:
    command = [sys.executable, "-m", "kvtierd.cli.bench_scale", str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own module
    values: dict[str, float] = json.loads(done.stdout)
    return values


class _Core:
    """A ladder without edges, filled with prompts of ``CHAIN`` blocks."""

    def __init__(self, blocks: int) -> None:
        self.ladder = Ladder(
            pool_id="bench",
            pool_bytes=blocks * UNIT,
            primary=TierSpec("cpu", Medium.CPU),
            secondaries=(),
            job_ttl=60.0,
            lease_ttl=60.0,
        )
        attach = Attach(id=1, layout=_LAYOUT, engine_id="bench", process=b"bench")
        self.ladder.handle(Asked(1, attach), 0.0)
        self.made = 0

    @staticmethod
    def chain(number: int) -> tuple[tuple[BlockKey, ...], tuple[BlockMeta, ...]]:
        """Return a prompt's keys and metadata (without token ids), from numbers as random as hashes are."""
        hashes = [(number * CHAIN + i) * 0x9E3779B97F4A7C15 % (1 << 64) for i in range(CHAIN)]
        metas = tuple(
            BlockMeta(hashes=(one,), parent=hashes[i - 1] if i else None) for i, one in enumerate(hashes)
        )
        return tuple(block_key(bytes(24) + one.to_bytes(8, "big")) for one in hashes), metas

    def store(self, keys: tuple[BlockKey, ...], metas: tuple[BlockMeta, ...]) -> None:
        """Store one prompt; the oldest goes when the pool is full."""
        (answer,) = self.ladder.handle(Asked(1, PrepareStore(id=2, keys=keys, meta=metas)), 0.0)
        prepared = getattr(answer, "reply", None)
        assert isinstance(prepared, Prepared)
        commit = Commit(id=3, job=prepared.job, generation=prepared.generation, pool_id="bench")
        self.ladder.handle(Asked(1, commit), 0.0)
        self.ladder.take_events()
        self.made += 1


def _one(size: int) -> dict[str, float]:
    core = _Core(size)
    gc.collect()
    before = _rss()
    gc.freeze()
    for number in range(size // CHAIN):
        core.store(*core.chain(number))
    memory = (_rss() - before) / size
    lookups, stores = [], []
    for at in range(200):
        newest = [
            core.chain(core.made - 1 - (at * 7 + i) % (size // CHAIN))[0] for i in range(LOOKUP // CHAIN)
        ]
        asked = Asked(1, Lookup(id=4, keys=tuple(key for keys in newest for key in keys)))
        began = time.perf_counter()
        core.ladder.handle(asked, 0.0)
        lookups.append((time.perf_counter() - began) / LOOKUP)
        keys, metas = core.chain(core.made)
        began = time.perf_counter()
        core.store(keys, metas)
        stores.append((time.perf_counter() - began) / CHAIN)
    return {
        "lookup, a key": statistics.median(lookups) * 1e6,
        "store with eviction, a block": statistics.median(stores) * 1e6,
        "memory": memory,
    }


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(_one(int(sys.argv[1]))))

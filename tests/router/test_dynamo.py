"""NVIDIA Dynamo's own indexer, fed by a real daemon, knows which prefix is in which tier at every step.

Its answer is cumulative, in tokens: ``cpu`` is the prefix held by the CPU tier, ``disk`` that prefix extended
by blocks on disk.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtierd.client import BlockKey, Client, Group, Layout, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.local_daemon import LocalDaemon, is_idle, short_folder
from kvtierd.testing.workload import Chain, WorkBlock, payload

from .conftest import PATIENCE

pytestmark = [pytest.mark.router, pytest.mark.slow, pytest.mark.timeout(120)]

TOKENS = 16
BLOCK = 64 << 10
POOL_BLOCKS = 8
DISK_BLOCKS = 20
LAYOUT = Layout(
    model="m", dtype="uint8", layout="test", groups=(Group(tokens_per_block=TOKENS, block_bytes=BLOCK),)
)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    """A daemon with room for 8 blocks in the pool and for 20 on disk (headers go on top of the payload)."""
    disk_bytes = DISK_BLOCKS * (BLOCK + (8 << 10))
    with (
        short_folder("router") as folder,
        LocalDaemon(folder, pool_bytes=POOL_BLOCKS * BLOCK, disk_bytes=disk_bytes) as running,
    ):
        yield running


@contextlib.contextmanager
def attached(daemon: LocalDaemon) -> Iterator[Session]:
    with Client(daemon.socket, deadline=5.0) as client:
        yield client.attach(LAYOUT, engine_id="engine-0")


@pytest.fixture
def engine(daemon: LocalDaemon) -> Iterator[Session]:
    """A scheduler session on the daemon."""
    with attached(daemon) as session:
        yield session


def chain(seed: int, blocks: int) -> Chain:
    made = Chain(TOKENS, b"router test")
    made.extend(random.Random(seed).choices(range(32_000), k=blocks * TOKENS))
    return made


def keys(blocks: list[WorkBlock]) -> list[BlockKey]:
    return [block.key for block in blocks]


def store(session: Session, blocks: list[WorkBlock]) -> None:
    """Store blocks with real bytes and wait until they are on disk too, so that steps do not overlap."""
    job = session.prepare_store(keys(blocks), meta=[block.meta for block in blocks])
    assert list(job.keys) == keys(blocks)
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, BLOCK)
    assert list(job.commit()) == keys(blocks)
    wait_for(
        lambda: set(keys(blocks)) <= resident(session, "disk"), "the blocks to be on disk", timeout=PATIENCE
    )


def load(session: Session, blocks: list[WorkBlock]) -> list[str]:
    """Load blocks, check their bytes and return which tiers served them."""
    got = session.load(keys(blocks), deadline=5.0)
    try:
        assert list(got.keys) == keys(blocks)
        for key, view in zip(got.keys, got.views(), strict=True):
            assert bytes(view) == payload(key, BLOCK)
        return list(got.sources)
    finally:
        got.release()


def resident(session: Session, tier: str) -> set[BlockKey]:
    return {entry.key for entry in session.inventory(tier)}


def truth(session: Session, made: Chain) -> tuple[int, int]:
    """What the indexer ought to answer for a chain, from the daemon's own inventory."""
    in_cpu, on_disk = resident(session, "cpu"), resident(session, "disk")
    names = keys(made.blocks)
    cpu = next((i for i, key in enumerate(names) if key not in in_cpu), len(names))
    disk = next((i for i in range(cpu, len(names)) if names[i] not in on_disk), len(names))
    return cpu * TOKENS, disk * TOKENS


def follow(indexer: Any, daemon: LocalDaemon) -> Any:
    indexer.register(daemon.endpoint, daemon.replay, block_size=TOKENS)
    return indexer


def knows(indexer: Any, made: Chain, expected: tuple[int, int]) -> None:
    """Wait until the indexer gives this prefix in (cpu, disk)."""
    wait_for(
        lambda: indexer.query(made.tokens) == expected, f"the indexer to answer {expected}", timeout=PATIENCE
    )


def test_the_indexer_follows_stores_evictions_and_promotions(
    daemon: LocalDaemon, engine: Session, start_indexer: Callable[[], Any]
) -> None:
    indexer = follow(start_indexer(), daemon)
    first, second = chain(1, 6), chain(2, 6)
    store(engine, first.blocks)
    knows(indexer, first, (96, 96))

    store(engine, second.blocks)  # takes the four free-able leaves of the first one's six slots
    assert truth(engine, first) == (32, 96)
    knows(indexer, first, (32, 96))
    knows(indexer, second, (96, 96))

    assert load(engine, first.blocks) == ["cpu"] * 2 + ["disk"] * 4
    assert truth(engine, first) == (96, 96)
    knows(indexer, first, (96, 96))
    knows(indexer, second, (32, 96))

    engine.evict(keys(first.blocks[4:]), tiers=["disk"])
    knows(indexer, first, (96, 96))
    engine.evict(keys(first.blocks), tiers=["cpu"])
    assert truth(engine, first) == (0, 64)
    knows(indexer, first, (0, 64))

    engine.reset(["disk"])
    knows(indexer, first, (0, 0))
    knows(indexer, second, (32, 32))


def test_the_indexer_follows_a_full_disk_tier(
    daemon: LocalDaemon, engine: Session, start_indexer: Callable[[], Any]
) -> None:
    indexer = follow(start_indexer(), daemon)
    chains = [chain(seed, 6) for seed in range(10, 16)]
    for made in chains:
        store(engine, made.blocks)
    oldest, newest = truth(engine, chains[0]), truth(engine, chains[-1])
    assert oldest == (0, 0)
    assert newest == (96, 96)
    for made in chains:
        knows(indexer, made, truth(engine, made))


def test_a_late_indexer_catches_up_with_the_next_heartbeat(
    daemon: LocalDaemon, engine: Session, start_indexer: Callable[[], Any]
) -> None:
    early = follow(start_indexer(), daemon)
    first, second = chain(21, 6), chain(22, 6)
    store(engine, first.blocks)
    store(engine, second.blocks)
    engine.evict(keys(first.blocks[5:]), tiers=["disk"])

    late = follow(start_indexer(), daemon)
    for indexer in (early, late):
        knows(indexer, first, (32, 80))
        knows(indexer, second, (96, 96))


def test_the_indexer_follows_a_daemon_through_its_restart(
    daemon: LocalDaemon, start_indexer: Callable[[], Any]
) -> None:
    indexer = follow(start_indexer(), daemon)
    first, second = chain(31, 6), chain(32, 4)
    with attached(daemon) as session:
        store(session, first.blocks)
        knows(indexer, first, (96, 96))

    assert daemon.stop() == 0
    knows(indexer, first, (0, 96))
    daemon.start()
    with Client(daemon.socket, deadline=5.0) as client:  # it takes engines before the disk is indexed
        wait_for(lambda: is_idle(client.status()), "the disk to be indexed", timeout=PATIENCE)
    with attached(daemon) as session:
        assert truth(session, first) == (0, 96)
        knows(indexer, first, (0, 96))
        store(session, second.blocks)
        knows(indexer, second, (64, 64))
        assert load(session, first.blocks) == ["disk"] * 6
        knows(indexer, first, (96, 96))

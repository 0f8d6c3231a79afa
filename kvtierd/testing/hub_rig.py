"""An event hub in the test's own process, its sockets real: events to publish, and what readers end with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
import zmq

from kvtierd.config.audiences import Audience, Events
from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    block_key,
)
from kvtierd.edges.hub import EventHub
from kvtierd.testing.clock import until
from kvtierd.testing.consumer import ReferenceConsumer, Residency
from kvtierd.wire.kvevents import DecodedEvent, decode_batch
from kvtierd.wire.stream import END, encode_sequence

H = 0xF100000000000000
"""Event hash of block 0."""
TCP = "tcp://127.0.0.1:0"
DISK: dict[str, Any] = {"tier": "disk", "medium": Medium.STORAGE, "locality": Locality.LOCAL}
Reply = tuple[bytes, int, bytes]
"""Topic, number and payload."""


def event(
    number: int,
    kind: EventKind = EventKind.STORED,
    tier: str = "cpu",
    medium: Medium = Medium.CPU,
    locality: Locality | None = None,
    rank: int = 0,
) -> TierEvent:
    """Return the store of a block, whose parent is the one before it; chains begin at every hundred."""
    parent = H + number - 1 if number % 100 else None
    meta = BlockMeta(hashes=(H + number,), parent=parent, token_ids=(number, 2, 3, 4), block_size=4)
    block = Block.of(BlockId("ns", block_key(number.to_bytes(8, "big"))), 4096, meta, rank)
    return TierEvent(kind, tier, medium, locality, block)


def gone(number: int, **where: Any) -> TierEvent:
    """Return the removal of a block."""
    return event(number, EventKind.REMOVED, **where)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test on the daemon's event loop."""

    async def body() -> None:
        await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


def made(folder: Path, *audiences: dict[str, Any], **options: Any) -> EventHub:
    """Make a hub with audiences ``a0``, ``a1``... on free ports, not started; ``options``: of ``events``."""
    several = tuple(
        Audience.model_validate({"name": f"a{i}", "bind": TCP, "replay": TCP, **settings}, strict=False)
        for i, settings in enumerate(audiences)
    )
    settings = {"heartbeat": 0.0, "ring_batches": 1000, "ring_bytes": 1 << 30, "model": "m", **options}
    return EventHub(
        Events.model_construct(audiences=several, **settings),
        tiers={"cpu": "cpu", "disk": "fs", "lake": "object"},
        state_dir=folder,
        clock=time.time,
        environ={"POD_IP": "10.0.0.1"},
        endpoints_file=folder / "events.json",
    )


@asynccontextmanager
async def serving(folder: Path, *audiences: dict[str, Any], **options: Any) -> AsyncIterator[EventHub]:
    """Give a running hub."""
    hub = made(folder, *audiences, **options)
    hub.start(asyncio.get_running_loop())
    try:
        yield hub
    finally:
        await hub.close(2.0)


def of(hub: EventHub, index: int = 0) -> dict[str, Any]:
    """Return an audience's part of the status."""
    found: dict[str, Any] = hub.statistics()["audiences"][f"a{index}"]
    return found


async def replayed(endpoint: str, start: int = 0) -> list[Reply]:
    """Return all replies to one request, the end marker left out."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", encode_sequence(start)])
    replies: list[Reply] = []
    try:
        while True:
            await until(lambda: dealer.poll(0), "a reply")
            _, topic, number, payload = dealer.recv_multipart()
            if number == END:
                return replies
            replies.append((topic, int.from_bytes(number, "big"), payload))
    finally:
        context.destroy(linger=0)


async def events_of(hub: EventHub, index: int = 0, start: int = 0) -> list[DecodedEvent]:
    """Return the events of a replay."""
    replies = await replayed(of(hub, index)["replay"], start)
    return [told for _, _, payload in replies for told in decode_batch(payload).events]


async def folded(hub: EventHub, index: int = 0) -> set[Residency]:
    """Return what a reader that joins now ends with."""
    consumer = ReferenceConsumer()
    for _, _, payload in await replayed(of(hub, index)["replay"]):
        consumer.fold(decode_batch(payload))
    assert not consumer.counts["unknown_removals"]
    return consumer.resident

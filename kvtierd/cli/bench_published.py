"""How many blocks one core can publish: recorded, projected, numbered, encoded, kept and sent.

Batches go through the daemon's own announcer, journal and hub to a subscriber in another process; the
figure is blocks a second of processor time of all threads, libzmq's included, and in turns with it that of a
bare PUB socket which sends the same bytes. A process of its own, as the daemon is.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
import zmq

from kvtierd.cli.serve import tame_collector
from kvtierd.config.audiences import Audience, Events
from kvtierd.core.model import Medium
from kvtierd.edges.announcer import Announcer
from kvtierd.edges.hub import EventHub
from kvtierd.edges.journal import Journal
from kvtierd.testing.events_bench import stored, subscriber
from kvtierd.wire.announced import TierLabel
from kvtierd.wire.stream import encode_sequence

BLOCKS = 1024
"""Blocks in a row; others have their turn between."""
HWM = 1 << 20
WARM_UP = 0.2


def measure(batch: int, seconds: float) -> dict[str, float]:
    """Return blocks a second of one core in batches of so many, ours and a bare socket's, and their bytes."""
    command = [sys.executable, "-m", "kvtierd.cli.bench_published", str(batch), str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own module
    values: dict[str, float] = json.loads(done.stdout)
    return values


class _Cost:
    """Processor time of the whole process, without that of the body's own preparations."""

    def __init__(self) -> None:
        self.blocks = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        """Blocks a second of one core."""
        return self.blocks / self.seconds

    async def add(self, prepare: Callable[[], list[Any]], send: Callable[[Any], object]) -> None:
        """Prepare some batches, uncounted, and send them."""
        before, own = time.process_time(), time.thread_time()
        batches = prepare()
        prepared = time.thread_time() - own
        for batch in batches:
            send(batch)
        await asyncio.sleep(0)
        self.seconds += time.process_time() - before - prepared
        self.blocks += BLOCKS


async def _run(folder: Path, size: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    audience = {"name": "bench", "bind": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0", "hwm": HWM}
    hub = EventHub(
        Events.model_validate(
            {"audiences": (Audience.model_validate(audience, strict=False),), "model": "m"}
        ),
        tiers={"cpu": "cpu"},
        state_dir=folder,
        clock=time.time,
        environ={},
    )
    announcer = Announcer(hub, Journal(folder), [TierLabel("cpu", Medium.CPU, None)])
    announcer.load()
    hub.start(loop)
    announcer.start(loop)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bare = context.socket(zmq.PUB)
    bare.setsockopt(zmq.SNDHWM, HWM)
    bare.bind("tcp://127.0.0.1:0")
    number = 0

    def events() -> list[Any]:
        nonlocal number
        first, number = number, number + BLOCKS
        return [[stored(at + i) for i in range(size)] for at in range(first, number, size)]

    def publish(batch: list[Any]) -> None:
        announcer.publish(batch)

    def send_bare(frames: tuple[bytes, ...]) -> None:
        bare.send_multipart(frames, zmq.NOBLOCK)

    ours, plain = _Cost(), _Cost()
    endpoints = (hub.bound_endpoints()["bind"], bare.getsockopt_string(zmq.LAST_ENDPOINT))
    with subscriber(*endpoints):
        await asyncio.sleep(WARM_UP)
        await _Cost().add(events, publish)
        statistics = hub.statistics()
        weight = statistics["bytes"] // statistics["batches"]
        frames = (b"", encode_sequence(7), bytes(weight))
        while ours.seconds < seconds:
            await ours.add(events, publish)
            await plain.add(
                lambda: [frames] * (BLOCKS // size), lambda one: bare.send_multipart(one, zmq.NOBLOCK)
            )
    context.destroy(linger=0)
    announcer.finish()
    await hub.close(0.1)
    announcer.close(flushed=True)
    return {"blocks_per_second": ours.rate, "bare": plain.rate, "bytes_per_batch": weight}


if __name__ == "__main__":
    tame_collector()
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as at:
        print(json.dumps(uvloop.run(_run(Path(at), int(sys.argv[1]), float(sys.argv[2])))))

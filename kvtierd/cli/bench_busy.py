"""``kvtierd bench busy``: what an engine waits while pool and disk evict and a subscriber hangs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtierd.cli.bench_echo import echo, percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.bench_rpc import LAYOUT, POOL_ONLY, chain_of
from kvtierd.client import BlockKey as Key
from kvtierd.client import BlockMeta, Client, Group, KeyState, Layout, Session
from kvtierd.core.effects import LookedUp
from kvtierd.core.stimuli import Lookup
from kvtierd.errors import KvtierdError
from kvtierd.testing.clock import wait_for
from kvtierd.testing.events_bench import subscriber
from kvtierd.testing.local_daemon import LocalDaemon, short_folder
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import encode

KEYS = 16
BATCH = 16
"""Blocks of one store of the engine that makes the daemon busy."""
ROUNDS = 4
PAUSE = 0.001
"""Seconds between two calls: an engine asks once a step, it does not hammer."""
POOL_BLOCKS = 1024
DISK_BLOCKS = 2048
SETTLE_SECONDS = 30.0

Calls = dict[str, Callable[[], object]]
Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Load:
    """What keeps the daemon busy: so many stores a second of ``BATCH`` blocks of so many bytes."""

    block_bytes: int
    rate: int


def measure(*, load: Load, seconds: float) -> list[Figure]:
    """Measure verbs and a bare echo, in turns on an idle and on a busy daemon; ``seconds`` in all.

    Raises:
        KvtierdError: the daemon was not kept busy.
    """
    block = load.block_bytes
    tiers = {"tiers": [{"name": "cpu", "type": "cpu", "policy": "lru"}]}
    with short_folder("bench") as folder:
        tiers["tiers"].append(_disk(folder, DISK_BLOCKS * block))
        daemon = LocalDaemon(folder, pool_bytes=POOL_BLOCKS * block, disk_bytes=0, changes=tiers)
        with (
            daemon,
            subscriber(daemon.endpoint),
            subscriber(daemon.endpoint) as hanging,
            Client(daemon.socket, deadline=5.0) as client,
            _calls(client, folder) as calls,
            _Storing(daemon.socket, load) as storing,
        ):
            _fill(storing)
            hanging.stop_reading()
            idle, busy = _in_turns(client, calls, storing, seconds / ROUNDS / 2)
            _worked(client.status())
    return [
        *_figures(idle, busy),
        Figure("stores a second meanwhile", storing.rate, "/s", load.rate, more_is_better=True),
    ]


def _disk(folder: Path, max_bytes: int) -> dict[str, str]:
    return {"name": "disk", "type": "fs", "path": str(folder / "disk"), "max_bytes": f"{max_bytes >> 10}KiB"}


@contextlib.contextmanager
def _calls(client: Client, folder: Path) -> Iterator[Calls]:
    """Give what is timed: verbs with 16 keys, and a bare echo of a lookup's bytes."""
    session = client.attach(LAYOUT, engine_id="bench")
    keys, metas = chain_of(KEYS, b"kvtierd bench busy")
    other = chain_of(KEYS, b"kvtierd bench busy stores")
    answer = LookedUp(id=1 << 16, found=bytes((KeyState.HIT,)) * KEYS, prefix=KEYS)
    asked = len(frame(encode(Lookup(id=1 << 16, keys=tuple(keys)))))
    with echo(str(folder / "echo.sock"), asked, len(frame(encode(answer)))) as bare:
        yield {
            "lookup": lambda: _look(session, keys, metas),
            "load": lambda: session.load(keys).release(),
            "store": lambda: _store(session, *other),
            "bare echo": bare,
        }


def _look(session: Session, keys: list[Key], metas: list[BlockMeta]) -> None:
    """Look up blocks in use; they are gone only where all of the pool was replaced since the last time."""
    if session.lookup(keys).prefix != len(keys):
        session.prepare_store(keys, metas, POOL_ONLY).commit()


def _store(session: Session, keys: list[Key], metas: list[BlockMeta]) -> None:
    session.prepare_store(keys, metas, POOL_ONLY).commit()
    session.evict(keys)


class _Storing:
    """Another engine, in a process of its own, that stores new blocks for as long as it is told to."""

    def __init__(self, socket: str, load: Load) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "kvtierd.cli.bench_busy", socket, str(load.block_bytes), str(load.rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stores, self._seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Stores a second so far."""
        return self._stores / self._seconds if self._seconds else 0.0

    def begin(self, *, seconds: float, stores: int = 0) -> None:
        """Have it store for ``seconds``, or ``stores`` batches as fast as it goes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([seconds, stores]) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Wait until it has.

        Raises:
            KvtierdError: it ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvtierdError(f"the engine that stores ended with {self._process.wait(10)}")
        stores, seconds = json.loads(line)
        self._stores, self._seconds = self._stores + stores, self._seconds + seconds

    def forget(self) -> None:
        """Count from here."""
        self._stores, self._seconds = 0, 0.0

    def __enter__(self) -> _Storing:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


def _fill(storing: _Storing) -> None:
    """Fill the pool and the disk, so that each further store evicts from both."""
    storing.begin(seconds=SETTLE_SECONDS, stores=(POOL_BLOCKS + DISK_BLOCKS) // BATCH)
    storing.end()
    storing.forget()


def _in_turns(client: Client, calls: Calls, storing: _Storing, seconds: float) -> tuple[Times, Times]:
    idle: Times = {name: [] for name in calls}
    busy: Times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        wait_for(lambda: _settled(client.status()), "the writes to end", timeout=SETTLE_SECONDS)
        _time(calls, idle, seconds)
        storing.begin(seconds=seconds)
        _time(calls, busy, seconds)
        storing.end()
    return idle, busy


def _time(calls: Calls, into: Times, seconds: float) -> None:
    clock = time.perf_counter
    end = clock() + seconds
    while clock() < end:
        for name, call in calls.items():
            time.sleep(PAUSE)
            before = clock()
            call()
            into[name].append(clock() - before)


def _settled(status: dict[str, Any]) -> bool:
    return not any(tier.get("wanted") or tier.get("writing_bytes") for tier in status["tiers"])


def _worked(status: dict[str, Any]) -> None:
    """Make sure that it was what is claimed: the pool and the disk were full, and both gave blocks up."""
    for tier in status["tiers"]:
        if not tier["left"]["capacity"]:
            raise KvtierdError(f"tier {tier['name']} gave nothing up: raise --rate or --seconds")


def _figures(idle: Times, busy: Times) -> Iterator[Figure]:
    for name in idle:
        for share in (0.5, 0.99):
            value, bare = percentile(busy[name], share), percentile(idle[name], share)
            yield Figure(f"{name}, p{share * 100:g} beside idle", value, "us", bare)


def _serve(socket: str, block_bytes: int, rate: int) -> None:
    """Be the engine that stores; commands come as lines on standard input."""
    groups = (Group(tokens_per_block=16, block_bytes=block_bytes),)
    layout = Layout(model="kvtierd-bench-busy", dtype="uint8", layout="none", groups=groups)
    number = 0
    with Client(socket, deadline=5.0) as client:
        session = client.attach(layout, engine_id="bench-busy")
        for line in sys.stdin:
            seconds, stores = json.loads(line)
            start, done = time.monotonic(), 0
            while time.monotonic() < start + seconds and (not stores or done < stores):
                if not stores:
                    time.sleep(max(0.0, start + done / rate - time.monotonic()))
                session.prepare_store(*chain_of(BATCH, b"busy %d" % number)).commit()
                number, done = number + 1, done + 1
            print(json.dumps([done, time.monotonic() - start]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

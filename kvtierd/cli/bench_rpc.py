"""The measurement behind ``kvtierd bench rpc``: lookups and bare echoes, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtierd.client import AsyncClient, Client
from kvtierd.core.effects import LookedUp
from kvtierd.core.model import BlockKey, Group, KeyState, Layout
from kvtierd.core.stimuli import Lookup
from kvtierd.errors import Unavailable
from kvtierd.testing.local_daemon import LocalDaemon, short_folder
from kvtierd.testing.workload import Chain, payload
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import encode

ROUNDS = 10
PIPELINE = 64
BLOCK_BYTES = 4096
LAYOUT = Layout(
    model="kvtierd-bench",
    dtype="uint8",
    layout="none",
    groups=(Group(tokens_per_block=16, block_bytes=BLOCK_BYTES),),
)

# The smallest server there is: reads a request's bytes, writes an answer's, both of known length.
_ECHO = """
import socket, sys
path, asked, answered = sys.argv[1], int(sys.argv[2]), bytes(int(sys.argv[3]))
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
print("ready", flush=True)
peer, _ = server.accept()
buffer = bytearray(asked)
while True:
    got = 0
    while got < asked:
        count = peer.recv_into(memoryview(buffer)[got:])
        if not count:
            sys.exit()
        got += count
    peer.sendall(answered)
"""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Round trip times in microseconds."""

    p50_us: float
    p99_us: float
    count: int

    @classmethod
    def of(cls, times: list[float]) -> RoundTrip:
        """Summarise times in seconds."""
        times = sorted(times)
        at = [times[min(len(times) - 1, int(len(times) * share))] for share in (0.5, 0.99)]
        return cls(round(at[0] * 1e6, 1), round(at[1] * 1e6, 1), len(times))


@dataclass(frozen=True, slots=True)
class RpcResult:
    """What was measured. ``hits``: the keys were resident. ``pipelined_per_s`` has 64 lookups in flight."""

    keys: int
    hits: bool
    request_bytes: int
    answer_bytes: int
    lookup: RoundTrip
    echo: RoundTrip
    pipelined_per_s: float

    @property
    def ratio_p50(self) -> float:
        """How many bare echoes a lookup costs, by the medians."""
        return round(self.lookup.p50_us / self.echo.p50_us, 2)


def measure(*, socket_path: str | None, keys: int, seconds: float) -> RpcResult:
    """Measure against the daemon at ``socket_path``, or against one of our own.

    Raises:
        Unavailable: no daemon answers.
    """
    chain = Chain(1, b"kvtierd bench")
    chain.extend(list(range(keys)))
    names = [block.key for block in chain.blocks]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(short_folder("bench"))
        if socket_path is not None:
            return _measure(socket_path, folder, names, seconds, hits=False)
        pool_bytes = max(8 << 20, 4 * keys * BLOCK_BYTES)
        daemon = stack.enter_context(LocalDaemon(folder, pool_bytes=pool_bytes, disk_bytes=64 << 20))
        stack.enter_context(_resident(daemon.socket, names))
        return _measure(daemon.socket, folder, names, seconds, hits=True)


@contextlib.contextmanager
def _resident(path: str, keys: list[BlockKey]) -> Iterator[None]:
    """Store the keys; their session stays open, so that the layout keeps its room."""
    with Client(path, deadline=5.0) as client:
        session = client.attach(LAYOUT, engine_id="bench-store")
        for key in keys:
            if not session.put(key, payload(key, BLOCK_BYTES)):
                raise AssertionError("a daemon with room refused a block")
        yield


def _measure(path: str, folder: Path, keys: list[BlockKey], seconds: float, *, hits: bool) -> RpcResult:
    state = KeyState.HIT if hits else KeyState.MISS
    answer = LookedUp(id=1 << 16, states=(state,) * len(keys), prefix=len(keys) if hits else 0)
    asked = len(frame(encode(Lookup(id=1 << 16, keys=tuple(keys)))))
    answered = len(frame(encode(answer)))
    lookups: list[float] = []
    echoes: list[float] = []
    with (
        Client(path, deadline=5.0) as client,
        _echo_server(str(folder / "echo.sock"), asked, answered) as peer,
    ):
        client.status()  # says so if no daemon is there; a lookup would be a miss
        session = client.attach(LAYOUT, engine_id="bench")
        assert session.lookup(keys).prefix == answer.prefix
        request, buffer = bytes(asked), bytearray(answered)
        share = seconds / ROUNDS / 3
        for _ in range(ROUNDS):  # in turns, so that a busy moment of the machine hits both
            lookups += _time(lambda: session.lookup(keys), share)
            echoes += _time(lambda: _echo(peer, request, buffer), share)
        if (last := session.lookup(keys)).reason or session.epoch != 1:
            raise Unavailable(f"the daemon went away while it was measured ({last.reason or 'reconnected'})")
    rate = asyncio.run(_pipelined(path, keys, seconds / 3))
    return RpcResult(
        len(keys), hits, asked, answered, RoundTrip.of(lookups), RoundTrip.of(echoes), round(rate, 0)
    )


def _time(call: Callable[[], object], seconds: float) -> list[float]:
    times = []
    clock = time.perf_counter
    end = clock() + seconds
    before = clock()
    while before < end:
        call()
        after = clock()
        times.append(after - before)
        before = after
    return times


def _echo(peer: socket.socket, request: bytes, buffer: bytearray) -> None:
    peer.sendall(request)
    got = 0
    while got < len(buffer):
        got += peer.recv_into(memoryview(buffer)[got:])


@contextlib.contextmanager
def _echo_server(path: str, asked: int, answered: int) -> Iterator[socket.socket]:
    with subprocess.Popen(  # noqa: S603 - our own interpreter and the text above
        [sys.executable, "-c", _ECHO, path, str(asked), str(answered)], stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(5.0)
                peer.connect(path)
                yield peer
        finally:
            server.terminate()


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


def report(result: RpcResult, *, as_json: bool) -> str:
    """Return the result as JSON or as a small table."""
    if as_json:
        return json.dumps(asdict(result) | {"ratio_p50": result.ratio_p50})
    state = "resident" if result.hits else "missing"
    rows = [
        f"lookup of {result.keys} {state} keys: {result.request_bytes} B there, {result.answer_bytes} B back",
        f"{'':<12}{'p50':>10}{'p99':>12}{'count':>10}",
    ]
    for name, trip in (("lookup", result.lookup), ("bare echo", result.echo)):
        rows.append(f"{name:<12}{trip.p50_us:>7.1f} us{trip.p99_us:>9.1f} us{trip.count:>10}")
    rows.append(f"a lookup costs {result.ratio_p50:g} bare echoes (p50)")
    rows.append(f"pipelined: {result.pipelined_per_s:,.0f} lookups/s ({PIPELINE} in flight, one connection)")
    return "\n".join(rows)

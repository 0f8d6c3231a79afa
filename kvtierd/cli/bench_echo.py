"""The bare machine beside a daemon: a uvloop server that answers so many bytes with so many."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

_SERVER = """
import asyncio, sys, uvloop
path, asked, answer = sys.argv[1], int(sys.argv[2]), bytes(int(sys.argv[3]))
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.got = transport, 0
    def data_received(self, data):
        self.got += len(data)
        while self.got >= asked:
            self.got -= asked
            self.transport.write(answer)
async def main():
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    print("ready", flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


@contextlib.contextmanager
def echo(path: str, asked: int, answered: int) -> Iterator[Callable[[], None]]:
    """Run the server in a process of its own; gives one round trip of ``asked`` and ``answered`` bytes."""
    with subprocess.Popen(  # noqa: S603 - our own interpreter and the text above
        [sys.executable, "-c", _SERVER, path, str(asked), str(answered)], stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(None)
                peer.connect(path)
                yield _round_trip(peer, bytes(asked), bytearray(answered))
        finally:
            server.terminate()


def _round_trip(peer: socket.socket, request: bytes, buffer: bytearray) -> Callable[[], None]:
    view = memoryview(buffer)

    def run() -> None:
        peer.sendall(request)
        got = 0
        while got < len(view):
            got += peer.recv_into(view[got:])

    return run


def in_turns(
    calls: dict[str, Callable[[], object]],
    seconds: float,
    rounds: int = 10,
    undo: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Call each many times, in turns so that a busy moment hits all; returns the seconds of every call.

    ``undo`` is called after each and not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.perf_counter
    for _ in range(rounds):
        for name, call in calls.items():
            end = clock() + seconds / rounds / len(calls)
            while (before := clock()) < end:
                call()
                times[name].append(clock() - before)
                if undo is not None:
                    undo()
    return times


def percentile(times: list[float], share: float) -> float:
    """Return a percentile in microseconds."""
    if share == 0.5:
        return statistics.median(times) * 1e6
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e6

"""``kvtierd bench footprint``: how soon a daemon listens, and what one that has nothing to do takes."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.bench_rpc import LAYOUT
from kvtierd.client import Client
from kvtierd.errors import Unavailable
from kvtierd.testing.events_bench import subscriber
from kvtierd.testing.local_daemon import START_SECONDS, LocalDaemon, free_port, short_folder

POOL = 64 << 20
POLL = 0.001
STARTS = 5
_IMPORTS = "import asyncio, msgspec, pydantic, uvloop, yaml, zmq"
"""What any daemon of this make loads; starting an interpreter with it is what the start is compared with."""


def measure(*, seconds: float, starts: int = STARTS) -> list[Figure]:
    """Start daemons, then watch one with an engine and a subscriber attached do nothing for ``seconds``."""
    times, bare = [], []
    with short_folder("bench") as folder, _compiled(folder):
        for number in range(starts + 1):
            with _daemon(folder, number) as daemon:
                times.append(_seconds_to_listen(daemon))
            bare.append(_seconds_of_imports())
        del times[0], bare[0]
        with (
            _daemon(folder, starts + 1) as daemon,
            _started(daemon) as pid,
            subscriber(daemon.endpoint),
            Client(daemon.socket, deadline=5.0) as client,
        ):
            client.attach(LAYOUT, engine_id="bench").lookup([])
            time.sleep(1.0)
            before = _cpu_seconds(pid)
            time.sleep(seconds)
            used = (_cpu_seconds(pid) - before) / seconds
            memory = _private_bytes(pid)
    return [
        Figure("start to a listening socket", statistics.median(times), "s", statistics.median(bare)),
        Figure("idle, memory beside the pool", memory / 1e6, "MB"),
        Figure("idle, of a core", used * 100, "%"),
    ]


@contextlib.contextmanager
def _compiled(folder: Path) -> Iterator[None]:
    """Let daemons start from compiled modules, as installed ones do, where this environment keeps none.

    The first start, which does not count, compiles them.
    """
    if not sys.dont_write_bytecode:
        yield
        return
    kept = os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    try:
        yield
    finally:
        del os.environ["PYTHONPYCACHEPREFIX"]
        if kept is not None:
            os.environ["PYTHONDONTWRITEBYTECODE"] = kept


def _daemon(folder: Path, number: int) -> contextlib.AbstractContextManager[LocalDaemon]:
    own = folder / str(number)
    own.mkdir()
    changes = {"admin": {"listen": f"127.0.0.1:{free_port()}"}}
    return _stopped(LocalDaemon(own, pool_bytes=POOL, disk_bytes=POOL, changes=changes))


@contextlib.contextmanager
def _stopped(daemon: LocalDaemon) -> Iterator[LocalDaemon]:
    try:
        yield daemon
    finally:
        daemon.stop()


@contextlib.contextmanager
def _started(daemon: LocalDaemon) -> Iterator[int]:
    daemon.start()
    assert daemon.pid is not None
    yield daemon.pid


def _seconds_to_listen(daemon: LocalDaemon) -> float:
    began = time.monotonic()
    daemon.launch()
    while time.monotonic() < began + START_SECONDS:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(daemon.socket) == 0:
                return time.monotonic() - began
        time.sleep(POLL)
    raise Unavailable(f"the daemon did not listen; its log ends:\n{daemon.log_tail()}")


def _seconds_of_imports() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)  # noqa: S603 - our own interpreter
    return time.monotonic() - began


def _cpu_seconds(pid: int) -> float:
    """Return what all threads have had of processors, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def _private_bytes(pid: int) -> int:
    """Return the resident bytes without the pool, which is the only shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024

"""An engine in a process of its own, told by lines of JSON what to do: it can be killed, and go silent."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvtierd.client import Client, Job, Loaded
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, chain, keys_of, loose


class Engine:
    """One session and what it holds. Each method is a command; what it returns is printed."""

    def __init__(self, path: str, engine_id: str, role: str) -> None:
        self._path = path
        self._session = Client(path, deadline=10.0).attach(LAYOUT, engine_id=engine_id, role=role)
        self._job: Job | None = None
        self._got: Loaded | None = None

    def pool(self) -> dict[str, Any]:
        """Return the mapping and whether the session stands."""
        return {"pool_id": self._session.pool_id, "connected": self._session.connected}

    def reserve(self, count: int, prefix: str) -> dict[str, Any]:
        """Open a job for blocks; return its slots."""
        blocks = loose(count, prefix)
        self._job = self._session.prepare_store(keys_of(blocks), meta=[block.meta for block in blocks])
        return {"job": self._job.job, "slots": self._job.slots}

    def scribble(self, text: str) -> int:
        """Write into the slots of the job, whatever became of it, as a copy that is under way does."""
        assert self._job is not None
        views = self._job.views()
        for view in views:
            view[:] = text.encode()[:1] * len(view)
        return len(views)

    def commit(self) -> int:
        """Commit the job; return how many blocks are visible."""
        assert self._job is not None
        return len(self._job.commit())

    def lease(self, count: int, seed: str) -> dict[str, Any]:
        """Load a chain; return its slots."""
        self._got = self._session.load(keys_of(chain(count, seed)), deadline=5.0)
        return {"slots": self._got.slots, "sources": self._got.sources}

    def leased(self) -> list[str]:
        """Return the bytes of the leased slots, as far as they are one letter."""
        assert self._got is not None
        return [bytes(view[:8]).hex() for view in self._got.views()]

    def peek(self, slot: int) -> str:
        """Return the first bytes of a slot."""
        return bytes(self._session.slot(slot)[:8]).hex()

    def drop(self) -> int:
        """Break the connection as a lost peer would; this process and its mapping live on."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as twin:
                        # The daemon's socket was bound beside its place and renamed: only the folder fits.
                        if os.path.dirname(twin.getpeername()) == os.path.dirname(self._path):
                            twin.shutdown(socket.SHUT_RDWR)
                            count += 1
        return count

    def revive(self) -> int | None:
        """Use the session until it is connected again; return the fence that it finds."""
        deadline = time.monotonic() + 10
        while not (self._session.lookup([]) and self._session.connected):
            assert time.monotonic() < deadline
        return self._session.poll()

    def hush(self) -> int:
        """Close this process's liveness pipes, as a careless client might; return how many there were."""
        pipes = [int(name) for name in os.listdir("/proc/self/fd") if _is_write_end(int(name))]
        for pipe in pipes:
            os.close(pipe)
        return len(pipes)

    def poll(self) -> int | None:
        """Return the fence to be acknowledged, if any."""
        return self._session.poll()

    def acknowledge(self) -> bool:
        """Say that nothing revoked is being copied."""
        return self._session.acknowledge()

    def close(self) -> None:
        """Say goodbye."""
        self._session.close()


def _is_write_end(fd: int) -> bool:
    """Whether this is a pipe to write to, of those that somebody else made."""
    with contextlib.suppress(OSError):
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        return fd > 2 and writable and stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


class EngineProcess:
    """An engine that can be killed. Calling it runs a command there and returns the result.

    ``greeting``: what it said when it had attached.
    """

    def __init__(self, rig: DaemonRig, engine_id: str, role: str = "scheduler") -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", __name__, rig.daemon.socket, engine_id, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.greeting = self._answer()

    def __call__(self, command: str, *arguments: Any) -> Any:
        """Run a command there; return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        assert poller.poll(20_000), "the engine is silent"
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """End it at once; it is gone when this returns."""
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """Attach, then carry out what the lines on standard input say."""
    engine = Engine(*sys.argv[1:4])
    _say(engine.pool())
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        command: Callable[..., Any] = getattr(engine, name)
        _say(command(*arguments))


def _say(result: Any) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

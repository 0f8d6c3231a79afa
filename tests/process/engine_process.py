"""An engine in a process of its own, told by lines of JSON what to do; started by ``test_custody.py``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from kvtierd.client import Client, Job, Loaded
from kvtierd.testing.daemon_rig import LAYOUT, chain, keys_of, loose


class Engine:
    """One session and what it holds. Each method is a command; what it returns is printed."""

    def __init__(self, path: str, engine_id: str, role: str) -> None:
        self._path = path
        self._session = Client(path, deadline=10.0).attach(LAYOUT, engine_id=engine_id, role=role)
        self._job: Job | None = None
        self._got: Loaded | None = None

    def pool(self) -> dict[str, Any]:
        return {"pool_id": self._session.pool_id, "connected": self._session.connected}

    def reserve(self, count: int, prefix: str) -> dict[str, Any]:
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
        assert self._job is not None
        return len(self._job.commit())

    def lease(self, count: int, seed: str) -> dict[str, Any]:
        self._got = self._session.load(keys_of(chain(count, seed)), deadline=5.0)
        return {"slots": self._got.slots, "sources": self._got.sources}

    def leased(self) -> list[str]:
        """Return the bytes of the leased slots, as far as they are one letter."""
        assert self._got is not None
        return [bytes(view[:8]).hex() for view in self._got.views()]

    def peek(self, slot: int) -> str:
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

    def poll(self) -> int | None:
        return self._session.poll()

    def acknowledge(self) -> bool:
        return self._session.acknowledge()

    def close(self) -> None:
        self._session.close()


def main() -> None:
    engine = Engine(*sys.argv[1:4])
    print(json.dumps(engine.pool()), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        command: Callable[..., Any] = getattr(engine, name)
        print(json.dumps(command(*arguments)), flush=True)


if __name__ == "__main__":
    main()

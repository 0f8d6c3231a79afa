"""An engine in a container, told by lines of JSON what to do; ``test_pod.py`` starts it on the glue alone."""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvtierd.client import Client
from kvtierd.errors import RequestRefused
from kvtierd.testing.daemon_rig import LAYOUT, chain, keys_of, store
from kvtierd.testing.workload import payload


class Engine:
    """One session. Each method is a command; what it returns is printed."""

    def __init__(self, path: str, engine_id: str) -> None:
        self._client = Client(path, deadline=5.0)
        self._session = self._client.attach(LAYOUT, engine_id=engine_id)

    def connected(self) -> bool:
        self._session.lookup([])
        return self._session.connected

    def store(self, count: int, seed: str) -> int:
        return len(store(self._session, chain(count, seed)))

    def load(self, count: int, seed: str) -> dict[str, Any]:
        """Load a chain and compare every byte; ``tiers``: where the blocks came from."""
        keys = keys_of(chain(count, seed))
        wrong, tiers = 0, Counter()
        for key in keys:
            with self._session.load([key], deadline=5.0) as got:
                for found, view, source in zip(got.keys, got.views(), got.sources, strict=True):
                    wrong += bytes(view) != payload(found, len(view))
                    tiers[source] += 1
        return {"tiers": dict(tiers), "wrong": wrong}

    def close(self) -> None:
        self._client.close()


def cramped(path: str) -> None:
    """Attach with an address space that the pool does not fit into; print what was heard and how soon."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (16 << 20), resource.RLIM_INFINITY))
    begin = time.monotonic()
    try:
        Client(path, deadline=5.0).attach(LAYOUT, engine_id="cramped")
        said = "attached"
    except RequestRefused as refused:
        said = str(refused)
    print(json.dumps([time.monotonic() - begin, said]), flush=True)


def main() -> None:
    # The first process of a container ignores signals that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if sys.argv[2] == "cramped":
        cramped(sys.argv[1])
        return
    engine = Engine(*sys.argv[1:3])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()

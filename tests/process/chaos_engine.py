"""An engine that does everything an engine may do, and what it should not; started by ``test_chaos.py``.

Arguments: socket, engine id, role, seed. It reads ``go``, ``pause`` and ``end`` from stdin. To a ``pause`` it
answers with one line of JSON when it holds nothing any more: what it did since the start. It may die at any
moment, by its own hand too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvtierd.client import BlockKey, Client, Job, Scope, Session, hash_of
from kvtierd.testing.daemon_rig import LAYOUT, chain, keys_of
from kvtierd.testing.workload import WorkBlock, payload

CHAINS = 24
LENGTH = 10


class Engine:
    """One session, and copies that go on after their job or lease has ended (as DMA does)."""

    def __init__(self, path: str, engine_id: str, role: str, seed: int) -> None:
        self._folder = os.path.dirname(path)
        self._session: Session = Client(path, deadline=2.0).attach(LAYOUT, engine_id=engine_id, role=role)
        self._worker = role == "worker"
        self._rng = random.Random(seed)
        self._chains = [chain(LENGTH, f"chaos{number}") for number in range(CHAINS)]
        self._copies: list[tuple[Job, Sequence[memoryview]]] = []
        self._speak_at = 0.0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def step(self) -> None:
        """Do one thing; copies that are under way go on."""
        if self._copies and time.monotonic() < self._speak_at:
            for _, views in self._copies:
                for view in views:
                    view[:64] = b"Z" * 64
        else:
            self.speak()
        if self._worker:
            time.sleep(0.01)
            return
        made = self._rng.choice(self._chains)[: self._rng.randint(1, LENGTH)]
        roll = self._rng.random()
        for share, act in self.ACTS:
            if roll < share:
                act(self, made)
                return
            roll -= share

    def speak(self) -> None:
        """End what is copied, then say so: the daemon may reuse those slots from now on."""
        copies, self._copies = self._copies, []
        for job, _ in copies:
            job.abort()
        copies.clear()
        if self._session.poll() is not None:
            self.counts["fences"] += self._session.acknowledge()

    # -- what an engine does ------------------------------------------------------------------------

    def store(self, made: list[WorkBlock]) -> None:
        scope = self._rng.choice((None, None, None, Scope(store_to=("near",)), Scope(store_to=())))
        job = self._session.prepare_store(keys_of(made), meta=[block.meta for block in made], scope=scope)
        failed: list[BlockKey] = []
        for key, view in zip(job.keys, job.views(), strict=True):
            if self._rng.random() < 0.02:
                view[:] = b"F" * len(view)
                failed.append(key)
            else:
                view[:] = payload(key, len(view))
        self.counts["stored"] += len(job.commit(failed=failed))

    def load(self, made: list[WorkBlock]) -> None:
        deadline = self._rng.choice((0.0, 0.02, 1.0))
        with self._session.load(keys_of(made), deadline=deadline) as got:
            for _ in range(2):  # what is leased does not change while it is
                for key, view in zip(got.keys, got.views(), strict=True):
                    if (found := bytes(view)) != payload(key, len(view)):
                        self.wrong.append(f"{hash_of(key).hex()}: {found[:32].hex()}")
            self.counts["loaded"] += len(got.keys)
            for source in got.sources:
                self.counts[f"from {source}"] += 1
            self.counts["missed"] += len(made) - len(got.keys)

    def look(self, made: list[WorkBlock]) -> None:
        found = self._session.lookup(keys_of(made), promote=True, lease=self._rng.choice((None, 0.2)))
        if self._rng.random() < 0.7:
            found.release()

    def evict(self, made: list[WorkBlock]) -> None:
        tiers = self._rng.choice((None, ["cpu"], ["near"], ["far", "cpu"]))
        self.counts["evicted"] += self._session.evict(keys_of(made), tiers)

    def hint(self, made: list[WorkBlock]) -> None:
        self._session.touch(keys_of(made))
        self._session.prefetch(keys_of(made))

    def abort(self, made: list[WorkBlock]) -> None:
        job = self._session.prepare_store(keys_of(made))
        for view in job.views():
            view[:8] = b"aborted!"
        job.abort()
        self.counts["aborted"] += 1

    # -- what it should not do ----------------------------------------------------------------------

    def go_silent(self, made: list[WorkBlock]) -> None:
        """Copy on beyond the job's deadline."""
        job = self._session.prepare_store(keys_of(made))
        if job.keys:
            self._copies.append((job, job.views()))
            self._speak_at = time.monotonic() + self._rng.uniform(0.1, 2.5)
            self.counts["silences"] += 1

    def lose_connection(self, made: list[WorkBlock]) -> None:
        """Lose the connection in the middle of a copy that goes on."""
        self.go_silent(made)
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as twin:
                    if os.path.dirname(twin.getpeername()) == self._folder:
                        twin.shutdown(socket.SHUT_RDWR)
            except (OSError, TypeError):
                continue
        self.counts["lost connections"] += 1

    def die(self, made: list[WorkBlock]) -> None:
        self.go_silent(made)
        os.kill(os.getpid(), signal.SIGKILL)

    ACTS = (
        (0.36, store),
        (0.36, load),
        (0.10, look),
        (0.04, evict),
        (0.08, hint),
        (0.04, abort),
        (0.015, go_silent),
        (0.004, lose_connection),
        (0.0005, die),
    )


def main() -> None:
    path, engine_id, role, seed = sys.argv[1:5]
    going, paused, ended = threading.Event(), threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            match line.strip():
                case "go":
                    paused.clear()
                    going.set()
                case "pause":
                    going.clear()
                case _:
                    break
        ended.set()
        going.set()

    threading.Thread(target=listen, daemon=True).start()
    engine = Engine(path, engine_id, role, int(seed))
    while True:
        if not going.is_set() and not paused.is_set():
            engine.speak()
            paused.set()  # before it is said: the answer to it may be "go"
            print(json.dumps({"counts": engine.counts, "wrong": engine.wrong}), flush=True)
        if paused.is_set():  # a process that copies nothing says so whenever it is asked
            engine.speak()
            going.wait(0.05)
        if ended.is_set():
            return
        if going.is_set():
            engine.step()


if __name__ == "__main__":
    main()

"""Kill -9 at random instants under traffic: what is announced and not removed is served, with its own bytes.

Forty kills in the ordinary run; ``KVTIERD_KILLS`` says otherwise (the proof is made with 200).
"""

from __future__ import annotations

import faulthandler
import os
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from kvtierd.client import Client, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, Router, chain, fs_tier, keys_of, load
from kvtierd.testing.workload import WorkBlock, payload

Make = Callable[..., DaemonRig]

KILLS = int(os.environ.get("KVTIERD_KILLS", "40"))
CHECK_EVERY = 8
CHAINS = [chain(6, f"conversation {number}") for number in range(24)]
BLOCKS = {block.meta.hashes[0]: block for blocks in CHAINS for block in blocks}


class Traffic(threading.Thread):
    """One engine with real bytes that stores, loads, aborts, drops out and acknowledges, daemon or no daemon.

    ``wrong``: what must never happen; ``counts``: what did.
    """

    def __init__(self, path: str, seed: int) -> None:
        super().__init__(name=f"traffic-{seed}", daemon=True)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.paused = threading.Event()
        self._go, self._end = threading.Event(), threading.Event()
        self._go.set()
        self._rng = random.Random(seed)
        self._client = Client(path, deadline=2.0, rng=random.Random(seed))
        self._session: Session = self._client.attach(LAYOUT, engine_id=f"e{seed}")

    def run(self) -> None:
        while not self._end.is_set():
            if not self._go.is_set():
                self.paused.set()
                self._go.wait()
                self.paused.clear()
            try:
                self._step()
            except Exception as error:
                self.wrong.append(repr(error))
                return
        self._client.close()

    def pause(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def end(self) -> None:
        self._end.set()
        self._go.set()
        self.join(20)

    def _step(self) -> None:
        blocks = self._rng.choice(CHAINS)[: self._rng.randint(1, 6)]
        if self._session.poll() is not None:
            self._session.acknowledge()  # nothing of this thread is being copied between two steps
        (self._store if self._rng.random() < 0.5 else self._load)(blocks)

    def _store(self, blocks: list[WorkBlock]) -> None:
        job = self._session.prepare_store(keys_of(blocks), meta=[block.meta for block in blocks])
        for number, (key, view) in enumerate(zip(job.keys, job.views(), strict=True)):
            half = len(view) // 2
            view[:half] = payload(key, len(view))[:half]
            view[half:] = payload(key, len(view))[half:] if number % 7 != 6 else bytes(half)
        if self._rng.random() < 0.1:
            job.abort()
            self.counts["aborted"] += 1
        else:
            self.counts["stored"] += len(job.commit(failed=job.keys[6::7]))

    def _load(self, blocks: list[WorkBlock]) -> None:
        with self._session.load(keys_of(blocks), deadline=0.3) as got:
            for key, view in zip(got.keys, got.views(), strict=True):
                if bytes(view) != payload(key, len(view)):
                    self.wrong.append(f"wrong bytes of {key.hex()} in {got.slots}")
            self.counts["loaded"] += len(got.keys)


def killed_at_random(rig: DaemonRig, rng: random.Random) -> None:
    """Kill the daemon at any moment of its life, its start included, and start the next one."""
    if rng.random() < 0.2:
        rig.daemon.launch()
        wait_a_while(rng.uniform(0.0, 0.8))
    else:
        rig.daemon.start()
        wait_a_while(rng.uniform(0.0, 0.5))
    rig.daemon.kill()


def wait_a_while(seconds: float) -> None:
    """Let traffic go on; the instant of a kill is what this test varies."""
    threading.Event().wait(seconds)


def check(rig: DaemonRig, routers: list[Router]) -> int:
    """At a quiet point: every reader's view is the inventory, and every block of it has its own bytes.

    The pool's blocks come first. A load of one evicts nothing, but one from the disk takes a slot, and what a
    kill kept from being written down is in the pool alone: its turn would come after its removal.
    """

    def told() -> bool:
        for router in routers:
            router.poll(0.005)
        return not rig.status()["events"]["journal"]["holding"]

    wait_for(told, "the difference to be told")
    status = rig.settle()
    for router in routers:
        rig.catch_up(router, status)
        router.counts.pop("unknown_removals", None)
    rig.agree(*routers)
    pool = {BLOCKS[entry.hash] for entry in rig.router.resident if entry.medium == "CPU"}
    below = {BLOCKS[entry.hash] for entry in rig.router.resident} - pool
    with rig.attach(engine_id="judge") as session:
        for source, blocks in (("cpu", pool), ("disk", below)):
            for block in blocks:
                served = load(session, [block])
                assert served == [source], f"announced, not removed, and not served: {block.key.hex()}"
    return len(pool) + len(below)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(60 + 6 * KILLS)
def test_every_block_announced_and_not_removed_is_served_whenever_the_daemon_is_killed(make: Make) -> None:
    rig = make(tiers=[], slots=64, heartbeat="100ms", paranoid=False)
    rig.edit(lambda body: body["pool"].update(backing="file"))
    rig.edit(lambda body: body["tiers"].append(fs_tier(rig.folder, max_bytes="2MiB")))
    rig.start()
    rig.layouts.add(LAYOUT)
    faulthandler.cancel_dump_traceback_later()  # it walks the stacks of threads that run
    rng = random.Random(int(os.environ.get("KVTIERD_SEED", "1")))
    engines = [Traffic(rig.daemon.socket, number) for number in range(3)]
    served = kept = 0
    for engine in engines:
        engine.start()
    rig.daemon.kill()
    try:
        for kill in range(1, KILLS + 1):
            killed_at_random(rig, rng)
            if kill % CHECK_EVERY:
                continue
            rig.daemon.start()
            for engine in engines:
                engine.pause()
            wait_for(lambda: all(e.paused.is_set() for e in engines if e.is_alive()), "engines to pause")
            assert [engine.wrong for engine in engines] == [[]] * 3  # who died may have left a job open
            served += check(rig, [rig.router])
            kept += rig.counter("cpu", "restored")
            for engine in engines:
                engine.resume()
            rig.daemon.kill()
    finally:
        for engine in engines:
            engine.end()
    assert [engine.wrong for engine in engines] == [[]] * 3
    assert served > KILLS
    assert kept > KILLS, "pools went on from daemon to daemon"
    total = sum((engine.counts for engine in engines), Counter())
    assert min(total["stored"], total["loaded"], total["aborted"]) > KILLS // 4, total
    rig.start()
    check(rig, [rig.router])

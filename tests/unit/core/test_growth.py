"""A core that works for ever holds no more than one that worked for a moment (L107).

``KVTIERD_GROWTH`` sets the number of blocks: 2,000,000 are some minutes.
"""

import gc
import os
import random
import tracemalloc

import pytest

from kvtierd.core.geometry import UNIT
from kvtierd.core.invariants import validate
from kvtierd.core.policies import POLICIES
from kvtierd.core.stimuli import Acknowledge, Goodbye, Load, ProcessDied, SessionClosed, Status
from kvtierd.testing.rig import LadderRig, fs_spec, key

BLOCKS = int(os.environ.get("KVTIERD_GROWTH", "8000"))
CHAIN = 8
WARM = 400
"""Rounds before the first measurement: pool and tiers are full, tables have their size."""


class Life:
    """Rounds of everything that a pod's engines and tiers do, each with blocks that nobody saw before."""

    def __init__(self, policy: str) -> None:
        specs = [
            fs_spec("disk", 256, policy=POLICIES[policy]),
            fs_spec("lake", 128, ttl=50.0, shared=True),
            fs_spec("tail", 64, on_evict=True),
        ]
        self.rig = LadderRig(64, specs)
        self.rig.judge = self.judge
        self.random = random.Random(7)
        self.made = 0
        self.process = b"p0"

    def judge(self, verb: str, tier: str, block_id: object) -> Status:
        if self.random.random() > 0.01:
            return Status.OK
        return Status.CORRUPT if verb == "read" else Status.FAILED

    def round(self, number: int) -> None:
        rig, some = self.rig, range(self.made, self.made + CHAIN)
        self.made += CHAIN
        rig.store(*some)
        old = max(0, self.made - self.random.randrange(CHAIN, 400))
        rig.lookup(old, old + 1, old + 2, promote=number % 2 == 0, touch=True)
        got = rig.load(old, old + 1)
        if got.lease and number % 3:
            rig.release(got.lease)
        rig.prepare([key(some[-1] + (1 << 40))])  # never committed
        if number % 7 == 0:
            rig.ask(Load, keys=(key(1 << 41),), deadline=3.0)
        if number % 11 == 0:
            rig.evict(*some[4:], tiers=("cpu", "disk"))
        if number % 13 == 0:
            self.change_sessions(number)
        if number % 101 == 0:
            rig.reset()
        rig.advance(0.5 if number % 5 else 60.0)
        for _, revoked in rig.notices:
            rig.ask(Acknowledge, fence=revoked.fence)
        self.forget()

    def change_sessions(self, number: int) -> None:
        """The engine goes, politely or not, and another process comes."""
        rig = self.rig
        if number % 2:
            rig.ask(Goodbye)
        else:
            rig.feed(SessionClosed(rig.session))
            rig.feed(ProcessDied(self.process))
        self.process = number.to_bytes(4, "big")
        rig.session = rig.attach(f"e{number}", self.process)

    def forget(self) -> None:
        """Drop what the rig remembers for tests."""
        rig = self.rig
        for kept in (rig.effects, rig.events, rig.notices, rig.answers):
            kept.clear()
        live = {node.slot for space in rig.ladder.stack.primary.spaces.values() for node in space.blocks}
        rig.memory = {slot: what for slot, what in rig.memory.items() if slot in live}


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(("policy", "bound"), [("lru", 64 * UNIT), ("auto", 512 * UNIT)])
def test_a_core_that_works_on_holds_no_more_than_after_a_while(policy, bound):
    """``auto`` follows up to 4,096 names in each of three sets, which takes it a while."""
    life = Life(policy)
    tracemalloc.start(1)
    try:
        for number in range(WARM):
            life.round(number)
        before = held()
        for number in range(WARM, WARM + BLOCKS // CHAIN):
            life.round(number)
        grown = held() - before
    finally:
        tracemalloc.stop()
    validate(life.rig.ladder)
    assert life.rig.ladder.stack.primary.counters["stored"] > BLOCKS // 2
    assert grown < bound, f"{grown} bytes more after {BLOCKS} blocks"

"""What a block costs the core, counted in calls of its functions: a figure that no busy machine moves."""

import os
import sys

import pytest

import kvtierd
from kvtierd.core.effects import Answer, Loaded, Prepared
from kvtierd.core.model import Medium
from kvtierd.core.policies import POLICIES
from kvtierd.core.stimuli import Asked, Commit, Load, PrepareStore, Release
from kvtierd.core.tier import TierSpec
from kvtierd.testing.rig import LadderRig, key, meta

PRODUCT = os.path.dirname(kvtierd.__file__)
PROMPT = 64
"""Blocks in a request, so that what it costs as a whole weighs little."""

STORE = 21
"""Reservation, commit and announcement; 32 before a node counted its children and commits went as a whole."""
EVICTING = {"lru": 44, "s3fifo": 58, "arc": 56, "auto": 63}
"""Four of them to show engines that one block is gone and another there."""
LOAD = 7
"""Pinned, touched and released again."""


class Core:
    """A ladder that tells what it called."""

    def __init__(self, slots, policy="lru"):
        self.rig = LadderRig(slots, primary=TierSpec("cpu", Medium.CPU, policy=POLICIES[policy]))
        self.calls = 0

    def _count(self, frame, event, argument):
        self.calls += event == "call" and frame.f_code.co_filename.startswith(PRODUCT)

    def ask(self, request):
        sys.setprofile(self._count)
        try:
            (answer,) = self.rig.ladder.handle(Asked(self.rig.session, request), 0.0)
        finally:
            sys.setprofile(None)
        assert isinstance(answer, Answer)
        return answer.reply

    def store(self, first):
        """Store one prompt."""
        numbers = range(first, first + PROMPT)
        metas = tuple(meta(number, number - 1 if number > first else None) for number in numbers)
        job = self.ask(PrepareStore(id=1, keys=tuple(map(key, numbers)), meta=metas))
        assert isinstance(job, Prepared)
        assert len(job.slots) == PROMPT
        self.ask(Commit(id=2, job=job.job, generation=job.generation, pool_id=job.pool_id))
        self.rig.ladder.take_events()

    def per_block(self, act, times=8):
        self.calls = 0
        for turn in range(times):
            act(turn)
        return self.calls / times / PROMPT


def evicting(blocks, policy):
    """Return the calls of a stored block that another one has to go for."""
    core = Core(blocks, policy)
    for first in range(0, blocks, PROMPT):
        core.store(first)
    return core.per_block(lambda turn: core.store(blocks + turn * PROMPT))


def test_a_block_is_stored_with_few_calls():
    core = Core(16 * PROMPT)
    calls = core.per_block(lambda turn: core.store(turn * PROMPT))
    assert calls < STORE


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_is_evicted_at_the_same_price_from_many_as_from_few(policy):
    few, many = evicting(8 * PROMPT, policy), evicting(128 * PROMPT, policy)
    assert max(few, many) < EVICTING[policy]
    assert many < 1.1 * few


def test_a_block_is_loaded_and_released_with_few_calls():
    core = Core(16 * PROMPT)
    core.store(0)
    keys = tuple(map(key, range(PROMPT)))

    def load(_turn):
        got = core.ask(Load(id=3, keys=keys))
        assert isinstance(got, Loaded)
        assert got.keys == keys
        core.ask(Release(id=4, lease=got.lease))

    assert core.per_block(load) < LOAD

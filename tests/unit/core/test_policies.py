"""Eviction policies on a resident set: leaf first, never a pinned block, quick, and no worse than LRU."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import get_args

import pytest

from kvtierd.config.schema import Policy as PolicyName
from kvtierd.core.effects import Loaded
from kvtierd.core.model import Block, BlockId, BlockMeta, State, block_key
from kvtierd.core.policies import POLICIES
from kvtierd.core.policies.ghosts import Ghosts
from kvtierd.core.policies.order import Order
from kvtierd.core.policies.reuse import BUCKETS, ReuseTimes, age_bucket, worth_by_age
from kvtierd.core.residency import Node, ResidentSet
from kvtierd.core.stimuli import Load
from kvtierd.testing.rig import LadderRig, key

every_policy = pytest.mark.parametrize("name", POLICIES)


def node(number: int, parent: int | None = None, state: State = State.RESIDENT) -> Node:
    name = block_key(number.to_bytes(8, "big"))
    return Node(Block.of(BlockId("ns", name), 1, BlockMeta(hashes=(number,), parent=parent)), state)


def chain(blocks: ResidentSet, first: int, length: int) -> list[Node]:
    made = [node(first + depth, first + depth - 1 if depth else None) for depth in range(length)]
    for each in made:
        blocks.add(each)
    return made


def drain(blocks: ResidentSet) -> list[Node]:
    victims = []
    while (victim := blocks.victim()) is not None:
        victims.append(victim)
        blocks.remove(victim)
    return victims


def test_the_tier_file_offers_every_policy_and_no_other():
    """L95: a policy that is named is the one that runs."""
    assert set(get_args(PolicyName)) == set(POLICIES)


@every_policy
def test_a_chain_leaves_from_its_end_and_nothing_is_forgotten(name):
    blocks = ResidentSet(POLICIES[name]())
    made = [chain(blocks, 100 * number, 7) for number in range(20)]
    for each in made[3] + made[5]:
        blocks.touch(each)
    victims = drain(blocks)
    assert len(victims) == 140
    for links in made:
        places = [victims.index(each) for each in links]
        assert places == sorted(places, reverse=True)


@every_policy
def test_a_pinned_block_and_its_ancestors_are_never_victims(name):
    blocks = ResidentSet(POLICIES[name]())
    held, free = chain(blocks, 0, 5), chain(blocks, 100, 5)
    blocks.pin(held[2])
    assert set(drain(blocks)) == {*held[3:], *free}
    blocks.unpin(held[2])
    assert drain(blocks) == held[2::-1]


@every_policy
def test_the_head_of_a_long_prefix_survives_its_own_pressure(name):
    """L58: a chain of 100 in room for 90 still serves a long contiguous prefix."""
    rig = LadderRig(90, attach=False)
    primary = rig.ladder.stack.primary
    primary.spec = replace(primary.spec, policy=POLICIES[name])
    rig.session = rig.attach()
    for end in range(10, 101, 10):
        rig.store(*range(end))
    assert rig.lookup(*range(100)).prefix >= 80
    number = rig.ask(Load, keys=tuple(map(key, range(100))))
    assert len(rig.answer(number, Loaded).keys) >= 80
    rig.check()


@every_policy
def test_spared_blocks_go_last_with_their_whole_chain(name):
    blocks = ResidentSet(POLICIES[name]())
    wanted = chain(blocks, 0, 6)
    others = chain(blocks, 100, 6)
    names = {each.block.id for each in wanted}
    blocks.spare = names.__contains__
    assert [blocks.victim() for _ in range(3)] == [others[-1]] * 3
    first = []
    for _ in range(6):
        victim = blocks.victim()
        blocks.remove(victim)
        first.append(victim)
    assert first == others[::-1]
    assert blocks.victim() is wanted[-1], "rather a spared one than none"
    names.clear()
    assert drain(blocks) == wanted[::-1]


@every_policy
def test_a_spared_block_can_be_pinned_unpinned_touched_and_removed(name):
    blocks = ResidentSet(POLICIES[name]())
    one, two, three = node(1), node(2), node(3)
    for each in (one, two, three):
        blocks.add(each)
    blocks.spare = lambda block_id: True
    blocks.victim()
    blocks.pin(one)
    blocks.touch(two)
    blocks.remove(three)
    assert drain(blocks) == [two]
    blocks.unpin(one)
    assert drain(blocks) == [one]


@pytest.mark.slow
@pytest.mark.timeout(180)
@every_policy
def test_with_a_million_leased_blocks_the_answer_no_comes_within_five_milliseconds(name):
    """L104: neither chains nor single blocks, nor blocks that were candidates a moment ago, are walked."""
    blocks = ResidentSet(POLICIES[name]())
    for number in range(1_000_000):
        blocks.add(node(number, number - 1 if number % 4 else None))
    for each in blocks:
        blocks.pin(each)
    gc.disable()  # as in the daemon, whose full collections wait for a quiet moment
    try:
        started = time.thread_time()  # a busy machine may take the core away in between
        assert blocks.victim() is None
        assert time.thread_time() - started < 0.005
    finally:
        gc.enable()


@every_policy
def test_a_failed_insertion_is_no_use(name):
    """A reservation that found no room is taken back; trying again must not look like reuse."""
    blocks = ResidentSet(POLICIES[name]())
    chain(blocks, 1000, 50)
    for _ in range(20):
        each = node(1, state=State.RESERVED)
        blocks.add(each)
        blocks.remove(each)
    last = node(1)
    blocks.add(last)
    assert last.hits == 0
    assert len(drain(blocks)) == 51


def test_auto_keeps_what_was_promoted_until_it_was_read():
    """L46: blocks that were just brought up and not yet read do not make room for each other."""
    blocks = ResidentSet(POLICIES["auto"]())
    for number in range(200):
        blocks.add(node(number))
    promoted = []
    for number in range(1000, 1050):
        each = node(number, state=State.LOADING)
        blocks.add(each)
        promoted.append(each)
        victim = blocks.victim()
        blocks.remove(victim)
    assert all(each.state is State.LOADING for each in promoted)


def test_an_order_gives_the_smallest_number_first_and_keeps_nothing_behind():
    order = Order()
    numbers = [5, 1 << 40, 255, 256, 3, 70_000, (1 << 47) + 1]
    nodes = {number: node(number % 1000) for number in numbers}
    for number, each in nodes.items():
        order.add(number, each)
    order.remove(255)
    seen = []
    for number in sorted(set(numbers) - {255}):
        assert order.first() is nodes[number]
        order.remove(number)
        seen.append(number)
    assert order.first() is None
    assert not any(order._levels)


def test_ghosts_forget_the_oldest_beyond_their_limit():
    ghosts = Ghosts()
    ids = [BlockId("ns", block_key(bytes([number]))) for number in range(5)]
    for number, block_id in enumerate(ids):
        ghosts.put(block_id, number, 3)
    assert [ghosts.take(block_id) for block_id in ids] == [None, None, 2, 3, 4]
    assert len(ghosts) == 0


def test_age_buckets_grow_with_age_and_cover_it():
    buckets = [age_bucket(age) for age in range(5000)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(buckets[-1] + 1))
    assert age_bucket(1 << 48) < BUCKETS


def test_worth_is_the_best_ratio_of_later_hits_to_later_time():
    """Against trying every end of the stay."""
    hits = [0.0, 3.0, 0.0, 1.0, 9.0, 2.0] + [0.0] * (BUCKETS - 6)
    losses = [4.0, 0.0, 2.0, 5.0, 1.0, 3.0] + [0.0] * (BUCKETS - 6)
    starts = [age for age in range(30) if age == 0 or age_bucket(age) != age_bucket(age - 1)]
    worth = worth_by_age(hits, losses)
    for begin in range(6):
        found = spent = best = 0.0
        left = sum(hits[begin:]) + sum(losses[begin:])
        for end in range(begin, 6):
            ended = hits[end] + losses[end]
            found += hits[end]
            spent += (left - ended / 2) * (starts[end + 1] - starts[end])
            left -= ended
            best = max(best, found / spent)
        assert worth[begin] == pytest.approx(best)
    assert not any(worth[6:])


def test_the_sample_of_names_stays_bounded_and_fair():
    reuse = ReuseTimes(1)
    for number in range(50_000):
        reuse.used(BlockId("ns", block_key(number.to_bytes(8, "big"))), 0, number, 100_000)
    assert 1500 < len(reuse._last) <= 4096

"""The invariant watch: it finds what broke before anybody is told, and says what happened to the block."""

import time

import pytest

from kvtierd.core.guard import PATROL_TURNS, Guard
from kvtierd.core.model import BlockId, hash_of
from kvtierd.core.patrol import ROUND_SECONDS, Patrol
from kvtierd.core.stimuli import Asked, PrepareStore, Tick
from kvtierd.core.story import Story
from kvtierd.errors import InvariantBroken
from kvtierd.testing.rig import LadderRig, fs_spec, key


def patrolled(rig):
    """Look until a whole round is done."""
    patrol = Patrol(rig.ladder)
    while not patrol.rounds:
        patrol.look()
    return patrol


@pytest.fixture
def busy(rigged):
    """Blocks in every state, a job, a lease and a quarantine."""
    rig = rigged(16, [fs_spec("disk")])
    rig.store(1, 2, 3)
    rig.prepare([key(4), key(5)])
    rig.load(1)
    other = rig.attach("e1", b"p1")
    number = rig.ask(PrepareStore, session=other, keys=(key(6),))
    assert number
    rig.advance(1000.0)
    rig.prepare([key(7)])
    return rig


def test_a_sound_ladder_passes(busy):
    patrol = patrolled(busy)
    assert patrol.blocks >= 4


def node_of(rig, number):
    return rig.ladder.stack.primary.get(BlockId(rig.layout.namespace(), key(number)))


def share_a_slot(rig):
    node_of(rig, 2).slot = node_of(rig, 3).slot


def use_a_free_slot(rig):
    (space,) = rig.ladder.stack.primary.spaces.values()
    free = space.arena.take()
    space.arena.give(free)
    node_of(rig, 2).slot = free


def lose_a_pin(rig):
    node_of(rig, 7).pins = 0


def forget_a_name(rig):
    (space,) = rig.ladder.stack.primary.spaces.values()
    space.index[key(99)] = space.index[key(2)]


def lose_a_slot(rig):
    (space,) = rig.ladder.stack.primary.spaces.values()
    space.arena.take()


def miscount_bytes(rig):
    rig.ladder.stack.by_name["disk"].used = -1


def use_another_layouts_slot(rig):
    node_of(rig, 2).slot = 1 << 12


def unpin_a_lease(rig):
    lease = rig.load(1)
    assert lease.lease
    node_of(rig, 1).pins = 0


BREAKS = [
    (share_a_slot, "shares its slot"),
    (use_a_free_slot, "shares its slot"),
    (lose_a_pin, "nobody"),
    (forget_a_name, "not where its name leads|slots accounted for"),
    (lose_a_slot, "slots accounted for"),
    (miscount_bytes, "less than none"),
    (use_another_layouts_slot, "slot of another layout"),
    (unpin_a_lease, "which nobody pinned"),
]


@pytest.mark.parametrize(("damage", "said"), BREAKS)
def test_what_is_broken_is_found_within_a_round(damage, said):
    rig = LadderRig(16, [fs_spec("disk")])
    rig.store(1, 2, 3)
    rig.prepare([key(7)])
    damage(rig)
    with pytest.raises(InvariantBroken, match=said):
        patrolled(rig)


def test_a_round_begins_once_a_minute_and_looks_go_on(busy):
    patrol = patrolled(busy)
    for _ in range(10):
        patrol.look()
    assert patrol.rounds == 1
    busy.advance(ROUND_SECONDS + 1)
    patrol.look()
    assert patrol.rounds == 2


def test_blocks_that_come_and_go_during_a_round_are_no_fault(rigged):
    """The list is a round old: what left is passed over, its slots may have other owners."""
    rig = rigged(400)
    for number in range(300):
        rig.store(number)
    patrol = Patrol(rig.ladder)
    number = 1000
    while not patrol.rounds:
        patrol.look()
        for _ in range(120):
            rig.store(number)
            number += 1
    assert patrol.looks >= 3


def test_a_guard_looks_now_and_then_and_costs_little(rigged):
    rig = rigged(2000)
    for number in range(1500):
        rig.store(number)
    guard = Guard(rig.ladder, paranoid=False)
    begin = time.process_time()
    for _ in range(100 * PATROL_TURNS):
        guard.note(Tick(), 0.0)
        guard.check()
    spent = time.process_time() - begin
    figures = guard.statistics()
    assert (figures["looks"], figures["rounds"], figures["blocks"]) == (100, 1, 1500)
    assert spent / (100 * PATROL_TURNS) < 50e-6


def test_a_paranoid_guard_finds_it_at_once():
    rig = LadderRig(8)
    rig.store(1)
    guard = Guard(rig.ladder, paranoid=True)
    guard.check()
    node_of(rig, 1).pins = 1
    with pytest.raises(InvariantBroken, match="pins"):
        guard.check()


def test_the_story_of_a_block_names_who_holds_it_and_what_happened(rigged):
    rig = rigged(8, [fs_spec("disk")])
    guard = Guard(rig.ladder, paranoid=False)
    rig.store(1)
    lease = rig.load(1).lease
    block_id = BlockId(rig.layout.namespace(), key(1))
    guard.note(Asked(rig.session, PrepareStore(id=9, keys=(key(1),))), 3.5)
    guard.note(Asked(rig.session, PrepareStore(id=10, keys=(key(2),))), 4.5)
    told = guard.story(InvariantBroken("broken", block_id))
    assert hash_of(key(1)).hex() in told
    assert "in cpu: <" in told
    assert "in disk: <" in told
    assert f"held by lease {lease}" in told
    assert told.count("3.500000 PrepareStore") == 2, "what named it, and among the last"
    assert told.count("4.500000 PrepareStore") == 1
    assert "the last that happened" in guard.story(ValueError("any bug"))


def test_a_story_is_bounded(rigged):
    story = Story(entries=10, keys=2)
    keys = tuple(key(number) for number in range(100))
    for _ in range(50):
        story.note(Asked(1, PrepareStore(id=1, keys=keys)), 0.0)
    lines = list(story.tell(rigged(1).ladder, BlockId("n", key(1))))
    assert sum("PrepareStore" in line for line in lines) == 20
    assert not any(
        "PrepareStore" in line for line in list(story.tell(rigged(1).ladder, BlockId("n", key(50))))[1:2]
    )

"""Lookups that are answered at sight: the same answer and the same figures as by the long way."""

import pytest

from kvtierd.core.effects import Answer, LookedUp
from kvtierd.core.model import KeyState, Scope
from kvtierd.core.stimuli import Lookup, PrepareStore, SessionClosed, Stop
from kvtierd.testing.rig import fs_spec, key


def asked(*numbers, **fields):
    return Lookup(id=1000, keys=tuple(key(number) for number in numbers), **fields)


def figures(rig):
    counters = rig.ladder.stack.primary.counters
    return [counters[f"lookup_{name}"] for name in ("blocks", "hits", "misses", "repeats")]


def the_long_way(rig, request):
    """Return what the full lookup answers, and what it adds to the figures."""
    before = figures(rig)
    rig.ladder.loads.lookup(rig.ladder.sessions.open[rig.session], request)
    (effect,), rig.ladder.stack.effects = rig.ladder.stack.effects, []
    assert isinstance(effect, Answer)
    return effect.reply, [now - then for now, then in zip(figures(rig), before, strict=True)]


@pytest.mark.parametrize("fields", [{}, {"promote": True}, {"everywhere": True}])
def test_it_is_what_a_lookup_answers_and_counts(rigged, fields):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2, 3)
    for request in (asked(1, 2, 3, **fields), asked(2, 2, **fields), asked(**fields)):
        before = figures(rig)
        found = rig.ladder.glance(rig.session, request)
        counted = [now - then for now, then in zip(figures(rig), before, strict=True)]
        assert (found, counted) == the_long_way(rig, request)


@pytest.mark.parametrize(
    "fields", [{"lease": 1.0}, {"touch": True}, {"scope": Scope(load_from=("disk",))}], ids=str
)
def test_what_changes_or_narrows_something_needs_a_turn(rigged, fields):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    assert rig.ladder.glance(rig.session, asked(1, **fields)) is None


def test_only_what_everybody_can_see_is_found_at_sight(rigged):
    rig = rigged(8)
    rig.store(1)
    number = rig.ask(PrepareStore, keys=(key(2),))
    assert number in rig.answers
    before = figures(rig)
    assert rig.ladder.glance(rig.session, asked(1, 2)) is None, "reserved"
    assert rig.ladder.glance(rig.session, asked(1, 3)) is None, "missing"
    assert figures(rig) == before, "nothing is counted twice"


def test_a_promoted_block_is_counted_for_its_tier_before_it_is_found_at_sight(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2)
    rig.evict(1, tiers=("cpu",))
    assert rig.lookup(1, promote=True).states == (KeyState.PENDING,)
    assert rig.ladder.glance(rig.session, asked(1)) is None
    assert rig.ladder.glance(rig.session, asked(2)) is not None
    rig.load(1)
    assert rig.ladder.glance(rig.session, asked(1)) == LookedUp(
        id=1000, found=bytes((KeyState.HIT,)), prefix=1
    )


def test_nobody_without_a_session_and_nobody_at_the_end_is_answered(rigged):
    rig = rigged(8)
    rig.store(1)
    assert rig.ladder.glance(rig.session + 1, asked(1)) is None
    other = rig.attach("e1", b"p1")
    rig.feed(SessionClosed(other))
    assert rig.ladder.glance(other, asked(1)) is None
    rig.feed(Stop(keep_pool=True))
    assert rig.ladder.glance(rig.session, asked(1)) is None

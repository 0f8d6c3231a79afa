"""What an operator removes: exactly what was chosen, told block by block, and never a namespace by guess."""

import msgspec
import pytest

from kvtierd.core.effects import ErrorCode, Prepared, Refused, Removed
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId, EventKind
from kvtierd.core.operator import EVICT_SLICE
from kvtierd.core.stimuli import (
    Drain,
    Found,
    FoundBlock,
    OperatorEvict,
    OperatorReset,
    Ordered,
    PrepareStore,
    Resume,
    Status,
    Stop,
    Tick,
)
from kvtierd.testing.rig import LAYOUT, fs_spec, key, meta

NAMESPACE = LAYOUT.namespace()
OTHER = msgspec.structs.replace(LAYOUT, model="other", tenant="t")


def order(rig, request_type, **fields):
    """Give an order on a connection of the control socket; return its number."""
    rig._request += 1
    rig.feed(Ordered(-1, request_type(id=rig._request, **fields)))
    return rig._request


def removed(rig, request_type, **fields):
    return rig.answer(order(rig, request_type, **fields), Removed)


def found(namespace, *numbers):
    return [FoundBlock(Block.of(BlockId(namespace, key(n)), UNIT, meta(n)), UNIT) for n in numbers]


def two_models(rigged):
    """A rig with three blocks of its own model and two of another, in pool and on disk."""
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2, 3, chain=False)
    own, rig.session, rig.layout = rig.session, rig.attach(layout=OTHER), OTHER
    rig.store(1, 2)
    rig.session, rig.layout = own, LAYOUT
    return rig


def test_a_model_s_reset_takes_its_blocks_from_every_tier_and_no_other_model_s(rigged):
    rig = two_models(rigged)
    before = len(rig.events)
    answer = removed(rig, OperatorReset, model="other")
    assert answer.blocks == {"cpu": 2, "disk": 2}
    assert answer.bytes == {"cpu": 2 * UNIT, "disk": 2 * UNIT}
    assert answer.namespaces == (OTHER.namespace(),)
    told = rig.events[before:]
    assert {event.kind for event in told} == {EventKind.REMOVED}
    assert {event.block.namespace for event in told} == {OTHER.namespace()}
    assert len(rig.inventory()) == 6


@pytest.mark.parametrize(
    ("choice", "gone"),
    [
        ({"tenant": "t"}, {"cpu": 2, "disk": 2}),
        ({"tiers": ("disk",)}, {"disk": 5}),
        ({"namespaces": (NAMESPACE[:6],), "tiers": ("cpu",)}, {"cpu": 3}),
        ({"namespaces": (NAMESPACE, OTHER.namespace())}, {"cpu": 5, "disk": 5}),
        ({"model": "rig", "tenant": "t"}, {}),
        ({}, {"cpu": 5, "disk": 5}),
    ],
)
def test_choices_narrow_each_other_down_and_a_dry_run_says_the_same_without_doing_it(rigged, choice, gone):
    rig = two_models(rigged)
    events, stored = len(rig.events), len(rig.storage["disk"])
    assert removed(rig, OperatorReset, **choice, dry_run=True).blocks == gone
    assert (len(rig.events), len(rig.storage["disk"])) == (events, stored)
    assert removed(rig, OperatorReset, **choice).blocks == gone
    assert len(rig.events) == events + sum(gone.values())


def test_a_tier_s_reset_leaves_the_other_tiers_alone(rigged):
    """Their readers must not hear that everything was cleared."""
    rig = two_models(rigged)
    before = len(rig.events)
    removed(rig, OperatorReset, tiers=("disk",))
    assert {event.tier for event in rig.events[before:]} == {"disk"}
    assert {tier for tier, _ in rig.inventory()} == {"cpu"}


def test_a_namespace_whose_model_nobody_told_is_left_alone_and_named(rigged):
    rig = rigged(8, [fs_spec()], scanned=False)
    rig.feed(Found("disk", found("f" * 32, 7, 8), last=True))
    answer = removed(rig, OperatorReset, model="rig")
    assert answer.unknown == ("f" * 32,)
    assert answer.blocks == {}
    assert removed(rig, OperatorReset, namespaces=("fff",)).blocks == {"disk": 2}


def test_while_a_tier_is_indexed_only_what_cannot_miss_anything_is_taken(rigged):
    rig = rigged(8, [fs_spec()], scanned=False)
    refused = rig.answer(order(rig, OperatorReset, model="rig"), Refused)
    assert refused.code is ErrorCode.BUSY
    assert "being indexed" in refused.message
    number = order(rig, OperatorReset)
    assert number not in rig.answers, "what the scan finds has to go first"
    rig.storage["disk"] = {f.block.id: f.block for f in found("f" * 32, 7)}
    rig.feed(Found("disk", found("f" * 32, 7), last=True))
    assert rig.answer(number, Removed).blocks == {}
    assert rig.storage["disk"] == {}, "the scan came across it and had it deleted"
    assert not rig.ladder.stack.by_name["disk"].all_unwelcome, "what is stored from now on is welcome"


def test_a_reset_of_everything_is_answered_when_storage_is_gone(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    rig.hold = True
    number = order(rig, OperatorReset)
    assert number not in rig.answers
    rig.run_held()
    assert rig.answer(number, Removed).blocks == {"cpu": 1, "disk": 1}


@pytest.mark.parametrize(
    ("request_type", "fields", "words"),
    [
        (OperatorReset, {"tiers": ("dsk",)}, "did you mean 'disk'? the tiers are cpu, disk"),
        (OperatorReset, {"namespaces": ("zz",)}, "no namespace begins with 'zz'"),
        (OperatorEvict, {"tier": "dsk", "blocks": 1}, "did you mean 'disk'?"),
        (OperatorEvict, {"tier": "disk"}, "a number of blocks or bytes, or a namespace"),
        (OperatorEvict, {"tier": "disk", "namespace": "zz"}, "no namespace begins with 'zz'"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(rigged, request_type, fields, words):
    rig = two_models(rigged)
    assert words in rig.answer(order(rig, request_type, **fields), Refused).message
    assert len(rig.inventory()) + 4 == 10


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("bound", [{"blocks": 2}, {"bytes": UNIT + 1}])
def test_evict_ends_where_it_was_told_and_takes_leaves_first(rigged, tier, bound):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2, 3, 4)
    before = len(rig.events)
    answer = removed(rig, OperatorEvict, tier=tier, **bound)
    assert answer.blocks == {tier: 2}
    assert [event.block.key for event in rig.events[before:]] == [key(4), key(3)]
    assert {event.tier for event in rig.events[before:]} == {tier}


def test_evict_of_a_namespace_spares_what_is_in_use_and_says_so(rigged):
    rig = two_models(rigged)
    lease = rig.lookup(2, lease=5.0)
    answer = removed(rig, OperatorEvict, tier="cpu", namespace=NAMESPACE[:8])
    assert answer.blocks == {"cpu": 2}
    assert answer.left == 1
    assert lease.lease is not None
    assert removed(rig, OperatorEvict, tier="disk", namespace=OTHER.namespace()).blocks == {"disk": 2}
    assert rig.storage["disk"].keys() == {BlockId(NAMESPACE, key(n)) for n in (1, 2, 3)}


def test_a_large_eviction_takes_many_turns(rigged):
    """An engine's request is served between two of them."""
    rig = rigged(2 * EVICT_SLICE + 10)
    rig.store(*range(1, 2 * EVICT_SLICE + 5))
    number = order(rig, OperatorEvict, tier="cpu", blocks=10**6)
    assert len(rig.inventory()) == EVICT_SLICE + 4
    assert rig.ladder.next_deadline() == rig.now, "the next turn is wanted at once"
    rig.feed(Tick())
    assert number not in rig.answers
    rig.feed(Tick())
    assert rig.answer(number, Removed).blocks == {"cpu": 2 * EVICT_SLICE + 4}
    assert rig.ladder.next_deadline() is None


def test_an_eviction_that_a_stop_cuts_short_is_answered_with_what_was_done(rigged):
    rig = rigged(2 * EVICT_SLICE)
    rig.store(*range(1, 2 * EVICT_SLICE))
    number = order(rig, OperatorEvict, tier="cpu", blocks=10**6)
    rig.feed(Stop())
    assert rig.answer(number, Removed).blocks == {"cpu": EVICT_SLICE}
    assert rig.answer(order(rig, OperatorReset), Refused).code is ErrorCode.STOPPING


def test_evict_answers_though_storage_does_not_delete(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2)
    rig.judge = lambda op, tier, bid: Status.FAILED if op == "delete" else Status.OK
    assert removed(rig, OperatorEvict, tier="disk", blocks=5).blocks == {"disk": 2}
    rig.judge = lambda op, tier, bid: Status.OK


def test_a_drained_ladder_takes_no_stores_and_serves_loads_until_it_is_resumed(rigged):
    rig = rigged(8, [fs_spec(on_evict=True)])
    rig.store(1)
    rig.feed(Drain(stores=False))
    assert set(rig.storage["disk"]) == {BlockId(NAMESPACE, key(1))}, "written down"
    number = rig.ask(PrepareStore, keys=(key(2),))
    assert rig.answer(number, Refused).code is ErrorCode.STOPPING
    assert rig.lookup(1).prefix == 1
    rig.feed(Drain())
    rig.answer(rig.ask(PrepareStore, keys=(key(2),)), Refused)
    rig.feed(Resume())
    assert rig.answer(rig.ask(PrepareStore, keys=(key(2),)), Prepared).keys == (key(2),)

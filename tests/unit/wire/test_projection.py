"""What an audience is told: one announcement a residency change, under the reader's own key."""

import random

import pytest

from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    block_key,
)
from kvtierd.wire.kvevents import Form
from kvtierd.wire.places import place_of
from kvtierd.wire.projection import Projection, View, runs_of

BASE = 0xF100000000000000


def block(*numbers, parent=None, rank=0, group=0, namespace="ns"):
    hashes = tuple(BASE + number for number in numbers)
    return Block.of(
        BlockId(namespace, block_key(bytes([*numbers]), group)),
        4096,
        BlockMeta(
            hashes=hashes,
            parent=None if parent is None else BASE + parent,
            token_ids=tuple(range(4 * len(hashes))),
            block_size=4,
        ),
        rank,
    )


def stored(what, tier="cpu", medium=Medium.CPU, locality=None):
    return TierEvent(EventKind.STORED, tier, medium, locality, what)


def removed(what, tier="cpu", medium=Medium.CPU, locality=None):
    return TierEvent(EventKind.REMOVED, tier, medium, locality, what)


def said(projection, *events):
    """What the reader hears: +n or -n for hash number n."""
    heard = projection.apply(events)
    return [(change.key[0] - BASE) * (1 if change.block else -1) for change in heard]


def test_two_tiers_under_one_key_are_one_residency():
    projection = Projection()
    fs, obj = {"tier": "fs", "medium": Medium.STORAGE}, {"tier": "obj", "medium": Medium.STORAGE}
    assert said(projection, stored(block(1), **fs), stored(block(1), **obj)) == [1]
    assert said(projection, removed(block(1), **fs)) == []
    assert said(projection, removed(block(1), **obj)) == [-1]
    assert len(projection) == 0


@pytest.mark.parametrize("locality", [Locality.LOCAL, Locality.REMOTE])
def test_medium_and_locality_are_part_of_the_key(locality):
    """L11: leaving CPU says nothing about storage."""
    projection = Projection()
    on_disk = {"tier": "fs", "medium": Medium.STORAGE, "locality": locality}
    assert said(projection, stored(block(1)), stored(block(1), **on_disk)) == [1, 1]
    (change,) = projection.apply([removed(block(1))])
    assert (change.place.medium, change.place.locality) == (Medium.CPU, None)
    (change,) = projection.apply([removed(block(1), **on_disk)])
    assert change.to_wire().locality == locality.value


def test_a_form_without_locality_folds_tiers_that_differ_only_there():
    projection = Projection(View(form=Form.ARRAY))
    local = {"tier": "fs", "medium": Medium.STORAGE, "locality": Locality.LOCAL}
    remote = {"tier": "obj", "medium": Medium.STORAGE, "locality": Locality.REMOTE}
    assert said(
        projection, stored(block(1), **local), stored(block(1), **remote), removed(block(1), **local)
    ) == [1]
    assert said(projection, removed(block(1), **remote)) == [-1]


def test_a_hash_shared_by_overlapping_chunks_goes_with_the_last_of_them():
    """L05."""
    projection = Projection()
    assert said(projection, stored(block(1, 2)), stored(block(2, 3, parent=1))) == [1, 2, 3]
    assert said(projection, removed(block(1, 2))) == [-1]
    assert said(projection, removed(block(2, 3))) == [-3, -2]


def test_equal_keys_of_two_namespaces_are_one_to_a_reader_and_two_dp_ranks_are_not():
    projection = Projection()
    assert said(projection, stored(block(1)), stored(block(1, namespace="other"))) == [1]
    runs = runs_of(
        projection.apply([stored(block(1, rank=1)), removed(block(1)), removed(block(1, namespace="other"))])
    )
    assert [(run.rank, [bool(c.block) for c in run.changes]) for run in runs] == [(1, [True]), (0, [False])]


def test_runs_keep_the_drain_order_and_never_mix_ranks():
    projection = Projection()
    runs = runs_of(projection.apply([stored(block(n, rank=n // 2 % 2)) for n in range(1, 7)]))
    assert [(run.rank, [c.key[0] - BASE for c in run.changes]) for run in runs] == [
        (0, [1]),
        (1, [2, 3]),
        (0, [4, 5]),
        (1, [6]),
    ]


def test_media_that_an_audience_does_not_want_are_neither_told_nor_counted():
    projection = Projection(View(media=frozenset({"CPU"})))
    on_disk = {"tier": "fs", "medium": Medium.STORAGE}
    assert said(projection, stored(block(1), **on_disk), stored(block(1)), removed(block(1), **on_disk)) == [
        1
    ]


def test_the_removal_has_the_form_of_the_store_that_was_announced():
    projection = Projection()
    bare = Block.of(BlockId("ns", block_key((BASE + 1).to_bytes(8, "big"))), 4096)
    rich = block(1)
    rich = Block.of(rich.id, 4096, BlockMeta(hashes=rich.hashes, spec_kind=None))
    on_disk = {"tier": "fs", "medium": Medium.STORAGE}
    projection.apply([stored(rich), stored(bare, tier="fs2", medium=Medium.CPU)])
    (change,) = projection.apply([removed(rich), removed(bare, tier="fs2", medium=Medium.CPU)])
    assert change.to_wire().group_idx is None
    projection.apply([stored(bare, **on_disk)])
    (change,) = projection.apply([removed(rich, **on_disk)])
    assert change.to_wire().group_idx == 0


def test_a_removal_of_what_was_never_stored_is_counted_and_told_to_nobody():
    projection = Projection()
    assert said(projection, removed(block(1))) == []
    assert projection.unmatched == 1


def test_the_snapshot_names_parents_before_children_whatever_order_they_came_in():
    """L25."""
    projection = Projection()
    chain = [block(n, parent=n - 1 if n > 1 else None) for n in range(1, 100)]
    random.Random(7).shuffle(chain)
    tiers = [{}, {"tier": "fs", "medium": Medium.STORAGE, "locality": Locality.LOCAL}]
    projection.apply([stored(b, **tiers[i % 2]) for i, b in enumerate(chain)])
    known = set()
    for told in projection.resident():
        assert told.parent_block_hash is None or told.parent_block_hash in known
        known.update(told.block_hashes)
    assert len(known) == 99


def test_a_cycle_of_parents_does_not_hang_the_snapshot():
    projection = Projection()
    projection.apply([stored(block(1, parent=2)), stored(block(2, parent=1))])
    assert len(list(projection.resident())) == 2


OTHER_WORDS = (
    (8, 3, "NOWHERE", "LOCAL"),
    (7, 4, "NOWHERE", "LOCAL"),
    (7, 3, "", "LOCAL"),
    (7, 3, "NOWHERE", None),
    (7, 3, "NOWHERE", "None"),
)


def test_places_are_equal_where_all_their_words_are():
    words = (7, 3, "NOWHERE", "LOCAL")
    place = place_of(*words)
    place_of.cache_clear()
    again = place_of(*words)
    assert again is not place
    assert (again, hash(again)) == (place, hash(place))
    others = [
        (8, 3, "NOWHERE", "LOCAL"),
        (7, 4, "NOWHERE", "LOCAL"),
        (7, 3, "", "LOCAL"),
        (7, 3, "NOWHERE", None),
    ]
    assert {place, *(place_of(*other) for other in others)} == {place_of(*w) for w in [words, *others]}
    assert len({place, *(place_of(*other) for other in others)}) == 5
    assert place_of(7, 3, "NOWHERE', 'LOCAL", None) != place_of(7, 3, "NOWHERE", "LOCAL', None")
    assert place.of_rank(8) == place_of(8, 3, "NOWHERE", "LOCAL")

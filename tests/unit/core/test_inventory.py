"""Inventory pages: one snapshot, cut anywhere."""

from __future__ import annotations

import pytest

from kvtierd.core.effects import InventoryPage
from kvtierd.core.stimuli import Inventory
from kvtierd.testing.rig import fs_spec, key


def pages(rig, limit, between=lambda: None, **fields):
    cursor, found, totals = 0, [], set()
    while True:
        page = rig.answer(rig.ask(Inventory, cursor=cursor, limit=limit, **fields), InventoryPage)
        found += page.entries
        totals.add(page.total)
        cursor = page.cursor
        if not cursor:
            return [(entry.tier, entry.key) for entry in found], totals
        between()


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 100])
def test_pages_of_any_size_add_up_to_the_whole_in_drain_order(rigged, limit):
    rig = rigged(8, [fs_spec("disk"), fs_spec("lake")])
    rig.store(1, 2, 3, chain=False)
    rig.evict(2, tiers=("cpu", "lake"))
    whole = [("cpu", 1), ("cpu", 3), ("disk", 1), ("disk", 2), ("disk", 3), ("lake", 1), ("lake", 3)]
    assert pages(rig, limit) == ([(tier, key(n)) for tier, n in whole], {7})
    assert pages(rig, limit, tier="disk")[0] == [("disk", key(n)) for n in (1, 2, 3)]


def test_what_changes_between_two_pages_is_not_in_the_snapshot(rigged):
    rig = rigged(8)
    rig.store(1, 2, 3, 4, chain=False)
    found, totals = pages(rig, 1, between=lambda: (rig.evict(4), rig.store(5)))
    assert (found, totals) == ([("cpu", key(n)) for n in (1, 2, 3, 4)], {4})
    assert pages(rig, 9)[0] == [("cpu", key(n)) for n in (1, 2, 3, 5)]

"""Cells that say what no tier has."""

from __future__ import annotations

from zlib import crc32

from kvtierd.core.model import BlockKey
from kvtierd.core.presence import FULL, Presence

ONE, OTHER = BlockKey(b"a" * 36), BlockKey(b"b" * 36)


def shown(presence: Presence, key: BlockKey) -> int:
    """What a client sees of a key."""
    return presence.cells[crc32(key) & (len(presence.cells) - 1)]


def test_a_block_shows_as_long_as_any_tier_has_it() -> None:
    presence = Presence(bytearray(1 << 10))
    assert not any(presence.cells)
    presence.add(ONE)
    presence.add(ONE)
    presence.remove(ONE)
    assert shown(presence, ONE) == 1
    assert shown(presence, OTHER) == 0
    presence.remove(ONE)
    assert not any(presence.cells)


def test_a_cell_that_lost_count_goes_on_saying_ask() -> None:
    presence = Presence(bytearray(1))
    for _ in range(FULL + 5):
        presence.add(ONE)
    for _ in range(FULL + 5):
        presence.remove(ONE)
    assert shown(presence, OTHER) == FULL


def test_a_retired_one_says_ask_whatever_comes_and_goes() -> None:
    presence = Presence(bytearray(4))
    presence.add(ONE)
    presence.retire()
    presence.remove(ONE)
    presence.add(OTHER)
    presence.remove(OTHER)
    assert set(presence.cells) == {FULL}

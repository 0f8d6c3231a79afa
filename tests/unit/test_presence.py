"""The memory in which engines see what the tiers have: theirs to read, the daemon's to write."""

from __future__ import annotations

import contextlib
import mmap
import os

import pytest

from kvtierd.core.model import BlockKey
from kvtierd.edges.presence import SharedPresence, cells_for

KEY = BlockKey(bytes(36))


def test_who_gets_the_descriptor_sees_every_change_and_can_make_none():
    with contextlib.closing(SharedPresence(1 << 20)) as presence:
        assert presence.safe
        size = len(presence.cells)
        with pytest.raises(PermissionError):
            mmap.mmap(presence.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(presence.fd, b"\0", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(presence.fd, 0)
        with mmap.mmap(presence.fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
            presence.add(KEY)
            assert sum(seen[:]) == 1
            presence.remove(KEY)
            assert not any(seen[:])
            presence.add(KEY)
            presence.retire()
            assert set(seen[:]) == {255}


@pytest.mark.parametrize(
    ("pool", "cells"), [(1 << 20, 1 << 16), (1 << 30, 1 << 18), (64 << 30, 1 << 24), (1 << 40, 1 << 24)]
)
def test_cells_grow_with_the_pool_within_bounds(pool, cells):
    assert cells_for(pool) == cells

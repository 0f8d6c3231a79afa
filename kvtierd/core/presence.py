"""What the daemon surely does not have, for engines to see without asking.

A request without a hit is the common one, and waiting for the daemon to say so delays its first token. So the
daemon keeps a count of its blocks per *cell* in memory that engines map read-only: a key's cell is the CRC-32
of the key modulo the number of cells. A cell of zero means that no tier has the block, in any namespace and
any state; anything else means that one has to ask. The counts can only err on the side of asking.
"""

from __future__ import annotations

from zlib import crc32

from kvtierd.core.model import BlockKey

FULL = 255
"""A cell that ever got so far stays there: its count is not known any more."""


class Presence:
    """Counts blocks per cell. ``cells``: writable bytes, all zero, a power of two of them."""

    def __init__(self, cells: bytearray | memoryview) -> None:
        assert len(cells) & (len(cells) - 1) == 0, len(cells)
        self.cells = cells
        self._mask = len(cells) - 1

    def add(self, key: BlockKey) -> None:
        """A tier got a block."""
        cell = crc32(key) & self._mask
        count = self.cells[cell]
        if count < FULL:
            self.cells[cell] = count + 1

    def remove(self, key: BlockKey) -> None:
        """A tier lost a block that was added."""
        cell = crc32(key) & self._mask
        count = self.cells[cell]
        if count < FULL:
            self.cells[cell] = count - 1

    def retire(self) -> None:
        """Say nothing any more: who still looks here has to ask."""
        self.cells[:] = b"\xff" * len(self.cells)

"""The shared memory behind :class:`kvtierd.core.presence.Presence`."""

from __future__ import annotations

import mmap
import os

from kvtierd.core.presence import FULL, Presence
from kvtierd.edges import backing

_BYTES_PER_CELL = 8 << 10
"""Of the pool. Blocks are larger by far and other tiers often ten times the pool, so most cells are zero."""
_LEAST, _MOST = 16, 24


def cells_for(pool_bytes: int) -> int:
    """Return how many cells go with a pool: 64 Ki to 16 Mi, one byte each."""
    bits = (pool_bytes // _BYTES_PER_CELL).bit_length()
    return 1 << min(max(bits, _LEAST), _MOST)


class SharedPresence(Presence):
    """Cells that other processes can map; ``fd`` is this object's and is for them.

    ``safe``: they can read alone, so that none of them can mislead another one, or the count itself.
    """

    def __init__(self, pool_bytes: int) -> None:
        """Make the memory that goes with a pool of so many bytes.

        Raises:
            OSError: the kernel gives none.
        """
        size = cells_for(pool_bytes)
        self.fd = backing.open_memfd(size, sealed=False)
        try:
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        self.safe = backing.seal_for_readers(self.fd)
        super().__init__(memoryview(self._map))

    def close(self) -> None:
        """Have everybody ask from now on, and let go of the memory; counting goes on in vain."""
        self.retire()
        cells, self.cells, self._mask = self.cells, bytearray((FULL,)), 0
        assert isinstance(cells, memoryview)
        cells.release()
        self._map.close()
        os.close(self.fd)

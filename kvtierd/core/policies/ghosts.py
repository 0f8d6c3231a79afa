"""Names of blocks that were evicted, with a number each: a bounded memory, oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from kvtierd.core.model import BlockId


class Ghosts:
    """Holds no block, only names; the bound comes with every call because capacities can be unknown."""

    def __init__(self) -> None:
        self._notes: OrderedDict[BlockId, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def put(self, block_id: BlockId, note: int, limit: int) -> None:
        """Remember a block as the latest, and at most ``limit`` in all."""
        self._notes.pop(block_id, None)
        self._notes[block_id] = note
        self.trim(limit)

    def trim(self, limit: int) -> None:
        """Forget the oldest beyond ``limit``."""
        while len(self._notes) > max(0, limit):
            self._notes.popitem(last=False)

    def take(self, block_id: BlockId) -> int | None:
        """Return a block's note and forget it; ``None`` when it is not remembered."""
        return self._notes.pop(block_id, None)

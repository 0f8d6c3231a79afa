"""S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue with second chances, ghosts.

The paper's figures: the small queue has a tenth of the blocks, a block counts up to three uses, the ghosts
are as many as the blocks. Queues hold all blocks in order of arrival; only evictable ones are candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtierd.core.policies.base import Aging
from kvtierd.core.policies.ghosts import Ghosts
from kvtierd.core.policies.order import Order

if TYPE_CHECKING:
    from kvtierd.core.residency import Node

_SMALL, _MAIN = 0, 1
_MOST_USES = 3
_PASSED = 2
"""Uses that end a block's probation well."""

_SECOND_CHANCES = 256
"""In one search for a victim, so that a million used blocks cannot stall it."""


class S3Fifo(Aging):
    """``stamp``: place in the queue; ``shelf``: which queue; ``hits``: uses worth a second chance."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = 0
        self._queues = (Order(), Order())
        self._in_small = 0
        self._ghosts = Ghosts()

    def inserted(self, node: Node) -> None:
        """Put a new block on probation, one that is remembered straight into the main queue."""
        self._arrive(node)
        known = self._ghosts.take(node.block.id) is not None
        node.hits = 0
        self._enqueue(node, _MAIN if known else _SMALL)
        self._in_small += not known

    def _enqueue(self, node: Node, queue: int) -> None:
        self._arrivals += 1
        node.stamp = self._arrivals
        node.shelf = queue

    def touched(self, node: Node) -> None:
        """Count a use; the place in the queue stays."""
        if self._is_another_use(node):
            node.hits = min(node.hits + 1, _MOST_USES)

    def offer(self, node: Node) -> None:
        """Make the block a candidate at its place in its queue."""
        node.place = node.stamp
        self._queues[node.shelf].add(node.place, node)

    def withdraw(self, node: Node) -> None:
        """Make the block no candidate."""
        self._queues[node.shelf].remove(node.place)
        node.place = -1

    def removed(self, node: Node, *, evicted: bool) -> None:
        """Remember a block that failed its probation."""
        self.residents -= 1
        if node.shelf == _SMALL:
            self._in_small -= 1
            if evicted:
                self._ghosts.put(node.block.id, 0, self.residents + 1)

    def victim(self) -> Node | None:
        """Return the first unused block of the queue whose turn it is; used ones get their second chance."""
        for _ in range(_SECOND_CHANCES):
            node = self._head()
            if node is None or node.hits < (_PASSED if node.shelf == _SMALL else 1):
                return node
            self.withdraw(node)
            if node.shelf == _SMALL:
                self._in_small -= 1
                node.hits = 0
            else:
                node.hits -= 1
            self._enqueue(node, _MAIN)
            self.offer(node)
        return self._head()

    def _head(self) -> Node | None:
        small_first = self._in_small * 10 > self.residents
        first, second = self._queues if small_first else reversed(self._queues)
        return first.first() or second.first()

"""Least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.core.residency import Node

_SLACK = 1024


class Lru:
    """A lazy heap over the evictable blocks only: pinned ones and parents cost nothing.

    Entries go stale when a block is touched, pinned, removed or gets a child; they are dropped when they
    surface, and the heap is rebuilt when stale ones outnumber the live.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._heap: list[tuple[int, Node]] = []
        self._live = _SLACK

    def touch(self, node: Node) -> None:
        """Make the block the most recent one; its place in the heap is renewed by the next offer."""
        self._clock += 1
        node.touch = self._clock

    def offer(self, node: Node) -> None:
        """Put the block where eviction can find it. ``touch`` values are unique, so nodes never compare."""
        if node.offered == node.touch:
            return
        node.offered = node.touch
        heapq.heappush(self._heap, (node.touch, node))
        if len(self._heap) > 2 * self._live:
            self._compact()

    def victim(self, evictable: Callable[[Node], bool]) -> Node | None:
        """Return the least recently used evictable block and leave it in place."""
        while self._heap:
            touch, node = self._heap[0]
            if node.touch == touch and evictable(node):
                return node
            heapq.heappop(self._heap)
            if node.offered == touch:
                node.offered = 0
        return None

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[1].touch == entry[0] and not entry[1].gone]
        heapq.heapify(self._heap)
        self._live = max(_SLACK, len(self._heap))

"""Nodes in the order of growing numbers: first, add and remove in constant time, nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.core.residency import Node

_BITS = 8
_MASK = (1 << _BITS) - 1
_LEVELS = 6


class Order:
    """A radix tree of bit masks over numbers below 2^48; most changes touch only its lowest level.

    Unlike a lazy heap it has no stale entries to wade through: a million blocks that were pinned one by one
    cost the next question nothing.
    """

    __slots__ = ("_levels", "_nodes")

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._levels: tuple[dict[int, int], ...] = tuple({} for _ in range(_LEVELS))

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, number: int, node: Node) -> None:
        """Put a node at a number that is free."""
        self._nodes[number] = node
        for level in self._levels:
            upper = number >> _BITS
            mask = level.get(upper, 0)
            level[upper] = mask | 1 << (number & _MASK)
            if mask:
                return
            number = upper

    def remove(self, number: int) -> None:
        """Free a number."""
        del self._nodes[number]
        for level in self._levels:
            upper = number >> _BITS
            mask = level[upper] ^ 1 << (number & _MASK)
            if mask:
                level[upper] = mask
                return
            del level[upper]
            number = upper

    def first(self) -> Node | None:
        """Return the node with the smallest number."""
        if not self._nodes:
            return None
        number = 0
        for level in reversed(self._levels):
            mask = level[number]
            number = number << _BITS | ((mask & -mask).bit_length() - 1)
        return self._nodes[number]

"""Nodes in the order of growing numbers: first, add and remove in constant time, nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.core.residency import Node

_BITS = 8
_MASK = (1 << _BITS) - 1


class Order:
    """A radix tree of bit masks over whole numbers; most changes touch only its lowest level.

    Unlike a lazy heap it has no stale entries to wade through: a million blocks that were pinned one by one
    cost the next question nothing. It grows a level when a number needs one: three reach to 2^24.
    """

    __slots__ = ("_end", "_levels", "_nodes")

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._levels: list[dict[int, int]] = [{}]
        """From the lowest; a mask says which numbers of the level below are there."""
        self._end = 1 << _BITS
        """The first number that needs one more."""

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, number: int, node: Node) -> None:
        """Put a node at a number that is free."""
        if number >= self._end:
            self._deepen(number)
        self._nodes[number] = node
        for level in self._levels:
            upper = number >> _BITS
            mask = level.get(upper, 0)
            level[upper] = mask | 1 << (number & _MASK)
            if mask:
                return
            number = upper

    def _deepen(self, number: int) -> None:
        while number >= self._end:
            self._levels.append({0: 1} if self._nodes else {})
            self._end <<= _BITS

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

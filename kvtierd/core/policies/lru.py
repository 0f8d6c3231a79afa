"""Least recently used first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtierd.core.policies.order import Order

if TYPE_CHECKING:
    from kvtierd.core.residency import Node


class Lru:
    """Evicts the evictable block whose last use is oldest. ``stamp``: number of the last use."""

    def __init__(self) -> None:
        self._uses = 0
        self._order = Order()

    def inserted(self, node: Node) -> None:
        """Make the block the most recent one."""
        self._uses += 1
        node.stamp = self._uses

    def touched(self, node: Node) -> None:
        """Make the block the most recent one."""
        self._uses += 1
        node.stamp = self._uses
        if node.place >= 0:
            self._order.remove(node.place)
            self.offer(node)

    def offer(self, node: Node) -> None:
        """Put the block where its last use belongs."""
        node.place = node.stamp
        self._order.add(node.place, node)

    def withdraw(self, node: Node) -> None:
        """Take the block out of the order; it keeps its stamp."""
        self._order.remove(node.place)
        node.place = -1

    def removed(self, node: Node, *, evicted: bool) -> None:
        """Nothing to remember."""

    def victim(self) -> Node | None:
        """Return the least recently used evictable block."""
        return self._order.first()

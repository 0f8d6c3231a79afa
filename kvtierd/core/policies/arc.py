"""ARC (Megiddo and Modha, FAST 2003): recency against frequency, balanced by the ghosts of either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtierd.core.policies.base import Aging
from kvtierd.core.policies.ghosts import Ghosts
from kvtierd.core.policies.order import Order

if TYPE_CHECKING:
    from kvtierd.core.residency import Node


_ONCE, _OFTEN = 0, 1


class Side:
    """Blocks of one kind by last use; ``count`` has also those that cannot be evicted now."""

    def __init__(self) -> None:
        self.count = 0
        self.order = Order()
        self.ghosts = Ghosts()


class Arc(Aging):
    """``stamp``: number of the last use; ``shelf``: the number of the block's side.

    The paper's cache size is the number of residents here, which is the same whenever something is evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses = 0
        self._once = Side()
        self._often = Side()
        self._sides = (self._once, self._often)
        self._target = 0.0
        """How many blocks the side of blocks used once should have."""

    def inserted(self, node: Node) -> None:
        """Put a new block among those used once; a ghost's return moves the target towards its side."""
        self._arrive(node)
        self._uses += 1
        node.stamp = self._uses
        once, often = len(self._once.ghosts), len(self._often.ghosts)
        if self._once.ghosts.take(node.block.id) is not None:
            self._target = min(self._target + max(1.0, often / once), float(self.residents))
        elif self._often.ghosts.take(node.block.id) is not None:
            self._target = max(self._target - max(1.0, once / often), 0.0)
        else:
            self._put(node, _ONCE)
            return
        self._put(node, _OFTEN)

    def _put(self, node: Node, side: int) -> None:
        self._sides[side].count += 1
        node.shelf = side

    def touched(self, node: Node) -> None:
        """Make the block the most recent one, from its second use on among those used often."""
        offered = node.place >= 0
        if offered:
            self.withdraw(node)
        self._uses += 1
        node.stamp = self._uses
        if self._is_another_use(node):
            self._sides[node.shelf].count -= 1
            self._put(node, _OFTEN)
        if offered:
            self.offer(node)

    def offer(self, node: Node) -> None:
        """Put the block where its last use belongs, on its side."""
        node.place = node.stamp
        self._sides[node.shelf].order.add(node.place, node)

    def withdraw(self, node: Node) -> None:
        """Take the block out of its side's order."""
        self._sides[node.shelf].order.remove(node.place)
        node.place = -1

    def removed(self, node: Node, *, evicted: bool) -> None:
        """Remember an evicted block as a ghost of its side."""
        self.residents -= 1
        side = self._sides[node.shelf]
        side.count -= 1
        if evicted:
            size = self.residents + 1
            side.ghosts.put(node.block.id, 0, size)
            self._once.ghosts.trim(size - self._once.count)
            self._often.ghosts.trim(size - len(self._once.ghosts))

    def victim(self) -> Node | None:
        """Return the oldest block of the side that is over its target, else of the other one."""
        once_first = self._once.count > self._target
        first, second = (self._once, self._often) if once_first else (self._often, self._once)
        return first.order.first() or second.order.first()

"""What an eviction policy is told and asked; the structure around it is :mod:`kvtierd.core.residency`'s.

A policy keeps its own notes on a node in three numbers that nobody else reads: ``stamp``, ``shelf`` and
``place``. ``place`` is -1 exactly while the block is not offered for eviction. Time is counted in insertions,
so that it runs with the pressure on the tier and stands still with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvtierd.core.residency import Node

SAME_USE_SHIFT = 7
_NOTED_SHIFT = 10


class Policy(Protocol):
    """Orders the blocks of one resident set; decides only which evictable block goes first."""

    def inserted(self, node: Node) -> None:
        """Note that a block came into the set; it is not offered yet."""

    def touched(self, node: Node) -> None:
        """Note a use of the block."""

    def offer(self, node: Node) -> None:
        """Take a block that became evictable (unpinned, no child in the set) and set its ``place``."""

    def withdraw(self, node: Node) -> None:
        """Take an offered block back and set its ``place`` to -1."""

    def removed(self, node: Node, *, evicted: bool) -> None:
        """Note that a block, not offered any more, left the set.

        Not ``evicted``: it never became visible, its insertion came to nothing.
        """

    def victim(self) -> Node | None:
        """Return the offered block to evict first and leave it in place; ``None`` when none is offered.

        Costs constant or logarithmic time in the size of the set.
        """


class Aging:
    """Logical time, and what counts as one more use of a block.

    An engine names the blocks of one request several times: when it arrives, when it is loaded, when it is
    stored. Only a use that comes later than a small share of the set's turnover counts as another one.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.residents = 0
        self._noted = 0

    def _arrive(self, node: Node) -> None:
        self.clock += 1
        self.residents += 1
        self._note_use(node)

    def _note_use(self, node: Node) -> None:
        """Note the time to a thousandth of the set: so blocks share the number, which takes 32 bytes."""
        if self.clock - self._noted > self.residents >> _NOTED_SHIFT:
            self._noted = self.clock
        node.touch = self._noted

    def _is_another_use(self, node: Node) -> bool:
        """Whether this is not the last counted use still; if so, count it as the last."""
        if self.clock - node.touch <= self.residents >> SAME_USE_SHIFT:
            return False
        self._note_use(node)
        return True

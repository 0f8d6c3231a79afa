"""What an eviction policy is asked; the leaf-first structure around it is :mod:`kvtierd.core.residency`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvtierd.core.residency import Node


class Policy(Protocol):
    """Orders the blocks of one resident set; decides only which evictable block goes first."""

    def touch(self, node: Node) -> None:
        """Note that the block was just used or stored."""

    def offer(self, node: Node) -> None:
        """Note that the block became evictable: unpinned and without a resident child."""

    def victim(self, evictable: Callable[[Node], bool]) -> Node | None:
        """Return the block to evict first, or ``None``; costs no more than logarithmic time."""

"""What has to be written down of the pool so that the next daemon can go on with it.

The core notes every change here while it happens; the edge that keeps the record takes the changes of a turn
and writes them before any effect of that turn is carried out. So a slot is on record as empty before anybody
may write into it, and as holding a block only after its bytes are there. :class:`PoolState` is what such a
record amounts to when it is read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtierd.core.model import Block, Layout


class Placed(NamedTuple):
    """A block became visible in a slot (its first unit)."""

    slot: int
    generation: int
    block: Block


class Vacated(NamedTuple):
    """A slot holds no visible block any more."""

    slot: int


class Shaped(NamedTuple):
    """A layout's share of the pool is now these runs of units; without any, the layout has left it."""

    layout: Layout
    extents: tuple[tuple[int, int], ...]


class Held(NamedTuple):
    """An engine may copy into or out of slots, under the number of a job or lease."""

    number: int
    engine: str
    namespace: str
    slots: tuple[int, ...]


class Ended(NamedTuple):
    """Nobody copies under this number any more."""

    number: int


class Mapped(NamedTuple):
    """A process maps the pool for an engine."""

    engine: str
    process: bytes
    namespace: str
    dp_rank: int


class Unmapped(NamedTuple):
    """A process no longer touches the pool for some engines (``None``: for any)."""

    process: bytes
    engines: tuple[str, ...] | None


Change = Placed | Vacated | Shaped | Held | Ended | Mapped | Unmapped


class Counters(NamedTuple):
    """The last numbers that were given out: none may be given out again for the same pool."""

    fence: int = 0
    number: int = 0
    generation: int = 0


COPY_LIMIT = 1 << 17
"""Changes that are kept for a second reader."""


class Ledger:
    """The changes since they were last taken. Notes nothing unless ``on``."""

    def __init__(self) -> None:
        self.on = False
        self._changes: list[Change] = []
        self._copy: list[Change] | None = None

    def note(self, change: Change) -> None:
        """Note one change."""
        if self.on:
            self._changes.append(change)

    def take(self) -> list[Change]:
        """Return and forget the changes, oldest first."""
        changes, self._changes = self._changes, []
        if self._copy is not None:
            self._copy += changes
            if len(self._copy) > COPY_LIMIT:
                self._copy = None
        return changes

    def copy(self) -> None:
        """Keep what is taken from now on for a second reader, too."""
        self._copy = []

    def copied(self) -> list[Change] | None:
        """Return what was kept and keep no more; ``None`` if that was too much, or nothing was kept."""
        changes, self._copy = self._copy, None
        return changes


@dataclass(slots=True)
class PoolState:
    """A pool as it was left: layouts, blocks, and who may still be copying.

    ``blocks`` by slot, in the order in which they came; ``mapped`` keeps the (namespace, dp rank) pairs with
    which each process attached for an engine.
    """

    counters: Counters = field(default_factory=Counters)
    shapes: dict[str, Shaped] = field(default_factory=dict)
    blocks: dict[int, Placed] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    mapped: dict[tuple[str, bytes], set[tuple[str, int]]] = field(default_factory=dict)

    def apply(self, changes: Iterable[Change]) -> None:
        """Take changes in, oldest first."""
        for change in changes:
            match change:
                case Placed(slot):
                    self.blocks.pop(slot, None)
                    self.blocks[slot] = change
                case Vacated(slot):
                    self.blocks.pop(slot, None)
                case Shaped(layout, extents):
                    self._shape(layout.namespace(), change, extents)
                case Held(number):
                    self.held[number] = change
                case Ended(number):
                    self.held.pop(number, None)
                case Mapped(engine, process, namespace, dp_rank):
                    self.mapped.setdefault((engine, process), set()).add((namespace, dp_rank))
                case Unmapped(process, engines):
                    self._unmap(process, engines)

    def _shape(self, namespace: str, shaped: Shaped, extents: Sequence[tuple[int, int]]) -> None:
        if extents:
            self.shapes[namespace] = shaped
        else:
            self.shapes.pop(namespace, None)

    def _unmap(self, process: bytes, engines: Sequence[str] | None) -> None:
        for name, other in list(self.mapped):
            if other == process and (engines is None or name in engines):
                del self.mapped[name, other]

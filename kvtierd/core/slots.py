"""The pool's space: extents of units, cut into equal slots for each layout.

Nothing here knows what a slot holds. A layout's :class:`Arena` takes extents from the :class:`ExtentMap` as
it grows and gives whole ones back. All numbers are units of :data:`kvtierd.core.geometry.UNIT` bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

EXTENTS_PER_POOL = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of units."""

    start: int
    units: int


class ExtentMap:
    """First-fit allocator of runs of units; neighbours merge when they come back."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.free_runs: list[tuple[int, int]] = [(0, units)] if units else []
        """Start and length of each, in order; only looked at from outside."""

    @property
    def free_units(self) -> int:
        """Units that no arena holds."""
        return sum(units for _, units in self.free_runs)

    def has_run(self, units: int) -> bool:
        """Whether some free run has so many units."""
        return any(run >= units for _, run in self.free_runs)

    def take(self, wanted: int, multiple: int) -> Extent | None:
        """Take up to ``wanted`` units in one run, a positive multiple of ``multiple``."""
        for index, (start, units) in enumerate(self.free_runs):
            take = min(units, wanted) // multiple * multiple
            if not take:
                continue
            if take == units:
                del self.free_runs[index]
            else:
                self.free_runs[index] = (start + take, units - take)
            return Extent(start, take)
        return None

    def claim(self, extent: Extent) -> bool:
        """Take this very run; ``False`` when not all of it is free."""
        index = bisect.bisect(self.free_runs, (extent.start, self.units + 1)) - 1
        if index < 0 or extent.units <= 0:
            return False
        start, units = self.free_runs[index]
        end = extent.start + extent.units
        if end > start + units:
            return False
        rest = [(start, extent.start - start), (end, start + units - end)]
        self.free_runs[index : index + 1] = [run for run in rest if run[1]]
        return True

    def give(self, extent: Extent) -> None:
        """Give a run back."""
        index = bisect.bisect(self.free_runs, (extent.start, 0))
        self.free_runs.insert(index, (extent.start, extent.units))
        merged: list[tuple[int, int]] = []
        for start, units in self.free_runs[max(0, index - 1) : index + 2]:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + units)
            else:
                merged.append((start, units))
        self.free_runs[max(0, index - 1) : index + 2] = merged


class Arena:
    """One layout's equal slots."""

    def __init__(self, extents: ExtentMap, slot_units: int) -> None:
        self._map = extents
        self.slot_units = slot_units
        self.extents: list[Extent] = []
        self._free: list[int] = []
        self._changed = False
        """Whether an extent may have become wholly free since the last look."""
        self.resized = False
        """Whether extents came or went; whoever writes them down takes it back."""
        self.slots = 0
        self.room: Callable[[], int] | None = None
        """How many units it may take at most, where others are sure of some; ``None``: whatever is free."""

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def free_units(self) -> int:
        """Units of the pool that no arena holds."""
        return self._map.free_units

    def grow(self) -> bool:
        """Take one more extent from the pool; ``False`` when no run of one slot is left."""
        wanted = max(self.slot_units, self._map.units // EXTENTS_PER_POOL)
        if self.room is not None:
            wanted = min(wanted, self.room())
        extent = self._map.take(wanted, self.slot_units)
        if extent is None:
            return False
        self.extents.append(extent)
        self._changed = self.resized = True
        self.slots += extent.units // self.slot_units
        # Reversed, so that slots are handed out from the low end.
        self._free.extend(
            range(extent.start + extent.units - self.slot_units, extent.start - 1, -self.slot_units)
        )
        return True

    def can_grow(self) -> bool:
        """Whether the pool has a run of one slot left."""
        return self._map.has_run(self.slot_units) and (self.room is None or self.room() >= self.slot_units)

    def take(self) -> int | None:
        """Take a free slot (its first unit), growing if need be."""
        if self._free or (self._map.free_runs and self.grow()):
            return self._free.pop()
        return None

    def give(self, slot: int) -> None:
        """Give a slot back; nobody may touch its bytes any more."""
        self._free.append(slot)
        self._changed = True

    def shrink(self) -> int:
        """Give every wholly free extent back to the pool; return how many units."""
        if not self._changed:
            return 0
        self._changed = False
        free = set(self._free)
        kept: list[Extent] = []
        returned = 0
        for extent in self.extents:
            slots = range(extent.start, extent.start + extent.units, self.slot_units)
            if all(slot in free for slot in slots):
                free.difference_update(slots)
                self.slots -= len(slots)
                self._map.give(extent)
                returned += extent.units
            else:
                kept.append(extent)
        if returned:
            self.resized = True
            self.extents = kept
            self._free = [slot for slot in self._free if slot in free]
        return returned

    def restore(self, extents: Sequence[Extent], used: Set[int]) -> bool:
        """Begin with these runs and used slots; ``False`` when that cannot be, and nothing is valid then."""
        for extent in extents:
            if extent.units % self.slot_units or not self._map.claim(extent):
                return False
            self.slots += extent.units // self.slot_units
            ours = range(extent.start, extent.start + extent.units, self.slot_units)
            self._free += [slot for slot in ours if slot not in used]
        self._free.sort(reverse=True)
        self.extents = list(extents)
        self._changed = True
        return len(self._free) + len(used) == self.slots

    def free_list(self) -> tuple[int, ...]:
        """Return the free slots (for validation)."""
        return tuple(self._free)

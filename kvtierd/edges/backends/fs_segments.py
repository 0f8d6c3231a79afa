"""Which slot of which segment holds which packed block: bookkeeping only, no I/O (``FORMAT.md``).

A *place* is one number, segment number * 2**20 + slot, so that a million blocks cost a million small
integers. A slot is free (no disk space), *spare* (free, but its space is still allocated: the next write
takes it before any other), taken, or *unproved* (of an earlier run, and no scan has ended with its segment).
All methods are safe to call from several threads and none of them waits for a disk.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field

from kvtierd.core.model import BlockId
from kvtierd.edges.backends import fs_tree
from kvtierd.edges.backends.fs_format import aligned

SPAN = 256 << 20
"""Bytes of a full segment. The file is sparse: only slots that were written take space."""

_SHIFT = 20
_MASK = (1 << _SHIFT) - 1

Class = tuple[str, int]
"""Namespace and slot size in bytes."""


def slots_of(slot_bytes: int) -> int:
    """Return how many slots a segment has."""
    return max(1, SPAN // slot_bytes)


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file. ``used`` counts slots that are taken, ``begun`` those that were ever written.

    ``written``: offsets and lengths whose write-back was begun; the page cache may drop them soon.
    """

    number: int
    namespace: str
    slot_bytes: int
    name: str
    exists: bool
    used: int = 0
    begun: int = 0
    lost: bool = False
    written: list[tuple[int, int]] = field(default_factory=list)
    slots: int = field(init=False)
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.slots = slots_of(self.slot_bytes)
        self.first = aligned(8 * self.slots)

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the file."""
        return self.first + slot * self.slot_bytes

    def place(self, slot: int) -> int:
        """Return the number of a slot among those of all segments."""
        return self.number << _SHIFT | slot


@dataclass(slots=True)
class _Free:
    """Free slots of one class, as places; ``growing`` is the segment whose end is not reached yet."""

    spare: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    growing: Segment | None = None

    def forget(self, segment: Segment) -> int:
        """Drop a segment's slots; return how many of them were spare."""
        before = len(self.spare)
        self.spare = [place for place in self.spare if place >> _SHIFT != segment.number]
        self.free = [place for place in self.free if place >> _SHIFT != segment.number]
        if self.growing is segment:
            self.growing = None
        return before - len(self.spare)


class SlotMap:
    """All segments of a tier and what is in them."""

    def __init__(self, spare_limit: int) -> None:
        self.spare_limit = spare_limit
        self.spare_bytes = 0
        self._lock = threading.Lock()
        self._index: dict[BlockId, int] = {}
        self._segments: dict[int, Segment] = {}
        self._free: dict[Class, _Free] = {}
        self._next = 0

    def clear(self) -> None:
        """Forget all segments; who still works with one of them finds it lost."""
        with self._lock:
            for segment in self._segments.values():
                segment.lost = True
            self._segments.clear()
            self._index.clear()
            self._free.clear()
            self.spare_bytes = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def segment_count(self) -> int:
        """How many segment files there are."""
        return len(self._segments)

    def entries(self) -> list[tuple[BlockId, Segment, int]]:
        """Return all blocks and where they are."""
        with self._lock:
            return [(block_id, *self._at(place)) for block_id, place in self._index.items()]

    def namespaces(self) -> set[str]:
        """Return the namespaces that have segments."""
        with self._lock:
            return {segment.namespace for segment in self._segments.values()}

    def adopt(self, namespace: str, slot_bytes: int, name: str) -> Segment:
        """Take in a segment that an earlier run left; none of its slots is given away before :meth:`free`."""
        with self._lock:
            segment = self._add(namespace, slot_bytes, name, exists=True)
            segment.begun = segment.slots
            return segment

    def _add(self, namespace: str, slot_bytes: int, name: str, *, exists: bool) -> Segment:
        segment = Segment(self._next, namespace, slot_bytes, name, exists)
        self._next += 1
        self._segments[segment.number] = segment
        return segment

    def take(self, namespace: str, slot_bytes: int) -> tuple[Segment, int]:
        """Reserve a slot: a spare one, else a free one, else a new one."""
        with self._lock:
            free = self._free.setdefault((namespace, slot_bytes), _Free())
            if free.spare:
                self.spare_bytes -= slot_bytes
                segment, slot = self._at(free.spare.pop())
            elif free.free:
                segment, slot = self._at(free.free.pop())
            else:
                segment = free.growing or self._add(
                    namespace, slot_bytes, fs_tree.segment_name(slot_bytes), exists=False
                )
                slot = segment.begun
                segment.begun += 1
                free.growing = segment if segment.begun < segment.slots else None
            segment.used += 1
            return segment, slot

    def _at(self, place: int) -> tuple[Segment, int]:
        return self._segments[place >> _SHIFT], place & _MASK

    def find(self, block_id: BlockId) -> tuple[Segment, int] | None:
        """Return where a block is."""
        with self._lock:
            place = self._index.get(block_id)
            return None if place is None else self._at(place)

    def publish(self, block_id: BlockId, segment: Segment, slot: int) -> tuple[Segment, int] | None:
        """Say that a taken slot holds the block; return the slot that held it before.

        Raises:
            FileNotFoundError: the segment is lost.
        """
        with self._lock:
            if segment.lost:
                segment.used -= 1
                raise FileNotFoundError(errno.ENOENT, "somebody removed the segment")
            before = self._index.get(block_id)
            self._index[block_id] = segment.place(slot)
            return None if before is None else self._at(before)

    def prove(self, block_id: BlockId, segment: Segment, slot: int) -> bool:
        """Take in a block that the scan found in an unproved slot; false when a slot has it already."""
        with self._lock:
            place = segment.place(slot)
            known = self._index.get(block_id)
            if known is None and not segment.lost:
                self._index[block_id] = known = place
                segment.used += 1
            return known == place

    def remove(self, block_id: BlockId) -> tuple[Segment, int] | None:
        """Forget a block; its slot stays taken until :meth:`free`, so that it can be wiped in peace."""
        with self._lock:
            place = self._index.pop(block_id, None)
            return None if place is None else self._at(place)

    def restore(self, block_id: BlockId, segment: Segment, slot: int) -> None:
        """Take a :meth:`remove` back."""
        with self._lock:
            self._index.setdefault(block_id, segment.place(slot))

    def wants_spare(self, slot_bytes: int) -> bool:
        """Whether a slot may keep its space when freed; counts it as spare if so."""
        with self._lock:
            if self.spare_bytes + slot_bytes > self.spare_limit:
                return False
            self.spare_bytes += slot_bytes
            return True

    def not_spare(self, slot_bytes: int) -> None:
        """Take a yes of :meth:`wants_spare` back."""
        with self._lock:
            self.spare_bytes -= slot_bytes

    def free(self, segment: Segment, slot: int, *, spare: bool) -> bool:
        """Give a taken slot back; true when the segment is empty now and out of the books: unlink it."""
        with self._lock:
            segment.used -= 1
            if segment.lost:
                self.spare_bytes -= segment.slot_bytes if spare else 0
                if not segment.used:
                    self._segments.pop(segment.number, None)
                return False
            free = self._free.setdefault((segment.namespace, segment.slot_bytes), _Free())
            (free.spare if spare else free.free).append(segment.place(slot))
            if segment.used or (segment.begun == segment.slots and not self._all_free(free, segment)):
                return False
            self._lose(segment)
            del self._segments[segment.number]
            return True

    @staticmethod
    def _all_free(free: _Free, segment: Segment) -> bool:
        """Whether no slot is unproved: every slot is in the lists."""
        known = sum(place >> _SHIFT == segment.number for place in (*free.spare, *free.free))
        return known == segment.slots

    def settle(self, segment: Segment, proved: set[int]) -> list[int]:
        """End the scan of a segment; return the unproved slots, which are the caller's to clear and free."""
        with self._lock:
            if segment.lost:
                return []
            free = self._free.get((segment.namespace, segment.slot_bytes), _Free())
            known = {p & _MASK for p in (*free.spare, *free.free) if p >> _SHIFT == segment.number}
            rest = [slot for slot in range(segment.slots) if slot not in proved and slot not in known]
            segment.used += len(rest)
            return rest

    def lose(self, segment: Segment) -> None:
        """Give up a segment whose file is not there any more; its blocks are gone one by one."""
        with self._lock:
            if not segment.lost:
                self._lose(segment)

    def _lose(self, segment: Segment) -> None:
        segment.lost = True
        free = self._free.get((segment.namespace, segment.slot_bytes))
        if free is not None:
            self.spare_bytes -= free.forget(segment) * segment.slot_bytes

"""Which slot of which segment holds which packed block: bookkeeping only, no I/O (``FORMAT.md``).

A *place* is one number, segment number * 2**20 + slot, so that a million blocks cost a million small
integers. A slot is free (no disk space), *spare* (free, but its space is still allocated: the next write
takes it before any other), taken, or *unproved* (of an earlier run, and no scan has ended with its segment).
All methods are safe to call from several threads and none of them waits for a disk.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable
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

    ``spare`` and ``free`` are those of the begun slots that nothing is in. ``busy``: a call writes into it.
    """

    number: int
    namespace: str
    slot_bytes: int
    name: str
    exists: bool
    used: int = 0
    begun: int = 0
    busy: bool = False
    lost: bool = False
    spare: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
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


Place = tuple[Segment, int]
"""A slot of a segment."""


def runs(slots: Iterable[int]) -> list[range]:
    """Join ascending numbers to ranges."""
    found: list[range] = []
    for slot in slots:
        if found and found[-1].stop == slot:
            found[-1] = range(found[-1].start, slot + 1)
        else:
            found.append(range(slot, slot + 1))
    return found


@dataclass(slots=True)
class _Giving:
    """The segments of one class that have slots to give, by number: spare ones, and free or new ones."""

    spare: dict[int, Segment] = field(default_factory=dict)
    rest: dict[int, Segment] = field(default_factory=dict)

    def sort(self, segment: Segment) -> None:
        """Put a segment where it belongs now."""
        for among, has in (
            (self.spare, bool(segment.spare)),
            (self.rest, bool(segment.free) or segment.begun < segment.slots),
        ):
            if has and not segment.lost:
                among[segment.number] = segment
            else:
                among.pop(segment.number, None)

    def idle(self) -> Segment | None:
        """Return a segment that no call writes into, rather one with spare slots."""
        for among in (self.spare, self.rest):
            for segment in among.values():
                if not segment.busy:
                    return segment
        return None


class SlotMap:
    """All segments of a tier and what is in them."""

    def __init__(self, spare_limit: int) -> None:
        self.spare_limit = spare_limit
        self.spare_bytes = 0
        self._lock = threading.Lock()
        self._index: dict[BlockId, int] = {}
        self._segments: dict[int, Segment] = {}
        self._giving: dict[Class, _Giving] = {}
        self._next = 0

    def clear(self) -> None:
        """Forget all segments; who still works with one of them finds it lost."""
        with self._lock:
            for segment in self._segments.values():
                segment.lost = True
            self._segments.clear()
            self._index.clear()
            self._giving.clear()
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

    def take(self, namespace: str, slot_bytes: int, count: int = 1) -> list[Place]:
        """Reserve slots, ascending in each segment: spare ones, else free ones, else new ones.

        Calls at the same time get segments of their own until each says :meth:`wrote`: the kernel lets one
        write at a time into a file, and has the others spin.
        """
        with self._lock:
            giving = self._giving.setdefault((namespace, slot_bytes), _Giving())
            taken: list[Place] = []
            while len(taken) < count:
                segment = giving.idle() or self._add(
                    namespace, slot_bytes, fs_tree.segment_name(slot_bytes), exists=False
                )
                segment.busy = True
                taken += [(segment, slot) for slot in self._take(segment, count - len(taken))]
                giving.sort(segment)
            return taken

    def _take(self, segment: Segment, most: int) -> list[int]:
        slots = [segment.spare.pop() for _ in range(min(most, len(segment.spare)))]
        self.spare_bytes -= len(slots) * segment.slot_bytes
        slots += [segment.free.pop() for _ in range(min(most - len(slots), len(segment.free)))]
        new = min(most - len(slots), segment.slots - segment.begun)
        slots += range(segment.begun, segment.begun + new)
        segment.begun += new
        segment.used += len(slots)
        return sorted(slots)

    def wrote(self, places: Iterable[Place]) -> None:
        """End what :meth:`take` began: their segments may be written into by others."""
        with self._lock:
            for segment in {segment for segment, _ in places}:
                segment.busy = False

    def _at(self, place: int) -> Place:
        return self._segments[place >> _SHIFT], place & _MASK

    def find(self, block_id: BlockId) -> Place | None:
        """Return where a block is."""
        return self.find_all([block_id])[0]

    def find_all(self, ids: Iterable[BlockId]) -> list[Place | None]:
        """Return where each of the blocks is."""
        with self._lock:
            places = map(self._index.get, ids)
            return [None if place is None else self._at(place) for place in places]

    def publish(self, block_id: BlockId, segment: Segment, slot: int) -> Place | None:
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

    def remove(self, block_id: BlockId) -> Place | None:
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
            (segment.spare if spare else segment.free).append(slot)
            unproved = segment.begun == segment.slots != len(segment.spare) + len(segment.free)
            if segment.used or unproved:
                self._giving.setdefault((segment.namespace, segment.slot_bytes), _Giving()).sort(segment)
                return False
            self._lose(segment)
            del self._segments[segment.number]
            return True

    def settle(self, segment: Segment, proved: set[int]) -> list[int]:
        """End the scan of a segment; return the unproved slots, which are the caller's to clear and free."""
        with self._lock:
            if segment.lost:
                return []
            known = proved.union(segment.spare, segment.free)
            rest = [slot for slot in range(segment.slots) if slot not in known]
            segment.used += len(rest)
            return rest

    def lose(self, segment: Segment) -> None:
        """Give up a segment whose file is not there any more; its blocks are gone one by one."""
        with self._lock:
            if not segment.lost:
                self._lose(segment)

    def _lose(self, segment: Segment) -> None:
        segment.lost = True
        self.spare_bytes -= len(segment.spare) * segment.slot_bytes
        giving = self._giving.get((segment.namespace, segment.slot_bytes))
        if giving is not None:
            giving.sort(segment)

"""The numbered log of one audience: batches within limits, a replay ring, and the state from before the ring.

What falls off the ring is folded into a base (one change a key, the latest), so that base + ring is always
the present state. A replay that starts before the ring gets the base's stores, root first, spread over the
numbers before the ring, the numbers left over as empty batches (readers insist on an unbroken sequence),
then the ring. Removed keys are remembered as well, the latest ``max_tombstones`` of them: a reader that
comes back after a long gap then also hears what went. Where that memory does not reach, its first number is
left out, so that a reader that checks the sequence starts over from 0 rather than believe in blocks that
are gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec

from kvtierd.core.model import EventHash
from kvtierd.wire.batches import encode_changes
from kvtierd.wire.folded import Folded
from kvtierd.wire.places import ReaderKey
from kvtierd.wire.projection import EVENT_BYTES, Change, Run, View, parent_key, root_first

SEQUENCE_BYTES = 8
MAX_SEQUENCE = (1 << 63) - 1
"""vllm-router reads the number as signed; 2^64-1 is the end marker."""
END = b"\xff" * SEQUENCE_BYTES
MAX_EVENTS = 4096
"""vllm-router's limit on events in a batch."""
MAX_BYTES = 4 << 20
"""Aim for a batch's size; far enough below vllm-router's 16 MiB for an estimate."""
FILL_LIMIT = 1 << 20
"""Most empty batches of a replay; beyond it they would cost more than an unbroken sequence is worth."""
SNAPSHOT_EVENTS = 256
"""Events in a batch made for a replay, where numbers suffice: about a millisecond of work at a time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a log keeps, and how large its batches get at most (bytes estimated)."""

    ring_batches: int
    ring_bytes: int
    max_events: int = MAX_EVENTS
    max_bytes: int = MAX_BYTES


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A batch as it was sent, and what it said. ``cost``: bytes of memory that it holds, at most."""

    sequence: int
    payload: bytes
    ts: float
    rank: int
    changes: tuple[Change, ...]
    cost: int


def encode_sequence(sequence: int) -> bytes:
    """Return a batch number's frame: 8 bytes, big-endian.

    Raises:
        ValueError: it is negative or not below 2^63.
    """
    if not 0 <= sequence <= MAX_SEQUENCE:
        raise ValueError(f"sequence {sequence} is outside 0..2^63-1")
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def split(
    changes: Sequence[Change], *, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES
) -> Iterator[list[Change]]:
    """Cut changes into batches within the limits (bytes estimated); nothing gives nothing."""
    if len(changes) <= max_events and held_by(changes) <= max_bytes:  # the events take no more
        if changes:
            yield [*changes]
        return
    part: list[Change] = []
    size = 0
    for change in changes:
        more = change.size
        if part and (len(part) >= max_events or size + more > max_bytes):
            yield part
            part, size = [], 0
        part.append(change)
        size += more
    yield part


def held_by(changes: Sequence[Change]) -> int:
    """Return roughly how many bytes changes and the block descriptions that they keep alive take."""
    blocks = [change.block for change in changes]
    return EVENT_BYTES * len(blocks) + sum([len(block.tokens) for block in blocks if block is not None])


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """Counts since the start, and what is held now. ``resident`` and ``tombstones`` are of the base."""

    ring_batches: int
    ring_bytes: int
    folded: int
    resident: int
    tombstones: int
    forgotten: int
    snapshots: int
    """Replays that began before the ring."""


class StreamLog:
    """The log of one audience. The caller brings the numbers, each one more than the last.

    ``missing`` hears of stores in a replay from 0 whose parent is not there.
    The ring holds at most ``ring_batches`` batches and about ``ring_bytes`` bytes (payloads, and the block
    descriptions that they keep alive), but always the newest batch.
    """

    def __init__(
        self,
        limits: Limits,
        view: View | None = None,
        *,
        max_tombstones: int = 1 << 18,
        missing: Callable[[Change], None] | None = None,
    ) -> None:
        self._limits = limits
        self._view = view if view is not None else View()
        self._ring: deque[Entry] = deque()
        self._ring_cost = 0
        self._missing = missing
        self._base = Folded(max_tombstones)
        self._snapshots = 0
        self._first = 0  # the next batch's number, where none is in the ring

    def begin(self, first: int) -> None:
        """Say which number the first batch will have, so that those before it can be asked for at once.

        What was removed in them is not known: a reader that asks for one of them (but 0) finds a hole.
        """
        self._first = first
        self._base.floor = max(self._base.floor, first - 1)

    def seed(self, changes: Iterable[Change]) -> None:
        """Know stores that readers heard of before this log began: only a replay from 0 tells them again."""
        self._base.seed(changes)

    @property
    def numbers_for_state(self) -> int:
        """How many numbers a replay of the whole state wants."""
        return self._numbers_for(self._base.resident)

    def restart(self) -> int:
        """Forget all numbers but keep the state; return the next batch's number, the first after the state.

        For readers that take a lower number for a new incarnation and ask for everything from 0.
        """
        while self._ring:
            self._fold(self._ring.popleft())
        self._ring_cost = 0
        self._first = self.numbers_for_state
        self._base.renumber(self._first - 1)
        return self._first

    def append(self, sequence: int, ts: float, rank: int, changes: Sequence[Change]) -> bytes:
        """Encode a batch, keep it and return its payload.

        Raises:
            ValueError: the number does not follow the last one, or cannot be sent.
        """
        if self._ring and sequence != self._ring[-1].sequence + 1:
            raise ValueError(f"sequence {sequence} does not follow {self._ring[-1].sequence}")
        encode_sequence(sequence)
        payload = self._encode(ts, rank, changes)
        # What is kept of a block (its words and the change's own objects) weighs less than twice its event;
        # it is shared with the core while the block is resident, so this is the upper bound.
        cost = len(payload) + 2 * held_by(changes)
        self._ring.append(Entry(sequence, payload, ts, rank, tuple(changes), cost))
        self._ring_cost += cost
        self._trim()
        return payload

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (number, payload) from ``start`` on, ascending, up to the last batch at the time of the call.

        The state is taken at the call; batches are made one by one as the caller asks for them, so a replay
        of any size can be interleaved with other work.
        """
        ring = list(self._ring)
        tail = ((entry.sequence, entry.payload) for entry in ring if entry.sequence >= start)
        begin = ring[0].sequence if ring else self._first
        if start >= begin:
            return tail
        self._snapshots += 1
        return chain(self._before_ring(start, begin), tail)

    def tail(self, limit: int) -> list[dict[str, Any]]:
        """Return the last ``limit`` changes that readers were told, latest first, without any token."""
        told = (
            (entry, change)
            for entry in reversed(self._ring)
            for change in reversed(entry.changes)
            if change.told
        )
        return [
            {
                "sequence": entry.sequence,
                "time": entry.ts,
                "kind": "removed" if change.block is None else "stored",
                "medium": change.place.medium,
                "locality": change.place.locality,
                "rank": change.place.rank,
                "group": change.place.group,
                "hash": _hex(change.key[0]),
            }
            for entry, change in islice(told, limit)
        ]

    def statistics(self) -> LogStatistics:
        """Return a snapshot of the counters."""
        base = self._base
        return LogStatistics(
            ring_batches=len(self._ring),
            ring_bytes=self._ring_cost,
            folded=base.folded,
            resident=base.resident,
            tombstones=base.tombstones,
            forgotten=base.forgotten,
            snapshots=self._snapshots,
        )

    def _encode(self, ts: float, rank: int, changes: Sequence[Change]) -> bytes:
        return encode_changes(ts, rank, changes, self._view)

    def _trim(self) -> None:
        most, most_bytes = self._limits.ring_batches, self._limits.ring_bytes
        while len(self._ring) > 1 and (len(self._ring) > most or self._ring_cost > most_bytes):
            entry = self._ring.popleft()
            self._ring_cost -= entry.cost
            self._fold(entry)

    def _fold(self, entry: Entry) -> None:
        self._base.fold(entry.sequence, entry.ts, entry.rank, entry.changes)

    def _before_ring(self, start: int, ring_start: int) -> Iterator[tuple[int, bytes]]:
        """Fill the numbers from ``start`` to the ring with what the base says happened in them."""
        base = self._base
        gone, stored = base.changed_since(start)
        if not self._view.removals:
            gone = [change for change in gone if change.told]
        first = start
        if 0 < start <= base.floor:
            first = start + 1  # removals were forgotten: leave a hole that a reader can see
        count = len(gone) + len(stored)
        if (
            ring_start - first > FILL_LIMIT
        ):  # unbroken is out of reach: only as many numbers as the state needs
            first = max(first, ring_start - self._numbers_for(count))
        numbers = range(first, ring_start)
        first_seen = root_first(stored)
        if start == 0 and self._missing is not None:
            first_seen = self._without_parents(first_seen, stored)
        changes = chain(gone, first_seen)
        batches = _pack(changes, count, len(numbers), len(base.ranks), self._limits)
        return self._fill(numbers, batches, base.ts, base.rank)

    def _without_parents(
        self, changes: Iterator[Change], among: Mapping[ReaderKey, Change]
    ) -> Iterator[Change]:
        """Pass changes on, and say which of them come to a reader that does not know their parent."""
        assert self._missing is not None
        for change in changes:
            if change.parent is not None and parent_key(among, change) is None:
                self._missing(change)
            yield change

    def _numbers_for(self, changes: int) -> int:
        """Return how many numbers so many changes of the base want: half-full batches, one more a rank."""
        return 2 * (changes // min(SNAPSHOT_EVENTS, self._limits.max_events)) + len(self._base.ranks) + 1

    def _fill(
        self, numbers: range, batches: Iterator[Run], ts: float, rank: int
    ) -> Iterator[tuple[int, bytes]]:
        empty = self._encode(ts, rank, ())
        for sequence in numbers:
            batch = next(batches, None)
            yield sequence, empty if batch is None else self._encode(ts, batch.rank, batch.changes)


def _pack(changes: Iterator[Change], count: int, numbers: int, ranks: int, limits: Limits) -> Iterator[Run]:
    """Gather ``count`` changes of ``ranks`` ranks into batches of one rank each, at most ``numbers`` of them.

    Batches are small where numbers allow, then up to the limits; only where even that does not fit they grow
    beyond (state cannot be larger than what the same numbers carried before, but may pack less well).
    """
    wanted = max(SNAPSHOT_EVENTS, -(-2 * count // max(1, numbers - ranks)))
    most, most_bytes = min(limits.max_events, wanted), limits.max_bytes
    parts: dict[int, list[Change]] = {}
    sizes: dict[int, int] = {}
    used = 0
    for change in changes:
        rank = change.place.rank
        part = parts.setdefault(rank, [])
        size = sizes.get(rank, 0) + change.size
        if part and (len(part) >= most or size > most_bytes) and used + ranks < numbers:
            yield Run(rank, part)
            used += 1
            part = parts[rank] = []
            size = change.size
        part.append(change)
        sizes[rank] = size
    for rank, part in parts.items():
        yield Run(rank, part)


def _hex(value: EventHash) -> str:
    return f"{value:016x}" if isinstance(value, int) else value.hex()

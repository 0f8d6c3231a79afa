"""Keeps tier events back until the engine's own events that caused them have left; pure.

A block that an engine stores in the pool was computed on its device first, and a router should hear of it in
that order. The two ways here are different sockets, so the store may be the faster one. A store into the CPU
tier that an engine committed therefore waits for the engine's event of the same block, but not longer than
stated. What the tiers say after it waits behind it, so that their order never changes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvtierd.core.model import EventHash, EventKind, Medium, TierEvent, group_of
from kvtierd.wire.kvevents import BlockRemoved, BlockStored, WireEvent
from kvtierd.wire.projection import DEVICE

MAX_SEEN = 1 << 18
"""Blocks on devices that are remembered, the latest ones."""
MAX_HELD = 1 << 16
"""Events that can wait; one more lets all go."""


@dataclass(slots=True)
class _Held:
    """``deadline``: when it goes anyway, ``None``: it only waits for those before it."""

    event: TierEvent
    came: float
    deadline: float | None
    waited: bool = False


class Hold:
    """The queue of tier events before the stream. Times in seconds of any one clock."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        """Seconds that an event waited at most, so far."""
        self._limits: dict[int, float] = {}
        self._queue: deque[_Held] = deque()
        self._seen: OrderedDict[tuple[int, EventHash, int], None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many events wait."""
        return len(self._queue)

    @property
    def deadline(self) -> float | None:
        """When the first one goes at the latest."""
        return self._queue[0].deadline if self._queue else None

    def follow(self, rank: int, limit: float | None) -> None:
        """Hold a dp rank's blocks back for ``limit`` seconds, as its engine is heard; ``None``: do not."""
        if limit:
            self._limits[rank] = limit
        else:
            self._limits.pop(rank, None)

    def note(self, rank: int, events: Iterable[WireEvent]) -> None:
        """Remember what an engine said of its device, just now sent."""
        for event in events:
            if not isinstance(event, BlockStored | BlockRemoved) or event.medium != DEVICE:
                continue
            group = event.group_idx or 0
            for event_hash in event.block_hashes:
                if isinstance(event, BlockStored):
                    self._seen[rank, event_hash, group] = None
                else:
                    self._seen.pop((rank, event_hash, group), None)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def offer(self, events: Iterable[TierEvent], now: float, *, committed: bool) -> list[TierEvent]:
        """Take one turn's events; return those that go now. ``committed``: an engine's store caused them."""
        if not self._queue and not (committed and self._limits):
            return list(events)
        for event in events:
            limit = self._limits.get(event.block.dp_rank) if committed else None
            held = limit and event.kind is EventKind.STORED and event.medium is Medium.CPU
            self._queue.append(_Held(event, now, now + limit if limit and held else None))
        if len(self._queue) > MAX_HELD:
            self.counts["overflows"] += 1
            return self.flush(now)
        return self.release(now)

    def release(self, now: float) -> list[TierEvent]:
        """Return what can go: its turn has come, and its engine's event left or its time is up."""
        going: list[TierEvent] = []
        while self._queue:
            held = self._queue[0]
            if held.deadline is not None and not self._was_seen(held.event):
                if now < held.deadline and held.event.block.dp_rank in self._limits:
                    if not held.waited:
                        held.waited = True
                        self.counts["held"] += 1
                    break
                self.counts["timeouts"] += now >= held.deadline
            going.append(self._pop(now))
        return going

    def flush(self, now: float) -> list[TierEvent]:
        """Return all that waits."""
        return [self._pop(now) for _ in range(len(self._queue))]

    def _pop(self, now: float) -> TierEvent:
        held = self._queue.popleft()
        self.longest = max(self.longest, now - held.came)
        return held.event

    def _was_seen(self, event: TierEvent) -> bool:
        block = event.block
        group = group_of(block.key)
        return all((block.dp_rank, h, group) in self._seen for h in block.hashes)

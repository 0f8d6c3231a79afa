"""One numbered stream: a projection of the tier events, its log, its heartbeat, and who gets it.

Everything runs in the event loop's thread on plain sockets. ``publish`` never waits: PUB drops for a
subscriber that is behind (the subscriber sees the gap and asks for a replay), and the ring keeps what was
sent. A batch is encoded once, however many audiences (outlets) get it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from kvtierd.core.model import TierEvent
from kvtierd.edges.outlet import Outlet, OutletPlan
from kvtierd.edges.sequence import SequenceStore
from kvtierd.edges.view_file import ViewFile
from kvtierd.wire.kvevents import WireEvent
from kvtierd.wire.orphans import Orphans
from kvtierd.wire.projection import Change, Projection, View, runs_of
from kvtierd.wire.ranks import Fan
from kvtierd.wire.stream import Limits, StreamLog, encode_sequence, split
from kvtierd.wire.view_change import ViewChange, needs_new_start

logger = logging.getLogger(__name__)

MAX_HELD = 1 << 14
"""Changes that wait to be sent together; one more sends them."""
SWEEP_SLICE = 512
"""Changes that a rank which comes or goes, or a changed view, is told of at a time."""
REJOIN = 0.5
"""Seconds for readers to connect again before they are told what another view shows."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How a stream is made; audiences of equal plans share one.

    ``coalesce``: seconds that changes wait for others to share a batch, 0: none. ``renumber_after``: numbers
    start low again then.
    """

    view: View
    limits: Limits
    heartbeat: float
    coalesce: float = 0.0
    renumber_after: int | None = None


class Publisher:
    """Publishes one stream to its outlets. ``clock`` returns seconds since the epoch (a batch's ``ts``).

    ``ranks``: the dp ranks that readers know the shared pool's blocks of. The publisher closes ``sequence``.
    ``views``: where each outlet's view is kept; where it changed, readers are told the difference.
    """

    def __init__(
        self,
        plan: StreamPlan,
        outlets: Sequence[OutletPlan],
        *,
        sequence: SequenceStore,
        clock: Callable[[], float],
        ranks: Iterable[int] = (0,),
        views: Sequence[ViewFile] = (),
    ) -> None:
        self.plan = plan
        self.outlets = [Outlet(outlet) for outlet in outlets]
        self._sequence = sequence
        self._clock = clock
        self._projection = Projection(plan.view)
        self._fan = (
            Fan(self._projection.announced, ranks, only=plan.view.rank) if plan.view.each_rank else None
        )
        self._orphans: Orphans | None = None
        if plan.view.reannounce:
            self._orphans = Orphans(self._projection.announced, removals=plan.view.removals)
            self._projection.watcher = self._orphans
        missing = None if self._orphans is None else self._orphans.missing
        self._log = StreamLog(plan.limits, plan.view, missing=missing)
        self._views = views
        self._changed = self._view_change(ranks)
        self._log.begin(sequence.upcoming)
        self._backlog: deque[list[Change]] = deque()
        """What is told in slices, one after the other, and all that came after it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False
        self._held: list[Change] = []
        self._flushing: asyncio.Handle | None = None
        self._wanted: frozenset[int] | None = None
        self._sweep: Iterator[list[Change]] | None = None
        self._sweeping: asyncio.Handle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._handle: asyncio.Handle | None = None
        self._extending: asyncio.Future[None] | None = None
        self._sent_at = 0.0
        self._rank = plan.view.rank or 0
        self._last_number: int | None = None
        self._counts = dict.fromkeys(("batches", "foreign_events", "bytes", "heartbeats", "renumbered"), 0)
        self._told: Counter[tuple[str, bool]] = Counter()
        """Events by medium, and by whether they are removals."""

    def start(self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the outlets and begin; to be called in the loop's thread.

        Raises:
            ConfigError: see :meth:`open`.
        """
        self.open(loop, context)
        self.begin()

    def open(self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the outlets, where nothing is said before :meth:`begin`.

        Raises:
            ConfigError: an endpoint cannot be bound (``CannotBind``) or connected to.
        """
        self._loop = loop
        for outlet in self.outlets:
            outlet.open(context, loop)

    def begin(self) -> None:
        """Answer replays and start the heartbeat: all that readers know of is seeded."""
        loop = self._loop
        assert loop is not None
        for outlet in self.outlets:
            outlet.serve(loop, self._log.since)
        self._open = True
        self._sent_at = loop.time()
        self._beat()
        if self._backlog:
            self._handle = loop.call_later(REJOIN, self._work_off)
        else:
            self._settled()

    def settle(self) -> None:
        """Take the residencies seeded so far for all that readers know. May take seconds (any thread)."""
        if self._changed is None:
            return
        changed, self._changed = self._changed, None
        ranks = self._fan.ranks if self._fan is not None else ()
        difference = changed.difference(self._projection.announced, ranks)
        self._backlog.extend(
            difference[at : at + SWEEP_SLICE] for at in range(0, len(difference), SWEEP_SLICE)
        )

    def seed(self, events: Sequence[TierEvent]) -> None:
        """Know residencies that readers heard of before this run, without a word."""
        if self._changed is not None:
            self._changed.seed(events)
        self._log.seed(self._spread(self._projection.apply(events)))

    def publish(self, events: Sequence[TierEvent]) -> None:
        """Tell one turn's events, in drain order; what this audience need not hear costs no batch."""
        self._tell(self._spread(self._projection.apply(events)))

    def inject(self, rank: int, events: Sequence[WireEvent], *, announce: bool = True) -> None:
        """Tell another publisher's events (or, without ``announce``, know them as :meth:`seed` does)."""
        changes = self._projection.inject(rank, events)
        if announce:
            self._counts["foreign_events"] += len(changes)
            self._tell(changes)
        else:
            if self._changed is not None:
                self._changed.inject(rank, events)
            self._log.seed(changes)

    def set_ranks(self, ranks: frozenset[int]) -> None:
        """Announce the pool's blocks for exactly these dp ranks, little by little; none changes nothing."""
        if self._fan is not None and ranks:
            self._wanted = ranks
            self._sweep_on()

    @property
    def overdue(self) -> float:
        """Seconds since a batch should have left, be it a heartbeat; 0 when none is due."""
        heartbeat = self.plan.heartbeat
        if self._loop is None or not self._open or heartbeat <= 0:
            return 0.0
        return max(0.0, self._loop.time() - self._sent_at - heartbeat)

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start and present sizes, by name (plain values)."""
        log = self._log.statistics()
        return {
            **self._counts,
            "events": self._told.total(),
            "told": self._told_by_medium(),
            "waiting": len(self._held),
            "snapshots": log.snapshots,
            "sequence": self._last_number,
            "sequence_degraded": self._sequence.degraded,
            "announced": len(self._projection),
            "untold": sum(map(len, self._backlog)),
            "foreign": self._projection.foreign,
            "foreign_repeats": self._projection.foreign_repeats,
            "orphans": 0 if self._orphans is None else len(self._orphans),
            "unmatched_removals": self._projection.unmatched,
            "ring_batches": log.ring_batches,
            "ring_bytes": log.ring_bytes,
            "folded_batches": log.folded,
            "tombstones": log.tombstones,
            "tombstones_forgotten": log.forgotten,
        }

    def tail(self, limit: int) -> list[dict[str, Any]]:
        """Return the last changes that were told, latest first."""
        return self._log.tail(limit)

    def _told_by_medium(self) -> dict[str, dict[str, int]]:
        media = sorted({medium for medium, _ in self._told})
        return {
            medium: {"stored": self._told[medium, False], "removed": self._told[medium, True]}
            for medium in media
        }

    async def finish(self, grace: float, linger: float) -> None:
        """Stop publishing; give running replays up to ``grace`` seconds to end."""
        if not self._open:
            return
        while self._backlog:
            self._work_off()
        self.flush()
        self._open = False
        for handle in (self._beating, self._sweeping, self._flushing, self._handle):
            if handle is not None:
                handle.cancel()
        await asyncio.gather(*(outlet.finish(grace, linger) for outlet in self.outlets))
        if self._extending is not None:
            await asyncio.wait([self._extending], timeout=grace)

    async def drop(self, outlet: Outlet, grace: float) -> None:
        """Serve one outlet no more, the others as ever; what is queued for it gets ``grace`` seconds."""
        self.flush()
        at = self.outlets.index(outlet)
        del self.outlets[at]
        self._views = [view for number, view in enumerate(self._views) if number != at]
        await outlet.finish(grace, grace)
        outlet.close(grace)
        assert self._loop is not None
        await self._loop.run_in_executor(None, self._sequence.leave, outlet.plan.label)

    def skip_number(self) -> None:
        """Leave one number out: readers from an earlier time, if there are any, see that they missed some."""
        self._sequence.next()
        self._log.begin(self._sequence.upcoming)

    def close(self, linger: float) -> None:
        """Close the sockets; what is queued gets ``linger`` seconds, while the context ends."""
        self._open = False
        for outlet in self.outlets:
            outlet.close(linger)

    def abandon(self) -> None:
        """Close whatever is open at once, where the start failed half-way."""
        self._open = False
        if self._beating is not None:
            self._beating.cancel()
        for outlet in self.outlets:
            outlet.abandon()

    def release(self) -> None:
        """Give unused numbers back. Waits for the disk."""
        self._sequence.close()

    def flush(self) -> None:
        """Send what is held back."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        held, self._held = self._held, []
        if self._fan is not None and self.plan.coalesce:
            held.sort(key=lambda change: change.place.rank)  # stable: each rank's in their order
        self._send_all(held)

    def _view_change(self, ranks: Iterable[int]) -> ViewChange | None:
        """Return what finds out the difference, if any outlet's readers had another view."""
        view = self.plan.view
        before = {known for file in self._views for known in file.known}
        if before <= {view}:
            return None
        if any(needs_new_start(old, view) for old in before):
            self._sequence.next()  # the hole that readers check for
        for file in self._views:
            file.save(*{**dict.fromkeys(file.known), view: None})
        return ViewChange(before, view, ranks)

    def _settled(self) -> None:
        for file in self._views:
            file.save(self.plan.view)

    def _work_off(self) -> None:
        """Tell a part of the backlog; the next one after others had their turn."""
        self._tell_now(self._backlog.popleft())
        if not self._backlog:
            self._settled()
        elif self._open:
            self._handle = asyncio.get_running_loop().call_soon(self._work_off)

    def _spread(self, changes: list[Change]) -> list[Change]:
        return changes if self._fan is None else self._fan.spread(changes)

    def _tell(self, changes: list[Change]) -> None:
        if self._backlog:
            self._backlog.append(changes)
        else:
            self._tell_now(changes)

    def _tell_now(self, changes: list[Change]) -> None:
        if not changes:
            return
        told = any(change.told for change in changes)
        if not self._held and told and not self.plan.coalesce:
            self._send_all(changes)
            return
        self._held += changes
        if len(self._held) >= MAX_HELD or (told and not self.plan.coalesce):
            self.flush()
        elif told and self._flushing is None:
            assert self._loop is not None
            self._flushing = self._loop.call_later(self.plan.coalesce, self.flush)

    def _send_all(self, changes: list[Change]) -> None:
        limits = self.plan.limits
        for run in runs_of(changes):
            for part in split(run.changes, max_events=limits.max_events, max_bytes=limits.max_bytes):
                self._send(run.rank, part)

    def _send(self, rank: int, changes: Sequence[Change]) -> None:
        """Number a batch, keep it, and hand it to the sockets."""
        assert self._loop is not None
        limit, upcoming = self.plan.renumber_after, self._sequence.upcoming
        if limit is not None and upcoming >= max(limit, 4 * self._log.numbers_for_state):
            self._sequence.restart(self._log.restart())
            self._counts["renumbered"] += 1
        number = self._sequence.next()
        payload = self._log.append(number, self._clock(), rank, changes)
        self._last_number, self._rank, self._sent_at = number, rank, self._loop.time()
        frame = encode_sequence(number)
        for outlet in self.outlets:
            outlet.send(frame, payload)
        self._counts["batches"] += 1
        self._count([change for change in changes if change.told])
        self._counts["bytes"] += len(payload)
        if self._sequence.low and (self._extending is None or self._extending.done()):
            self._extending = self._loop.run_in_executor(None, self._sequence.extend)

    def _count(self, told: Sequence[Change]) -> None:
        places = {change.key[1] for change in told}
        if len(places) == 1:  # as nearly always; to count pairs costs three times as much
            medium, gone = places.pop().medium, sum([change.block is None for change in told])
            self._told[medium, True] += gone
            self._told[medium, False] += len(told) - gone
        else:
            self._told.update([(change.place.medium, change.block is None) for change in told])

    def _sweep_on(self) -> None:
        """Tell one slice of a rank's coming or going; the next one after others had their turn."""
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_soon(self._sweep_slice)

    def _sweep_slice(self) -> None:
        self._sweeping = None
        assert self._fan is not None
        if self._sweep is None and self._wanted is not None:
            self._sweep = self._fan.sweep(self._wanted)
        if self._sweep is None or not self._open:
            return
        part: list[Change] = []
        for changes in self._sweep:
            part += changes
            if len(part) >= SWEEP_SLICE:
                break
        else:
            self._sweep = None
        self._tell(part)
        self._sweep_on()

    def _beat(self) -> None:
        """Send an empty batch after a silence: a reader that just joined asks for a replay only then."""
        heartbeat = self.plan.heartbeat
        if self._loop is None or not self._open or heartbeat <= 0:
            return
        if self._loop.time() - self._sent_at >= heartbeat:
            self._counts["heartbeats"] += 1
            if self._held:
                self.flush()
            else:
                self._send(self._rank, ())
        self._beating = self._loop.call_at(self._sent_at + heartbeat, self._beat)

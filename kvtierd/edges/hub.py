"""The event stream as the daemon sees it: events go in once, every audience gets its own view of them.

Audiences that want to hear the same share one :class:`Publisher`: one projection, one log and one count of
numbers, each batch encoded once. The rest of the daemon talks to the hub alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvtierd.config.audiences import Audience, Events, render_topic
from kvtierd.config.endpoints import offset
from kvtierd.core.model import Medium, TierEvent
from kvtierd.edges import audience_change
from kvtierd.edges.curve import CurveKeys, Doorkeeper
from kvtierd.edges.outlet import Outlet, OutletPlan
from kvtierd.edges.publisher import Publisher, StreamPlan
from kvtierd.edges.sequence import SequenceStore
from kvtierd.edges.view_file import ViewFile
from kvtierd.errors import ConfigError
from kvtierd.logs.events import event
from kvtierd.wire.kvevents import Form, WireEvent
from kvtierd.wire.projection import View
from kvtierd.wire.stream import Limits

logger = logging.getLogger(__name__)

MAX_RANK = 1 << 20
MEDIUM_OF = {"cpu": Medium.CPU}
"""By a tier's type; all others are storage."""


LIBZMQ_MIN = (4, 3, 3)
"""CVE-2019-6250 and -13132 let a peer run code, CVE-2020-15166 stops a server; none is in this one."""


def require_libzmq(version: tuple[int, ...]) -> None:
    """Check the library under pyzmq.

    Raises:
        ConfigError: it is older than ``LIBZMQ_MIN``.
    """
    if version < LIBZMQ_MIN:
        found, least = (".".join(map(str, numbers)) for numbers in (version, LIBZMQ_MIN))
        raise ConfigError(f"events: libzmq {found} has holes that a peer can use: install {least} or newer")


class EventHub:
    """All audiences of one daemon.

    ``tiers`` maps the name of each tier that has events to its type; ``environ`` fills in topics; ``clock``
    returns seconds since the epoch. Numbers and the ranks that readers know of are kept in ``state_dir``
    (``None``: nowhere); ``endpoints_file`` is where the real endpoints are written for others to find.
    ``fresh``: whether there can have been no earlier run, so that missing numbers may begin at 0.
    """

    def __init__(
        self,
        events: Events,
        *,
        tiers: Mapping[str, str],
        state_dir: Path | None,
        clock: Callable[[], float],
        environ: Mapping[str, str] = os.environ,
        endpoints_file: Path | None = None,
        fresh: bool = True,
    ) -> None:
        self._clock = clock
        self._ranks = _RankFile(state_dir)
        self._media = {name: MEDIUM_OF.get(kind, Medium.STORAGE).value for name, kind in tiers.items()}
        self._endpoints_file = endpoints_file
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: Doorkeeper | None = None
        self._begun = False
        self._after_close = 0
        self._tiers, self._environ, self._state_dir = tiers, environ, state_dir
        self._keys = load_keys(events)
        self._publishers = self.make(self.plans(events, self._keys), fresh=fresh)
        self._missed: list[TierEvent] | None = None
        """What was told while audiences change: the new ones hear it when they can."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open all sockets and begin; to be called in the loop's thread.

        Raises:
            ConfigError: see :meth:`open`.
        """
        self.open(loop)
        self.begin()

    def begin(self) -> None:
        """Speak and answer: all that an earlier run told is seeded."""
        self._begun = True
        for publisher in self._publishers:
            publisher.begin()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open all sockets, where nothing is said before :meth:`begin`; in the loop's thread.

        Seeding may go on meanwhile, in another thread.

        Raises:
            ConfigError: an endpoint cannot be bound; names the audience, the endpoint and the reason.
        """
        require_libzmq(zmq.zmq_version_info())
        self._loop = loop
        self._context = zmq.Context()
        try:
            if self._keys:
                self._door = Doorkeeper(self._context, loop, self._keys)
            for publisher in self._publishers:
                publisher.open(loop, self._context)
        except BaseException:
            self._abandon()
            raise
        self._write_endpoints()

    def publish(self, events: Sequence[TierEvent]) -> None:
        """Tell every audience one turn's events, in drain order; never waits."""
        if self._context is None:
            self._after_close += len(events)
            return
        for publisher in self._publishers:
            publisher.publish(events)
        if self._missed is not None:
            self._missed += events

    async def change(self, events: Events, known: Callable[[], list[TierEvent]]) -> None:
        """Serve other audiences from now on; those whose settings are the same notice nothing.

        ``known`` returns stores that tell all that readers know of now. No engine's events may be passed on.

        Raises:
            ConfigError: one of the new ones cannot be served; the ones of before are, as they were.
        """
        await audience_change.change(self, events, known)

    def plans(
        self, events: Events, keys: Mapping[str, CurveKeys]
    ) -> dict[str, tuple[StreamPlan, OutletPlan]]:
        """Return how each outlet is to be served, by its label.

        Raises:
            ConfigError: a topic cannot be filled in.
        """
        wanted = {}
        for audience in events.audiences:
            for rank in range(audience.rank_ports or 1):
                outlet = self._outlet_plan(events, audience, rank, keys)
                wanted[outlet.label] = (_stream_plan(events, audience, rank, self._tiers), outlet)
        return wanted

    def make(
        self, wanted: Mapping[str, tuple[StreamPlan, OutletPlan]], fresh: bool = True
    ) -> list[Publisher]:
        """Return a publisher for each stream, not started. Reads and writes files."""
        plans: dict[StreamPlan, list[OutletPlan]] = {}
        for plan, outlet in wanted.values():
            plans.setdefault(plan, []).append(outlet)
        return [
            Publisher(
                plan,
                outlets,
                sequence=SequenceStore(
                    self._state_dir, wall_clock=self._clock, names=[o.label for o in outlets], fresh=fresh
                ),
                clock=self._clock,
                ranks=self._ranks.known,
                views=[ViewFile(self._state_dir, o.label) for o in outlets],
            )
            for plan, outlets in plans.items()
        ]

    def seed(self, events: Sequence[TierEvent]) -> None:
        """Know residencies that readers were told of by an earlier run; nothing is sent."""
        for publisher in self._publishers:
            publisher.seed(events)

    def settle(self) -> None:
        """Say that all seeds of before are in. May take seconds (any thread)."""
        for publisher in self._publishers:
            publisher.settle()

    def inject(self, rank: int, events: Sequence[WireEvent], *, announce: bool = True) -> None:
        """Pass on what another publisher (an engine) says of dp rank ``rank``, as a set of its residencies.

        Each audience gets it filtered and in its form, and replays and snapshots have it too. An
        ``AllBlocksCleared`` becomes removals of what was injected for that rank. Without ``announce`` nothing
        is sent: readers know it from an earlier run.
        """
        if self._context is None and announce:
            self._after_close += len(events)
            return
        for publisher in self._publishers:
            publisher.inject(rank, events, announce=announce)

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Say which dp ranks are attached; blocks of the shared pool are announced for them where wanted.

        While none is attached, those who were last stay announced.
        """
        attached = frozenset(rank for rank in ranks if 0 <= rank < MAX_RANK)
        if not attached or self._context is None or not self._begun:
            return
        self._ranks.remember(attached)
        for publisher in self._publishers:
            publisher.set_ranks(attached)

    def statistics(self) -> dict[str, Any]:
        """Return counters and endpoints by name; the first audience's also at the top (plain values)."""
        audiences: dict[str, Any] = {}
        for publisher, outlet in self._outlets():
            audiences[outlet.plan.label] = {
                **outlet.endpoints,
                "topic": outlet.plan.topic,
                "curve": outlet.plan.curve is not None,
                "renumber_after": publisher.plan.renumber_after,
                **self._shown(publisher.plan.view),
                **publisher.statistics(),
                **outlet.statistics(),
            }
        first: dict[str, Any] = next(iter(audiences.values()), {})
        refused = self._door.refused if self._door is not None else 0
        return {**first, "after_close": self._after_close, "curve_refused": refused, "audiences": audiences}

    @property
    def overdue(self) -> float:
        """Seconds since a batch should have left, of the stream that is latest."""
        return max((publisher.overdue for publisher in self._publishers), default=0.0)

    def tail(self, limit: int) -> list[dict[str, Any]]:
        """Return the last changes that the first audience was told, latest first, without tokens."""
        return self._publishers[0].tail(limit) if self._publishers else []

    @property
    def dropped(self) -> int:
        """Batches that some socket did not take."""
        return sum(outlet.dropped for _, outlet in self._outlets())

    def bound_endpoints(self) -> dict[str, str]:
        """Return the first audience's endpoints by key, with the real port where 0 was asked."""
        return next((dict(outlet.endpoints) for _, outlet in self._outlets()), {})

    async def close(self, grace: float) -> None:
        """Stop publishing; give queued batches and running replays up to ``grace`` seconds to get out."""
        if self._context is None or self._loop is None:
            return
        context, self._context = self._context, None
        deadline = self._loop.time() + grace
        await asyncio.gather(*(p.finish(grace / 2, grace / 2) for p in self._publishers))
        if self._door is not None:
            self._door.close()
        for publisher in self._publishers:
            publisher.close(deadline - self._loop.time())
        # Waits for the linger times at most; in a thread, since the loop has others to serve.
        await self._loop.run_in_executor(None, context.term)
        for publisher in self._publishers:
            await self._loop.run_in_executor(None, publisher.release)
        if self._endpoints_file is not None:
            self._endpoints_file.unlink(missing_ok=True)

    def _shown(self, view: View) -> dict[str, Any]:
        """Return what a reader has to expect: each tier's medium on the wire, ranks, form."""
        names = dict(view.names)
        return {
            "form": view.form.value,
            "removals": view.removals,
            "tiers": {
                tier: names.get(tier, medium)
                for tier, medium in self._media.items()
                if view.media is None or medium in view.media
            },
            "ranks": sorted(self._ranks.known) if view.each_rank else None,
            "rank": view.rank,
        }

    def _outlets(self) -> Iterator[tuple[Publisher, Outlet]]:
        for publisher in self._publishers:
            for outlet in publisher.outlets:
                yield publisher, outlet

    def _outlet_plan(
        self, events: Events, audience: Audience, rank: int, keys: Mapping[str, CurveKeys]
    ) -> OutletPlan:
        try:
            topic = render_topic(audience, events.model, self._environ, rank)
        except ValueError as error:
            raise ConfigError(f"events: audience {audience.name!r}: topic: {error}") from None
        places = {key: offset(where, rank) for key, where in audience.endpoints()}
        return OutletPlan(
            label=audience.name if not rank else f"{audience.name}.{rank}",
            topic=topic,
            bind=places.get("bind"),
            connect=places.get("connect"),
            replay=places.get("replay"),
            hwm=audience.hwm,
            curve=keys.get(audience.name),
        )

    def _abandon(self) -> None:
        for publisher in self._publishers:
            publisher.abandon()
            publisher.release()
        if self._door is not None:
            self._door.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _write_endpoints(self) -> None:
        if self._endpoints_file is None:
            return
        found = {
            outlet.plan.label: {**outlet.endpoints, "topic": outlet.plan.topic}
            for _, outlet in self._outlets()
        }
        try:
            self._endpoints_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning(
                "cannot write %s: %s",
                self._endpoints_file,
                error.strerror,
                extra=event("state_not_written", path=str(self._endpoints_file)),
            )


class _RankFile:
    """The dp ranks that readers were told the pool's blocks of, kept across restarts; best effort."""

    def __init__(self, state_dir: Path | None) -> None:
        self._path = None if state_dir is None else state_dir / "ranks"
        self.known: frozenset[int] = frozenset({0})
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                ranks = json.loads(self._path.read_text("ascii"))
                self.known = frozenset(int(rank) for rank in ranks) or self.known

    def remember(self, ranks: frozenset[int]) -> None:
        """Keep ranks, before anything is said about them."""
        if ranks == self.known:
            return
        self.known = ranks
        if self._path is not None:
            temporary = self._path.with_name("ranks.new")
            try:
                temporary.write_text(json.dumps(sorted(ranks)), "ascii")
                os.replace(temporary, self._path)
            except OSError as error:
                logger.warning(
                    "cannot write %s: %s",
                    self._path,
                    error.strerror,
                    extra=event("state_not_written", path=str(self._path)),
                )


def load_keys(events: Events) -> dict[str, CurveKeys]:
    """Return the keys of the audiences that have some. Reads files.

    Raises:
        ConfigError: a file cannot be read or holds no key.
    """
    return {
        audience.name: CurveKeys.load(
            audience.name, audience.curve.secret_key_file, audience.curve.allowed_clients
        )
        for audience in events.audiences
        if audience.curve is not None
    }


def _stream_plan(events: Events, audience: Audience, rank: int, tiers: Mapping[str, str]) -> StreamPlan:
    names = audience.medium_names
    view = View(
        form=Form(audience.form),
        tokens=audience.publishes_tokens,
        media=None if audience.media is None else frozenset(audience.media),
        removals=audience.removals,
        one_block=audience.one_block_per_event,
        names=tuple((tier, names[kind]) for tier, kind in tiers.items() if kind in names),
        rank=rank if audience.rank_ports is not None else None,
        each_rank=audience.shared_blocks == "each_rank",
        reannounce=audience.reannounce_orphans,
    )
    return StreamPlan(
        view=view,
        limits=Limits(events.ring_batches, events.ring_bytes, audience.max_events, audience.max_bytes),
        heartbeat=events.heartbeat,
        coalesce=audience.coalesce or 0.0,
        renumber_after=audience.renumber_after,
    )

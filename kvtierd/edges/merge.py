"""One entry to the event stream: the tiers' events and what engines say of themselves, in the right order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from kvtierd.config.relay import Relay
from kvtierd.core.model import TierEvent
from kvtierd.edges.hub import EventHub
from kvtierd.edges.relay import EngineLink
from kvtierd.wire.hold import Hold
from kvtierd.wire.kvevents import WireEvent


class MergedStream:
    """Everything that goes into ``hub``. Without ``relays`` it passes tier events straight on.

    ``committed``: whether an engine's store is among the causes of what is published next.
    """

    def __init__(self, hub: EventHub, relays: Sequence[Relay]) -> None:
        self.committed = False
        self._hub = hub
        self._relays = relays
        self._links: list[EngineLink] = []
        self._hold = Hold()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen to the engines; to be called in the loop's thread.

        Raises:
            ConfigError: a relay's endpoint cannot be bound.
        """
        self._loop = loop
        if not self._relays:
            return
        self._context = zmq.Context()
        try:
            for relay in self._relays:
                link = EngineLink(loop, relay, tell=self._inject, heard=self._heard_of(relay))
                link.start(self._context)
                self._links.append(link)
        except BaseException:
            self.close()
            raise

    def publish(self, events: Sequence[TierEvent]) -> None:
        """Tell one turn's events, in drain order."""
        if not self._links:
            self._hub.publish(events)
            return
        assert self._loop is not None
        self._pass_on(self._hold.offer(events, self._loop.time(), committed=self.committed))

    def seed(self, events: Sequence[TierEvent]) -> None:
        """Know residencies that readers were told of by an earlier run."""
        self._flush()
        self._hub.seed(events)

    def statistics(self) -> dict[str, Any]:
        """Return each relay's state, and what the hold cost, by name (plain values)."""
        return {
            "engines": [link.statistics() for link in self._links],
            "holding": len(self._hold),
            "held": self._hold.counts["held"],
            "hold_timeouts": self._hold.counts["timeouts"],
            "longest_hold_seconds": self._hold.longest,
        }

    def close(self) -> None:
        """Send what waits and take back what the engines announced; the hub's sockets stay open."""
        self._flush()
        for link in self._links:
            link.close()
        self._links.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _heard_of(self, relay: Relay) -> Callable[[int, bool], None]:
        def heard(rank: int, is_heard: bool) -> None:
            self._hold.follow(rank, relay.hold if is_heard else None)
            self._release()

        return heard

    def _inject(self, rank: int, events: list[WireEvent]) -> None:
        self._hub.inject(rank, events)
        self._hold.note(rank, events)
        self._release()

    def _release(self) -> None:
        assert self._loop is not None
        self._pass_on(self._hold.release(self._loop.time()))

    def _flush(self) -> None:
        if self._loop is not None:
            self._pass_on(self._hold.flush(self._loop.time()))

    def _pass_on(self, events: Sequence[TierEvent]) -> None:
        if events:
            self._hub.publish(events)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._hold.deadline
        if deadline is not None and self._loop is not None:
            self._timer = self._loop.call_at(deadline, self._release)

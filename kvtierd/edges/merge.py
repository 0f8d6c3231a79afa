"""One entry to the event stream: the tiers' events and what engines say of themselves, in the right order."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvtierd.config.relay import Relay
from kvtierd.core.model import TierEvent
from kvtierd.edges.hub import EventHub
from kvtierd.edges.relay import EngineLink
from kvtierd.edges.relay_journal import RelayJournal
from kvtierd.wire.hold import Hold
from kvtierd.wire.kvevents import WireEvent


class MergedStream:
    """Everything that goes into ``hub``. Without ``relays`` it passes tier events straight on.

    ``committed``: whether an engine's store is among the causes of what is published next.
    """

    def __init__(self, hub: EventHub, relays: Sequence[Relay], state_dir: Path | None = None) -> None:
        self.committed = False
        self._hub = hub
        self._relays = relays
        self._state_dir = state_dir
        self._links: list[EngineLink] = []
        self._hold = Hold()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the sockets to the engines; nothing is read before :meth:`start`. In the loop's thread.

        Raises:
            ConfigError: a relay's endpoint cannot be bound.
        """
        self._loop = loop
        if not self._relays:
            return
        self._context = zmq.Context()
        self._links = [
            EngineLink(
                loop,
                relay,
                tell=self._inject,
                heard=functools.partial(self._heard, relay.hold),
                journal=self._journal(loop, relay),
            )
            for relay in self._relays
        ]
        try:
            for link in self._links:
                link.open(self._context)
        except BaseException:
            self.close()
            raise

    def load(self) -> None:
        """Seed the hub with what readers know of engines by an earlier run. May take seconds (any thread)."""
        for link in self._links:
            for rank, events in link.load():
                self._hub.inject(rank, events, announce=False)
                self._hold.note(rank, events)

    def start(self) -> None:
        """Listen to the engines; to be called in the loop's thread, when all is loaded and the hub speaks."""
        for link in self._links:
            link.start()

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

    def settle(self) -> None:
        """Say that all seeds of before are in."""
        self._hub.settle()

    def statistics(self) -> dict[str, Any]:
        """Return each relay's state, and what the hold cost, by name (plain values)."""
        return {
            "engines": [link.statistics() for link in self._links],
            "holding": len(self._hold),
            "held": self._hold.counts["held"],
            "hold_timeouts": self._hold.counts["timeouts"],
            "longest_hold_seconds": self._hold.longest,
        }

    def close(self, *, keep: bool = False) -> None:
        """Send what waits and, unless told to ``keep`` it, take back what the engines announced.

        The hub's sockets stay open.
        """
        self._flush()
        for link in self._links:
            link.close(keep=keep)
        self._links.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _journal(self, loop: asyncio.AbstractEventLoop, relay: Relay) -> RelayJournal | None:
        """Return the journal of a relay, named after its rank: its socket may move."""
        if self._state_dir is None:
            return None
        name = "relay" if relay.dp_rank is None else f"relay-{relay.dp_rank}"

        def background(work: Callable[[], bytes], done: Callable[[bytes], None]) -> None:
            loop.run_in_executor(None, work).add_done_callback(lambda future: done(future.result()))

        return RelayJournal(self._state_dir / name, background)

    def _heard(self, hold: float | None, rank: int, is_heard: bool) -> None:
        self._hold.follow(rank, hold if is_heard else None)
        self._release()

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

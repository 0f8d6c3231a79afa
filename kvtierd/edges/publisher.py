"""The door of the event stream: one audience's PUB socket, its replay ROUTER and its heartbeat.

Everything runs in the event loop's thread on plain sockets. ``publish`` never waits: PUB drops for a
subscriber that is behind (the subscriber sees the gap and asks for a replay), and the ring keeps what was
sent. Replays are served in small slices between the loop's other work.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from kvtierd.config.schema import Audience
from kvtierd.core.model import TierEvent
from kvtierd.edges.replay import ReplayServer
from kvtierd.edges.sequence import SequenceStore
from kvtierd.errors import ConfigError
from kvtierd.wire.kvevents import Form
from kvtierd.wire.projection import Change, Projection
from kvtierd.wire.stream import StreamLog, encode_sequence, split

logger = logging.getLogger(__name__)

PUB_MAX_MESSAGE = 4096
"""Bytes; a PUB socket receives nothing but subscriptions."""


class Publisher:
    """Publishes to one audience.

    ``clock`` returns seconds since the epoch (a batch's ``ts``); ``heartbeat`` is in seconds of silence, 0
    turns it off; events of ``hidden_tiers`` are not for this audience. The publisher closes ``sequence``.
    """

    def __init__(
        self,
        audience: Audience,
        *,
        sequence: SequenceStore,
        clock: Callable[[], float],
        ring_batches: int,
        ring_bytes: int,
        heartbeat: float,
        hidden_tiers: frozenset[str] = frozenset(),
    ) -> None:
        form = Form(audience.form)
        self._audience = audience
        self._topic = audience.topic.encode()
        self._sequence = sequence
        self._clock = clock
        self._heartbeat = heartbeat
        self._projection = Projection(hidden=hidden_tiers, locality=form is Form.MAP)
        self._log = StreamLog(
            ring_batches=ring_batches, ring_bytes=ring_bytes, form=form, tokens=audience.publishes_tokens
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: ReplayServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._extending: asyncio.Future[None] | None = None
        self._endpoints: dict[str, str] = {}
        self._sent_at = 0.0
        self._rank = 0
        self._last_number: int | None = None
        self._counts = dict.fromkeys(
            ("batches", "events", "bytes", "dropped", "heartbeats", "after_close"), 0
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind both sockets and start the heartbeat; to be called in the loop's thread.

        Raises:
            ConfigError: an endpoint cannot be bound; names the audience, the endpoint and the reason.
        """
        self._loop = loop
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "bind", self._audience.bind, self._audience.hwm)
            if self._audience.replay is not None:
                router = self._bind(zmq.ROUTER, "replay", self._audience.replay, None)
                self._replay = ReplayServer(loop, router, self._topic, self._log.since)
        except BaseException:
            self._context.destroy(linger=0)
            self._context = self._pub = None
            self._sequence.close()
            raise
        self._sent_at = loop.time()
        self._beat()

    def publish(self, events: Sequence[TierEvent]) -> None:
        """Send one turn's events, in drain order; never waits.

        A turn whose events this audience does not get, or need not hear, is sent as an empty batch.
        """
        if self._pub is None:
            self._counts["after_close"] += len(events)
            return
        if not events:
            return
        runs = self._projection.apply(events)
        for run in runs:
            for part in split(run.changes):
                self._send(run.rank, part)
        if not runs:
            self._send(self._rank, ())

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start and present sizes, by name (plain values)."""
        log = self._log.statistics()
        return {
            **self._counts,
            "sequence": self._last_number,
            "sequence_degraded": self._sequence.degraded,
            "announced": len(self._projection),
            "unmatched_removals": self._projection.unmatched,
            "ring_batches": log.ring_batches,
            "ring_bytes": log.ring_bytes,
            "folded_batches": log.folded,
            "tombstones": log.tombstones,
            "tombstones_forgotten": log.forgotten,
            **({} if self._replay is None else self._replay.statistics()),
        }

    def bound_endpoints(self) -> dict[str, str]:
        """Return the endpoints under ``bind`` and ``replay``, with the real port where 0 was asked."""
        return dict(self._endpoints)

    async def close(self, grace: float) -> None:
        """Stop publishing; give queued batches and running replays up to ``grace`` seconds to get out."""
        if self._pub is None or self._loop is None or self._context is None:
            return
        deadline = self._loop.time() + grace
        pub, self._pub = self._pub, None
        if self._timer is not None:
            self._timer.cancel()
        if self._replay is not None:
            await self._replay.close(grace / 2, linger=grace / 2)
        if self._extending is not None:
            await asyncio.wait([self._extending], timeout=grace)
        pub.close(linger=max(0, int((deadline - self._loop.time()) * 1000)))
        # Waits for the linger times at most; in a thread, since the loop has others to serve.
        await self._loop.run_in_executor(None, self._context.term)
        await self._loop.run_in_executor(None, self._sequence.close)

    def _bind(self, kind: int, key: str, endpoint: str, hwm: int | None) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, PUB_MAX_MESSAGE)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if hwm is not None:
            socket.setsockopt(zmq.SNDHWM, hwm)
        if kind == zmq.ROUTER:
            ReplayServer.configure(socket)
        before = os.umask(0o117)  # an ipc file is born 0660
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"events: audience {self._audience.name!r}: {key}: cannot bind {endpoint}: {error.strerror}"
            ) from error
        finally:
            os.umask(before)
        self._endpoints[key] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket

    def _send(self, rank: int, changes: Sequence[Change]) -> None:
        """Number a batch, keep it, and hand it to the socket."""
        assert self._pub is not None
        assert self._loop is not None
        number = self._sequence.next()
        payload = self._log.append(number, self._clock(), rank, changes)
        self._last_number, self._rank, self._sent_at = number, rank, self._loop.time()
        try:
            self._pub.send_multipart((self._topic, encode_sequence(number), payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the number stays taken: readers see a gap and find it in the ring
            self._counts["dropped"] += 1
            logger.warning("audience %s: batch %d not sent: %s", self._audience.name, number, error)
        self._counts["batches"] += 1
        self._counts["events"] += len(changes)
        self._counts["bytes"] += len(payload)
        if self._sequence.low and (self._extending is None or self._extending.done()):
            self._extending = self._loop.run_in_executor(None, self._sequence.extend)

    def _beat(self) -> None:
        """Send an empty batch after a silence: a reader that just joined asks for a replay only then."""
        if self._loop is None or self._pub is None or self._heartbeat <= 0:
            return
        if self._loop.time() - self._sent_at >= self._heartbeat:
            self._counts["heartbeats"] += 1
            self._send(self._rank, ())
        self._timer = self._loop.call_at(self._sent_at + self._heartbeat, self._beat)

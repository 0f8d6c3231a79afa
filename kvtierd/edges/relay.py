"""Listens to one engine's own event sockets: SUB for what it says, DEALER for what was missed.

All in the loop's thread on plain sockets, a slice at a time. What an engine says is passed on in its order;
while a lot of it waits (a restart takes back a whole cache) the sockets are not read. Nothing here ever
waits for the engine, and the engine never waits for us: PUB drops what we do not take.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtierd.config.relay import Relay
from kvtierd.edges.relay_journal import RelayJournal
from kvtierd.errors import ConfigError
from kvtierd.logs.events import event
from kvtierd.wire.following import EngineStream
from kvtierd.wire.kvevents import WireEvent
from kvtierd.wire.relay import EngineCache, Told
from kvtierd.wire.relay_records import Record, Recovered, encode, recover
from kvtierd.wire.stream import END, SEQUENCE_BYTES, encode_sequence

logger = logging.getLogger(__name__)

SLICE = 32
"""Messages taken in a row before others have their turn."""
TELL_SLICE = 512
"""Hashes passed on in a row, and one event more."""
RCVHWM = 100_000
"""Batches queued before the engine's PUB socket drops; vLLM's own default for its side."""
MAX_MESSAGE = 64 << 20
"""Bytes; more is no event batch."""
REPLAY_TIMEOUT = 5.0
"""Seconds without a reply after which a replay is given up."""
SILENCE = 5.0
"""Seconds after which a replay shows whether the last messages got lost: vLLM has no heartbeat."""
REJOIN = 0.5
"""Seconds for readers to connect again before they are told what changed since an earlier run."""
TAIL = 1.0
"""Seconds within which what a socket took has left the process, unless its reader is behind."""
DEPARTED = 2.0
"""Seconds after which an engine that closed its socket is taken to have left."""
_ARRIVALS = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
_EVENTS = _ARRIVALS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class EngineLink:
    """One engine's event sockets.

    ``tell`` passes events of a dp rank on; ``heard`` learns when its engine begins, or ceases, to be heard.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        plan: Relay,
        *,
        tell: Callable[[int, list[WireEvent]], None],
        heard: Callable[[int, bool], None],
        journal: RelayJournal | None = None,
    ) -> None:
        self.plan = plan
        self._journal = journal
        self._recovered: Recovered | None = None
        self._loop = loop
        self._tell = tell
        self._heard = heard
        self._cache = EngineCache(plan.dp_rank)
        self._stream = EngineStream(self._cache, can_replay=plan.replay is not None)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sub: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._dialogue = 0
        self._loaded = self._begun = False
        self._peers: set[int] = set()
        self._ranks: set[int] = set()
        self._outbox: deque[tuple[int, WireEvent]] = deque()
        self._working: asyncio.Handle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._live_at = self._reply_at = self._left_at = loop.time()
        self._malformed = 0

    def load(self) -> list[Told]:
        """Read what an earlier run left; return what readers know by it. May take seconds (any thread)."""
        self._loaded = True
        if self._journal is None:
            return []
        data = self._journal.load()
        found = recover(data, self._cache, tail=TAIL)
        self._journal.cut(found.length)
        if found.place is not None:
            self._stream.resume(*found.place)
        if found.seeds or found.doubts:
            self._recovered = found
        return found.seeds

    def start(self) -> None:
        """Pass on what the engine says.

        What an earlier run left is told a little later, so that readers can come back first.
        """
        self._left_at = self._loop.time()
        if self._recovered is None:
            self._begin()
        else:
            self._watch = self._loop.call_later(REJOIN, self._begin)

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the socket; an engine that is not there yet is waited for in the background.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._context = context
        sub = self._sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RCVHWM, RCVHWM)
        sub.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = sub.get_monitor_socket(_EVENTS)
        where = self.plan.connect or self.plan.bind or ""
        if "[" in where:
            sub.setsockopt(zmq.IPV6, 1)
        before = os.umask(0o117)  # an ipc file is born 0660
        try:
            (sub.connect if self.plan.connect is not None else sub.bind)(where)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(f"events: relay: cannot listen at {where}: {error.strerror}") from error
        finally:
            os.umask(before)
        for socket in (sub, self._monitor):
            self._loop.add_reader(_descriptor(socket), self._work_on)

    def _begin(self) -> None:
        recovered, self._recovered, self._begun = self._recovered, None, True
        self._post([] if recovered is None else recovered.doubts)
        self._work_on()
        self._look()

    def close(self, *, keep: bool = False) -> None:
        """Take back all that the engine announced, since nobody will tell of it any more, and hang up.

        To ``keep`` it is for a short absence: the record stays, and the next start tells the difference.
        """
        if self._sub is None:
            return
        keep = keep and self._journal is not None and self._journal.degraded is None
        if not keep:
            self._post(self._stream.gone())
        while self._outbox:
            self._tell_slice()
        for handle in (self._working, self._watch):
            if handle is not None:
                handle.cancel()
        self._hear(False)
        self._close_sockets()
        if self._journal is not None:
            if not keep and self._loaded:
                self._journal.clear()
            self._journal.close()

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start and the present state, by name (plain values)."""
        return {
            "endpoint": self.plan.connect or self.plan.bind,
            "dp_rank": self.plan.dp_rank,
            "connected": bool(self._peers),
            "sequence": self._stream.last,
            "replaying": self._stream.wanted is not None,
            "gpu_blocks": self._cache.on_device,
            "blocks": len(self._cache.known),
            "unsent": len(self._outbox),
            "unrecorded": None if self._journal is None else self._journal.degraded,
            "malformed": self._malformed + self._cache.counts["malformed"],
            **{name: self._stream.counts[name] for name in _STREAM_COUNTS},
            **{name: self._cache.counts[name] for name in _CACHE_COUNTS},
        }

    # -- a slice of work

    def _work_on(self) -> None:
        if self._working is None:
            self._working = self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Pass on what waits, else read a little. The descriptors signal edges: go on until all is empty."""
        self._working = None
        if self._sub is None or not self._begun:
            return
        if self._outbox:
            self._tell_slice()
            more = True
        else:
            more = self._read_monitor() | self._read_replay() | self._read_live()
            self._ask()
        if more or self._outbox:
            self._work_on()

    def _read_monitor(self) -> bool:
        assert self._monitor is not None
        for frames in _receive(self._monitor):
            message = parse_monitor_message(frames)
            kind, descriptor = message["event"], message["value"]
            if kind & _ARRIVALS:
                self._peers.add(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._peers.discard(descriptor)
                if not self._peers:
                    self._left_at = self._loop.time()
                    self._hear(False)
            else:
                self._live_at = self._loop.time()
                self._stream.check(connected=True)
                self._hear(True)
        return _readable(self._monitor)

    def _read_live(self) -> bool:
        assert self._sub is not None
        for frames in _receive(self._sub):
            if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES or frames[1] >= END:
                self._malformed += 1
                continue
            self._live_at = self._loop.time()
            self._post(self._stream.live(int.from_bytes(frames[1], "big"), frames[2]))
            if self._outbox:
                break
        return _readable(self._sub)

    def _read_replay(self) -> bool:
        """Take ``[b"", topic, number, payload]``; vLLM <= 0.24 sends no topic."""
        while self._dealer is not None and (frames := next(_receive(self._dealer), None)) is not None:
            self._reply_at = self._loop.time()
            if len(frames) not in (3, 4) or len(frames[-2]) != SEQUENCE_BYTES:
                self._malformed += 1
            elif frames[-2] == END:
                self._hang_up()
                self._post(self._stream.replay_ended())
            else:
                self._post(self._stream.replayed(int.from_bytes(frames[-2], "big"), frames[-1]))
            if self._outbox or self._dialogue != self._stream.dialogue:
                break
        return self._dealer is not None and _readable(self._dealer)

    def _post(self, told: list[Told]) -> None:
        """Record what was heard and queue what to tell; steady traffic leaves at once."""
        records, self._stream.records = self._stream.records, []
        if self._journal is not None and records:
            now = time.time()
            self._journal.append(b"".join(encode(Record(kind, n, now, body)) for kind, n, body in records))
            self._journal.renew(self._cache.known, self._stream.place, now)
        for rank, events in told:
            if rank not in self._ranks and self._peers:
                self._ranks.add(rank)
                self._heard(rank, True)
            self._outbox.extend((rank, event) for event in events)
        self._tell_slice()

    def _tell_slice(self) -> None:
        events: list[WireEvent] = []
        hashes, outbox = 0, self._outbox
        rank = outbox[0][0] if outbox else 0
        while outbox and outbox[0][0] == rank and hashes < TELL_SLICE:
            event = outbox.popleft()[1]
            events.append(event)
            hashes += len(getattr(event, "block_hashes", ()))
        if events:
            self._tell(rank, events)

    def _hear(self, heard: bool) -> None:
        """Say of which ranks' engines is heard now; before the first batch, of the likely one."""
        if heard and not self._ranks:
            self._ranks.add(self.plan.dp_rank or 0)
        for rank in self._ranks:
            self._heard(rank, heard)

    # -- replay

    def _ask(self) -> None:
        """Begin the replay that the stream wants, on a new socket so that no earlier reply mixes in."""
        stream = self._stream
        if stream.wanted is None or (self._dealer is not None and self._dialogue == stream.dialogue):
            return
        self._hang_up()
        assert self._context is not None
        assert self.plan.replay is not None
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)  # vLLM's ROUTER drops what does not fit
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        if "[" in self.plan.replay:
            dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(self.plan.replay)
        dealer.send_multipart([b"", encode_sequence(stream.wanted)])
        self._dialogue = stream.dialogue
        self._reply_at = self._loop.time()
        self._loop.add_reader(_descriptor(dealer), self._work_on)
        self._work_on()

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._loop.remove_reader(_descriptor(self._dealer))
            self._dealer.close(linger=0)
            self._dealer = None

    # -- time

    def _look(self) -> None:
        """See to what did not come: a reply, a message, the engine."""
        now = self._loop.time()
        if self._dealer is not None and now - self._reply_at > REPLAY_TIMEOUT and not self._outbox:
            self._hang_up()
            self._post(self._stream.replay_failed())
        elif not self._peers and now - self._left_at > DEPARTED and self._stream.last is not None:
            logger.info(
                "the engine at %s left",
                self.plan.connect or self.plan.bind,
                extra=event("relay_left", endpoint=self.plan.connect or self.plan.bind),
            )
            self._hang_up()
            self._post(self._stream.gone())
            self._ranks.clear()
        elif self._peers and now - max(self._live_at, self._reply_at) > SILENCE:
            self._stream.check()
        self._work_on()
        self._watch = self._loop.call_later(DEPARTED / 4, self._look)

    def _close_sockets(self) -> None:
        self._hang_up()
        for socket in (self._monitor, self._sub):
            if socket is not None and not socket.closed:
                self._loop.remove_reader(_descriptor(socket))
        if self._sub is not None:
            self._sub.disable_monitor()
            self._sub.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._sub = self._monitor = None


_STREAM_COUNTS = (
    "batches",
    "gaps",
    "late_joins",
    "repeats",
    "replays",
    "replay_timeouts",
    "truncated",
    "restarts",
    "departures",
    "unrepaired",
    "overflows",
)
_CACHE_COUNTS = (
    "events",
    "cleared",
    "unknown_events",
    "unknown_removals",
    "empty_stores",
    "refused_stores",
    "placeholders",
    "overflowed",
)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _receive(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield up to a slice of the messages that are there."""
    for _ in range(SLICE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return

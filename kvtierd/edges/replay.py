"""The replay dialogue of the event stream on a ROUTER socket (vLLM's, >= 0.26).

A client (DEALER, or REQ which takes the first reply only) sends ``[b"", start]``, ``start`` being 8 bytes
big-endian; it gets ``[b"", topic, number, payload]`` for every batch from there on and the end marker
``[b"", b"", ff*8, b""]``. Batches go out in slices between the loop's other work, and only as fast as the
client takes them, so that neither a large replay nor a client that stopped reading costs more than a
bounded queue. A peer (the address that a connection comes from; all of this pod's own are one) gets so many
replays a second and no more, and of those that run or wait never all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq

from kvtierd.wire.stream import END, SEQUENCE_BYTES, encode_sequence

SEND_QUEUE = 256
"""Batches queued for one client; beyond it the server waits. (A ROUTER would else drop, and vLLM's does.)"""
SLICE_BATCHES = 64
SLICE_BYTES = 256 << 10
SLICE_SECONDS = 0.002
"""After which a slice ends, whatever is in it: batches from before the ring are made as they are sent."""
MAX_ACTIVE = 4
"""Replays served at a time; each may hold a copy of the state."""
MAX_WAITING = 64
MAX_OF_PEER = 32
"""Of those that wait, how many may be one peer's."""
BURST = 64
RATE = 8.0
"""Replays that a peer may ask for at once, and a second from then on."""
MAX_PEERS = 1024
RETRY = 0.005
STALLED = 10.0
"""Seconds without progress after which a replay is given up."""

Since = Callable[[int], Iterator[tuple[int, bytes]]]


class _Frames(NamedTuple):
    topic: bytes
    number: bytes
    payload: bytes


_END = _Frames(b"", END, b"")


class _Replay:
    """One replay that runs; ``held`` is a message that the client's queue had no room for."""

    def __init__(self, batches: Iterator[tuple[int, bytes]], topic: bytes, now: float) -> None:
        self._batches = batches
        self._topic = topic
        self.held: _Frames | None = None
        self.progress = now

    def take(self) -> _Frames:
        """Return the next message, the end marker last."""
        if self.held is not None:
            return self.held
        batch = next(self._batches, None)
        if batch is None:
            return _END
        return _Frames(self._topic, encode_sequence(batch[0]), batch[1])


class _Request(NamedTuple):
    client: bytes
    start: int
    peer: str


class _Allowance:
    """How many replays each peer may still ask for (a token bucket each)."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # tokens left, and when that was

    def take(self, peer: str, now: float) -> bool:
        """Use up one, if there is one."""
        left, since = self._left.pop(peer, (float(BURST), now))
        left = min(float(BURST), left + (now - since) * RATE)
        self._left[peer] = (left - 1, now) if left >= 1 else (left, now)  # the latest last
        if len(self._left) > MAX_PEERS:
            del self._left[next(iter(self._left))]
        return left >= 1


class ReplayServer:
    """Serves replays on a bound ROUTER socket, which it owns, in the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], topic: bytes, since: Since
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._topic = topic
        self._since = since
        self._waiting: deque[_Request] = deque()
        self._allowance = _Allowance()
        self._active: dict[bytes, _Replay] = {}
        self._scheduled: asyncio.Handle | None = None
        self._draining: asyncio.Handle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._counts = dict.fromkeys(
            (
                "replay_requests",
                "replay_batches",
                "replays_done",
                "replays_abandoned",
                "replays_refused",
                "replays_limited",
                "replay_malformed",
            ),
            0,
        )
        loop.add_reader(self._descriptor, self._receive)
        self._receive()

    @staticmethod
    def configure(socket: zmq.Socket[bytes]) -> None:
        """Set what must be set before the socket is bound.

        ``ROUTER_MANDATORY`` turns a full queue and a client that went away into errors instead of silent
        loss.
        """
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and how many replays run or wait."""
        return {**self._counts, "replays_active": len(self._active) + len(self._waiting)}

    async def close(self, grace: float, *, linger: float) -> None:
        """Finish what runs within ``grace`` seconds, then close; ``linger`` seconds for what is queued."""
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            self._counts["replays_abandoned"] += len(self._active) + len(self._waiting)
        self.stop(linger=linger)

    def stop(self, *, linger: float) -> None:
        """Close at once; ``linger`` seconds for what is queued."""
        self._loop.remove_reader(self._descriptor)
        for handle in (self._scheduled, self._draining):
            if handle is not None:
                handle.cancel()
        self._active.clear()
        self._waiting.clear()
        self._socket.close(linger=int(linger * 1000))

    def _receive(self) -> None:
        """Take every request that is there: the descriptor signals edges, not levels."""
        self._draining = None
        for _ in range(SLICE_BATCHES):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._request([frame.bytes for frame in frames], _peer(frames[-1]))
        else:
            self._draining = self._loop.call_soon(self._receive)  # a flood: others first
        self._admit()

    def _request(self, frames: list[bytes], peer: str) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            self._counts["replay_malformed"] += 1
            return
        self._counts["replay_requests"] += 1
        if not self._allowance.take(peer, self._loop.time()):
            self._counts["replays_limited"] += 1
        elif (
            len(self._waiting) >= MAX_WAITING
            or sum(request.peer == peer for request in self._waiting) >= MAX_OF_PEER
        ):
            self._counts["replays_refused"] += 1
        else:
            self._waiting.append(_Request(frames[0], int.from_bytes(frames[2], "big"), peer))
            self._idle.clear()

    def _admit(self) -> None:
        """Start replays while there is room; a client's own requests one after the other."""
        for request in list(self._waiting):
            if len(self._active) >= MAX_ACTIVE:
                break
            if request.client not in self._active:
                self._waiting.remove(request)
                batches = self._since(request.start)
                self._active[request.client] = _Replay(batches, self._topic, self._loop.time())
        if self._active and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._pump)
        if not self._active and not self._waiting:
            self._idle.set()

    def _pump(self) -> None:
        """Send a slice to every client; soon again, or a little later where all are behind."""
        self._scheduled = None
        moved = [self._send_slice(client, replay) for client, replay in list(self._active.items())]
        if self._active:
            again = self._loop.call_soon if any(moved) else self._later
            self._scheduled = again(self._pump)
        if self._draining is None:
            self._receive()  # sending may have swallowed the signal of a request that arrived

    def _later(self, callback: Callable[[], None]) -> asyncio.Handle:
        return self._loop.call_later(RETRY, callback)

    def _send_slice(self, client: bytes, replay: _Replay) -> bool:
        """Send up to a slice; return whether anything was sent. Ends the replay when it is over."""
        sent = size = 0
        end = time.perf_counter() + SLICE_SECONDS
        while sent < SLICE_BATCHES and size < SLICE_BYTES and (not sent or time.perf_counter() < end):
            frames = replay.take()
            try:
                self._socket.send_multipart((client, b"", *frames), zmq.NOBLOCK)
            except zmq.Again:
                replay.held = frames
                break
            except zmq.ZMQError:  # EHOSTUNREACH: the client is gone
                self._end(client, "replays_abandoned")
                return True
            replay.held = None
            sent, size = sent + 1, size + len(frames.payload)
            if frames is _END:
                self._end(client, "replays_done")
                break
            self._counts["replay_batches"] += 1
        now = self._loop.time()
        if sent:
            replay.progress = now
        elif now - replay.progress > STALLED:
            self._end(client, "replays_abandoned")
        return sent > 0

    def _end(self, client: bytes, count: str) -> None:
        del self._active[client]
        self._counts[count] += 1


def _peer(frame: zmq.Frame) -> str:
    """Return the address that a message came from; empty for ipc, where libzmq knows none."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""

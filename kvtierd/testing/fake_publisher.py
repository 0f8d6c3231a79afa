"""An engine's event sockets without the engine, as vLLM has them: numbers from 0, a replay ring, and faults.

The behaviour is that of vLLM's ``ZmqEventPublisher`` (``vllm/distributed/kv_events.py``, 0.32): PUB binds, or
connects to a plain loopback address; the ROUTER for replays always binds; one thread owns both. Its PUB is an
XPUB, which sends the same and knows whether anybody hears it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import zmq

from kvtierd.wire.kvevents import Form, WireEvent, encode_batch
from kvtierd.wire.stream import END, SEQUENCE_BYTES, encode_sequence

POLL = 5
"""Milliseconds between two looks at the queue while no replay is asked for."""


class FakePublisher:
    """Publishes batches of dp rank ``rank`` until closed.

    ``connect``: the PUB socket connects instead of binding. ``ring``: batches kept for replays.
    ``topic_frame``: whether replies to a replay have one (vLLM >= 0.26). ``hole``: a number that replays
    leave out. ``mute``: replays are never answered.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None = None,
        *,
        connect: bool = False,
        rank: int | None = 0,
        form: Form = Form.MAP,
        ring: int = 10_000,
        topic: str = "kv-events",
        topic_frame: bool = True,
        hole: int | None = None,
        mute: bool = False,
    ) -> None:
        self.rank = rank
        self.number = 0
        """The next batch's."""
        self.requests: list[int] = []
        """Where replays were asked to begin."""
        self.subscribed = False
        """Whether anybody hears what is published from now on: a connection alone does not say so."""
        self._form = form
        self._topic = topic.encode()
        self._topic_frame = topic_frame
        self._hole = hole
        self._mute = mute
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        (self._pub.connect if connect else self._pub.bind)(endpoint)
        self._router: zmq.Socket[bytes] | None = None
        if replay is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 2 * (ring + 1))
            self._router.bind(replay)
        self._thread = threading.Thread(target=self._run, name="fake-publisher", daemon=True)
        self._thread.start()

    def publish(self, *events: WireEvent, lost: bool = False, payload: bytes | None = None) -> int:
        """Publish one batch and return its number; ``lost``: it is only in the ring. Does not wait."""
        number = self.number
        self.number += 1
        if payload is None:
            payload = encode_batch(time.time(), events, self.rank, self._form)  # type: ignore[arg-type]
        frames = [self._topic, encode_sequence(number), payload]
        self._queue.put(lambda: self._publish(number, payload, None if lost else frames))
        return number

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message that no engine would."""
        self._queue.put(lambda: self._pub.send_multipart(frames))

    def close(self) -> None:
        """Send what is queued and close the sockets, as an engine's end does."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=200)

    def __enter__(self) -> FakePublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            if self._router is not None and self._router.poll(0):
                self._serve(self._router)
            while self._pub.poll(0):  # the first who subscribes, the last who leaves
                self.subscribed = self._pub.recv()[:1] == b"\1"
            try:
                self._queue.get(timeout=POLL / 1000)()
            except queue.Empty:
                continue

    def _publish(self, number: int, payload: bytes, frames: Sequence[bytes] | None) -> None:
        self._ring.append((number, payload))
        if frames is not None:
            self._pub.send_multipart(frames)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        client, _, begin = router.recv_multipart()
        assert len(begin) == SEQUENCE_BYTES
        start = int.from_bytes(begin, "big")
        self.requests.append(start)
        if self._mute:
            return
        topic = [self._topic] if self._topic_frame else []
        for number, payload in self._ring:
            if number >= start and number != self._hole:
                router.send_multipart([client, b"", *topic, encode_sequence(number), payload])
        router.send_multipart([client, b"", *([b""] if self._topic_frame else []), END, b""])

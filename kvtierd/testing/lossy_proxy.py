"""A ZeroMQ proxy between a publisher and its subscribers that loses and repeats messages when told to."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

import zmq

POLL = 10
"""Milliseconds until a close is noticed."""
EMPTY = 32
"""Bytes; a batch without events has fewer, and is never lost or repeated: a fault should hit what counts."""


class LossyProxy:
    """Passes on what ``source`` publishes at :attr:`endpoint`; the source may come, go and come back.

    A subscriber of the proxy joins as one of the source does: it hears what is published from then on.
    """

    def __init__(self, source: str) -> None:
        self._lock = threading.Lock()
        self._to_lose = self._to_repeat = 0
        self.lost = self.repeated = self.passed = 0
        """Messages with events."""
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 0)
        self._pub.bind("tcp://127.0.0.1:0")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="lossy-proxy", daemon=True)
        self._thread.start()

    def lose(self, messages: int) -> None:
        """Lose the next ``messages`` that have events."""
        with self._lock:
            self._to_lose += messages

    def repeat(self, messages: int) -> None:
        """Pass the next ``messages`` that have events on twice."""
        with self._lock:
            self._to_repeat += messages

    def close(self) -> None:
        """Close the sockets."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._sub.poll(POLL):
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._pass(self._sub.recv_multipart(zmq.NOBLOCK))

    def _pass(self, frames: list[bytes]) -> None:
        times = 1
        if len(frames[-1]) > EMPTY:
            with self._lock:
                times = self._times()
        for _ in range(times):
            self._pub.send_multipart(frames)

    def _times(self) -> int:
        if self._to_lose:
            self._to_lose -= 1
            self.lost += 1
            return 0
        self.passed += 1
        if self._to_repeat:
            self._to_repeat -= 1
            self.repeated += 1
            return 2
        return 1

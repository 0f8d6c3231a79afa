"""How many connections a PUB socket has: ZeroMQ tells on a monitor socket, and nowhere else."""

from __future__ import annotations

import asyncio
import itertools

import zmq
from zmq.utils.monitor import parse_monitor_message

_numbers = itertools.count(1)


class Subscribers:
    """Counts the connections of ``socket``, in the loop's thread. Start it before the socket is bound."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
    ) -> None:
        self._loop = loop
        self._open: set[int] = set()
        self._socket = socket
        where = f"inproc://subscribers-{next(_numbers)}"
        socket.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        # ZeroMQ's own threads would wait for room here, so there is always some.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(where)
        self._descriptor = int(self._monitor.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._read)
        self._read()

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Stop counting; call it before the socket is closed."""
        if self._monitor.closed:
            return
        self._loop.remove_reader(self._descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._open.clear()

    def _read(self) -> None:
        """Take every event that is there: the descriptor signals edges, not levels."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(event["value"])
            else:
                self._open.add(event["value"])

"""A Unix socket under a :class:`Link`: bytes and descriptors in, bytes out, never waiting."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct

from kvtierd.client._link import Link, Phase
from kvtierd.client._mapping import Region, adopt, look
from kvtierd.core.effects import Attached, Reply
from kvtierd.errors import RemoteProtocolError, RequestRefused

_READ_BYTES = 1 << 16
_TIMEVAL = struct.Struct("@ll")
# By how much the kernel's patience may be longer than what is asked for: seconds, and a part of it.
_GRAIN, _SHARE = 0.001, 0.01
# Two descriptors come with an attach; room for more, so that surplus ones are seen and closed.
_ANCILLARY = socket.CMSG_SPACE(8 * array.array("i").itemsize)

_NOW = socket.MSG_DONTWAIT

# What ends a connection: the system's errors and a daemon that does not keep to the protocol.
LOST = (OSError, RemoteProtocolError)


class Channel:
    """The socket of one session and the pool that came over it. Every call returns at once."""

    def __init__(self, path: str, link: Link) -> None:
        self.link = link
        self.region: Region | None = None
        self.presence: memoryview | None = None
        """The daemon's cells (:mod:`kvtierd.core.presence`), as long as the connection stands."""
        self.sock: socket.socket | None = None
        self._path = path
        self._patience = 0.0
        """Seconds that the kernel waits in :meth:`read`."""
        self._descriptors: list[int] = []
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)

    def open(self) -> None:
        """Connect and queue the hello.

        Raises:
            OSError: nobody listens there, or the daemon is too busy to take the connection now.
        """
        self.drop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        sock.setblocking(True)  # so that :meth:`read` can wait in the kernel; all else says DONTWAIT
        self.sock, self._patience = sock, 0.0
        self.link.open()

    def read(self, seconds: float) -> memoryview | None:
        """Read once from a connection that is ready, waiting in the kernel for half of these seconds or more.

        At most for all of them, to a hundredth. ``None``: nothing came; what came is valid until the next
        read, and is for :meth:`take`. One system call where a poll and a read are two (about 3 us less in a
        round trip), and seldom a third: waits of different lengths, as of lookups and loads, take turns.

        Raises:
            OSError: the connection is over.
        """
        sock = self.sock
        assert sock is not None
        if not seconds / 2 <= self._patience <= _GRAIN + (1 + _SHARE) * seconds:
            self._patience = seconds
            whole = int(seconds)
            limit = _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            count = sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return None
        if count == 0:
            raise ConnectionResetError("the daemon closed the connection")
        return self._view[:count]

    def receive(self) -> list[Reply]:
        """Read what has arrived, once; returns the replies that somebody waits for.

        Raises:
            OSError, RemoteProtocolError: the connection is over.
        """
        assert self.sock is not None
        shaking = not self.link.ready
        try:
            if shaking:
                count = self._read_with_descriptors(self.sock)
            else:
                count = self.sock.recv_into(self._buffer, 0, _NOW)
        except (BlockingIOError, InterruptedError):
            return []
        if count == 0:
            raise ConnectionResetError("the daemon closed the connection")
        replies = self.take(self._view[:count])
        if shaking and self.link.ready and self.link.attached is not None:
            descriptors, self._descriptors = self._descriptors, []
            self.region, again = self._adopt(self.link.attached, descriptors)
            self.link.mapped(again=again)
        return replies

    def take(self, data: memoryview) -> list[Reply]:
        """Understand what was read; returns the replies that somebody waits for.

        Raises:
            OSError, RemoteProtocolError: the connection is over.
        """
        replies = self.link.feed(data)
        if self.link.phase is Phase.IDLE:
            raise ConnectionRefusedError(str(self.link.refused))
        return replies

    def _adopt(self, attached: Attached, descriptors: list[int]) -> tuple[Region, bool]:
        """Map the pool; a process that may not is refused for good by itself, and hears why."""
        try:
            self.presence = look(attached, descriptors)
            return adopt(attached, descriptors)
        except RemoteProtocolError as error:
            self.link.refused = RequestRefused("cannot_map", str(error))
            raise

    def flush(self) -> bool:
        """Write as much as the socket takes; True when nothing is left.

        Raises:
            OSError: the connection is over.
        """
        output = self.link.output
        while output:
            assert self.sock is not None
            try:
                sent = self.sock.send(output, _NOW)
            except (BlockingIOError, InterruptedError):
                return False
            del output[:sent]
        return True

    def drop(self) -> None:
        """Close the socket. The mapping and the liveness descriptor stay: copies may still run."""
        self.link.close()
        self.presence = None
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors = []
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def _read_with_descriptors(self, sock: socket.socket) -> int:
        flags = _NOW | socket.MSG_CMSG_CLOEXEC
        count, ancillary, came, _ = sock.recvmsg_into([self._buffer], _ANCILLARY, flags)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._descriptors.extend(received)
        if came & socket.MSG_CTRUNC or len(self._descriptors) > 8:
            raise RemoteProtocolError("the daemon sent more descriptors than an attach has")
        return count

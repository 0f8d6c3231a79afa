"""The socket of a takeover: frames and descriptors between two daemons, each step with a deadline.

Everything here blocks; call it in a thread.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtierd.edges.kept_pool import KeptPool
from kvtierd.errors import ExitCode, KvtierdError
from kvtierd.wire.frames import MAX_BODY, Unreadable, check
from kvtierd.wire.handover import Ask, Go, Handed, Message, Offer, Part, Ready, Refusal, Taken, decode, encode

NAME = "takeover.sock"
FDS_PER_MESSAGE = 200
"""The kernel takes 253."""
STEP_SECONDS = 10.0
"""For each message of the other daemon."""
READY_SECONDS = 120.0
"""For the other daemon to map and lock the pool and to learn what is in it; this one serves meanwhile."""
_HEAD = 8


class CannotTakeOver(KvtierdError):
    """The running daemon refused, or did not answer; it goes on."""

    exit_code = ExitCode.CANT_CREATE


class Peer:
    """The other daemon. ``descriptors``: those that came and were not taken yet."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.descriptors: list[int] = []
        sock.setblocking(True)

    def who(self) -> tuple[int, int]:
        """Return the other process and its user."""
        found = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", found)
        return pid, uid

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; descriptors go along with its first bytes.

        Raises:
            OSError: the other one is gone, or does not read.
        """
        self._sock.settimeout(STEP_SECONDS)
        data = memoryview(encode(message))
        chunks = [
            descriptors[at : at + FDS_PER_MESSAGE] for at in range(0, len(descriptors), FDS_PER_MESSAGE)
        ]
        for number, chunk in enumerate(chunks):  # each chunk needs a byte of its own to travel with
            sent = socket.send_fds(self._sock, [data[number : number + 1]], list(chunk))
            assert sent == 1
        self._sock.sendall(data[len(chunks) :])

    def receive(self, seconds: float = STEP_SECONDS) -> Message:
        """Return the next message; its descriptors are in :attr:`descriptors`.

        Raises:
            OSError: the other one is gone or silent.
            Unreadable: it said something else.
        """
        until = time.monotonic() + seconds
        head = self._read(_HEAD, until)
        length = int.from_bytes(head[:4], "little")
        if not 0 < length <= MAX_BODY:
            raise Unreadable(f"a message of {length} bytes")
        return decode(check(head, self._read(length, until)))

    def _read(self, count: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._sock.settimeout(max(0.001, until - time.monotonic()))
            space = socket.CMSG_SPACE(FDS_PER_MESSAGE * array.array("i").itemsize)
            part, ancillary, flags, _ = self._sock.recvmsg(
                min(count - len(data), 1 << 20), space, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    got = array.array("i")
                    got.frombytes(raw[: len(raw) - len(raw) % got.itemsize])
                    self.descriptors.extend(got)
            if flags & socket.MSG_CTRUNC:
                raise Unreadable("descriptors were lost: the limit of open files is too low")
            if not part:
                raise ConnectionResetError("the other daemon is gone")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took."""
        self._sock.close()
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.descriptors = []


class Offered:
    """A running daemon's pool, and what is in it: ``table``. That daemon still serves.

    ``owner``: the pool's descriptor; who takes it sets it to -1.
    """

    def __init__(self, peer: Peer, offer: Offer, owner: int, table: bytes) -> None:
        self.offer = offer
        self.owner = owner
        self.table = table
        self._peer = peer

    def accept(self, kept: KeptPool) -> Inheritance:
        """Have the other daemon stop serving; ``kept`` is its pool, ready to be gone on with.

        Raises:
            CannotTakeOver: it does not stop; its reason.
        """
        peer = self._peer
        with _complaints():
            peer.send(Ready())
            answer = peer.receive(2 * STEP_SECONDS)
            if isinstance(answer, Refusal):
                raise CannotTakeOver(f"takeover: refused: {answer.reason}")
            if not isinstance(answer, Handed) or len(answer.names) != len(peer.descriptors):
                raise _unexpected()
        descriptors, peer.descriptors = peer.descriptors, []
        return Inheritance(peer, answer, descriptors, kept)

    def close(self) -> None:
        """Hang up: the other daemon goes on."""
        self._peer.close()
        if self.owner >= 0:
            os.close(self.owner)
            self.owner = -1


class Inheritance:
    """What a running daemon handed over, beside its pool ``kept``; :meth:`confirm` before it is used."""

    def __init__(self, peer: Peer | None, handed: Handed, descriptors: Sequence[int], kept: KeptPool) -> None:
        self.handed = handed
        self.kept = kept
        self._peer = peer
        self._descriptors = list(descriptors)

    def take(self, name: str) -> int | None:
        """Return a descriptor by its name, once; it belongs to the caller then."""
        for index, other in enumerate(self.handed.names):
            if other == name and self._descriptors[index] >= 0:
                descriptor, self._descriptors[index] = self._descriptors[index], -1
                return descriptor
        return None

    def confirm(self) -> None:
        """Say that everything is ready, and wait for the word to serve.

        Raises:
            CannotTakeOver: it does not come; the other daemon goes on.
        """
        if self._peer is None:
            return
        try:
            self._peer.send(Taken())
            answer = self._peer.receive()
        except (OSError, Unreadable) as error:
            raise CannotTakeOver(f"takeover: the running daemon does not let go: {error}") from None
        if not isinstance(answer, Go):
            raise CannotTakeOver("takeover: the running daemon did not let go")

    def close(self) -> None:
        """Close what was not taken."""
        if self._peer is not None:
            self._peer.close()
        for descriptor in self._descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors = []


def ask(runtime_dir: Path, request: Ask) -> Offered:
    """Ask the running daemon to hand over; returns its pool and what is in it.

    Raises:
        CannotTakeOver: with its reason.
    """
    path = runtime_dir / NAME
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    peer = Peer(sock)
    try:
        with _complaints(f"{path}: ", ": is a daemon running there?"):
            sock.settimeout(STEP_SECONDS)
            sock.connect(str(path))
            peer.send(request)
            answer = peer.receive(2 * STEP_SECONDS)
        with _complaints():
            if isinstance(answer, Refusal):
                raise CannotTakeOver(f"takeover: refused: {answer.reason}")
            if not isinstance(answer, Offer):
                raise _unexpected()
            table = b"".join(_parts(peer))
            if len(peer.descriptors) != 1:
                raise _unexpected()
    except CannotTakeOver:
        peer.close()
        raise
    (owner,), peer.descriptors = peer.descriptors, []
    return Offered(peer, answer, owner, table)


def _parts(peer: Peer) -> Iterator[bytes]:
    while True:
        part = peer.receive()
        if not isinstance(part, Part):
            raise _unexpected()
        if not part.table:
            return
        yield part.table


def _unexpected() -> CannotTakeOver:
    return CannotTakeOver("takeover: the running daemon sent something else than what was asked for")


@contextmanager
def _complaints(where: str = "", question: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, Unreadable) as error:
        raise CannotTakeOver(f"takeover: {where}{error}{question}") from None

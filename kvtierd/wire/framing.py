"""Frames of the engine socket: a 4-byte big-endian length, then that many bytes of one message.

The length is judged before anything is kept for it, so a peer that speaks another protocol costs four bytes
of attention and gets named in the error. Bytes may come in pieces of any size.
"""

from __future__ import annotations

import struct

from kvtierd.errors import LocalProtocolError, RemoteProtocolError
from kvtierd.wire.messages import MAX_FRAME_BYTES

HEADER_BYTES = 4
_length_of = struct.Struct(">I").unpack_from

# First bytes of protocols that end up on the wrong socket; the first match names the peer.
_FAMILIAR: tuple[tuple[bytes, str], ...] = (
    (b"\x16\x03", "a TLS hello"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\xff\x00\x00", "a ZeroMQ greeting"),
    (b"SSH-", "an SSH greeting"),
    (b"GET ", "HTTP text"),
    (b"HEAD", "HTTP text"),
    (b"POST", "HTTP text"),
    (b"PUT ", "HTTP text"),
    (b"DELE", "HTTP text"),
    (b"OPTI", "HTTP text"),
    (b"PATC", "HTTP text"),
    (b"CONN", "HTTP text"),
    (b"TRAC", "HTTP text"),
    (b"PRI ", "HTTP/2 text"),
    (b"HTTP", "HTTP text"),
)


def frame(payload: bytes) -> bytes:
    """Return ``payload`` with its length in front.

    Raises:
        LocalProtocolError: the payload is empty or longer than any peer accepts.
    """
    size = len(payload)
    if not 0 < size <= MAX_FRAME_BYTES:
        raise LocalProtocolError(f"a message of {size} bytes does not fit a frame (1 to {MAX_FRAME_BYTES})")
    return size.to_bytes(HEADER_BYTES, "big") + payload


def looks_like(head: bytes) -> str:
    """Name the protocol that begins with these bytes, for a person who reads the log."""
    for start, name in _FAMILIAR:
        if head.startswith(start):
            return name
    if head[0] & 0xF0 == 0x80 or head[0] in (0xDE, 0xDF):
        return "a msgpack map without a length in front"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        return "text"
    return "another protocol, random bytes or a frame that is too long"


class Deframer:
    """Cuts a byte stream into payloads. After an error it stays broken: a stream has no way back in step.

    ``max_bytes`` bounds one payload; it may be changed between frames (a handshake needs less).
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._broken: str | None = None

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Keep bytes that arrived, to be taken by :meth:`pop`."""
        self._buffer += data

    def pop(self) -> bytes | None:
        """Return the next complete payload, or None while it is still coming.

        Raises:
            RemoteProtocolError: the stream cannot be frames of this protocol; nothing was allocated for it.
        """
        if self._broken is not None:
            raise RemoteProtocolError(self._broken)
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(buffer[:HEADER_BYTES], "big")
        if not 0 < size <= self.max_bytes:
            self._break(size)
        end = HEADER_BYTES + size
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            payload = bytes(view[HEADER_BYTES:end])
        del buffer[:end]
        return payload

    def whole(self, data: bytes | bytearray | memoryview) -> memoryview | None:
        """Return the payload if nothing is held and ``data`` is one whole frame; else take nothing.

        The common case of a client that waits for each answer: no copy, and one call where
        :meth:`push` and :meth:`pop` are two.
        """
        size = len(data) - HEADER_BYTES
        if self._buffer or self._broken is not None or not 0 < size <= self.max_bytes:
            return None
        if _length_of(data)[0] != size:
            return None
        return memoryview(data)[HEADER_BYTES:]

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes | memoryview]:
        """Take bytes that arrived and return every payload that is complete now.

        Raises:
            RemoteProtocolError: as in :meth:`pop`.
        """
        if (whole := self.whole(data)) is not None:
            return [whole]
        self.push(data)
        payloads: list[bytes | memoryview] = []
        while (payload := self.pop()) is not None:
            payloads.append(payload)
        return payloads

    @property
    def pending(self) -> int:
        """Bytes that are held: frames that were not taken yet and an incomplete one."""
        return len(self._buffer)

    def rest(self) -> bytes:
        """Return the bytes that are held."""
        return bytes(self._buffer)

    @property
    def ready(self) -> bool:
        """Whether :meth:`pop` has something to say now: a payload or an error."""
        if self._broken is not None:
            return True
        held = len(self._buffer)
        if held < HEADER_BYTES:
            return False
        size = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        return not 0 < size <= self.max_bytes or held >= HEADER_BYTES + size

    def _break(self, size: int) -> None:
        if size == 0:
            self._broken = "a frame of length 0 carries no message"
        else:
            what = looks_like(bytes(self._buffer[:16]))
            self._broken = f"a frame length of {size} is over {self.max_bytes}: this looks like {what}"
        self._buffer.clear()
        raise RemoteProtocolError(self._broken)

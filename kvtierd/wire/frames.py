"""Checked frames in files that are only appended to: whatever ends the process tears at most the last one.

::

    file  = MAGIC frame*
    frame = length (4 bytes, little-endian), CRC-32 of the body (4 bytes), body (msgpack)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

MAX_BODY = 1 << 30

UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What a decoder raises for bytes that somebody else sealed: its own errors, nesting without an end."""

_HEAD = 8


class Torn(Exception):
    """The last frame is incomplete: what comes before ``offset`` is good."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"torn at byte {offset}")
        self.offset = offset


class Unreadable(Exception):
    """These bytes are not a file that this version can believe."""


def checked(body: bytes) -> bytes:
    """Return the frame of a body."""
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def check(head: bytes, body: bytes) -> bytes:
    """Return a body that came with this head of 8 bytes.

    Raises:
        Unreadable: the checksum is wrong.
    """
    if zlib.crc32(body) != int.from_bytes(head[4:], "little"):
        raise Unreadable("a checksum is wrong")
    return body


def read_magic(file: BinaryIO, magic: bytes, stem: bytes, what: str) -> None:
    """Read a file's first bytes; ``stem`` is what all versions of it begin with, ``what`` its name.

    Raises:
        Torn: there are fewer.
        Unreadable: something else, or a form of another version.
    """
    found = file.read(len(magic))
    if found == magic:
        return
    if magic.startswith(found):
        raise Torn(0)
    if found.startswith(stem):
        version = found[len(stem) :].decode("latin-1").strip()
        raise Unreadable(f"it has another version's form ({version})")
    raise Unreadable(f"it does not begin as {what} does")


def bodies(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bodies of the frames from here on.

    Raises:
        Torn: the last frame is incomplete.
        Unreadable: a frame in the middle is damaged.
    """
    while True:
        start = file.tell()
        head = file.read(_HEAD)
        if not head:
            return
        length = int.from_bytes(head[:4], "little")
        if len(head) < _HEAD:
            raise Torn(start)
        if not 0 < length <= MAX_BODY:
            raise Unreadable(f"a record of {length} bytes at byte {start}")
        body = file.read(length)
        if len(body) < length:
            raise Torn(start)
        if zlib.crc32(body) != int.from_bytes(head[4:], "little"):
            if not file.read(1):
                raise Torn(start)
            raise Unreadable(f"the checksum of the record at byte {start} is wrong")
        yield body

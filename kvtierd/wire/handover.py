"""What two daemons of one machine say to each other when one takes over from the other.

The new one connects to ``takeover.sock`` and says :class:`Ask`. The running one answers :class:`Refusal` and
goes on, or stops serving and answers :class:`Handed`, with descriptors. The new one says :class:`Taken` when
everything is ready, and serves only after :class:`Go`; whatever else happens, the running one goes on. All
messages are frames of :mod:`kvtierd.wire.frames` with one msgpack array each, tagged by name.
"""

from __future__ import annotations

import msgspec

from kvtierd.core.handover import Live
from kvtierd.wire.frames import UNDECODABLE, Unreadable, checked

FORMAT = 1
"""Of these messages and of the slot table; the newer daemon has to know the older one's."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A daemon wants to take over. ``format``: the newest that it understands."""

    format: int
    daemon: str
    pool_bytes: int
    backing: str
    pool_path: str


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """No takeover, for this reason; nothing has changed."""

    reason: str


class HandedConnection(msgspec.Struct, frozen=True, array_like=True):
    """An attached connection; ``pending``: bytes of requests that were read and not served yet."""

    number: int
    version: int
    features: tuple[str, ...]
    client: str
    process: bytes
    pending: bytes


class Handed(msgspec.Struct, frozen=True, array_like=True, tag="handed"):
    """All that the new daemon needs. With it come descriptors: ``names`` says what each one is, in order.

    ``table``: a generation of the slot table, from its first byte.
    """

    format: int
    pool_id: str
    next_number: int
    table: bytes
    live: Live
    connections: tuple[HandedConnection, ...]
    names: tuple[str, ...]


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The new daemon has everything and waits for the word to serve."""


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """The old daemon will never serve again."""


Message = Ask | Refusal | Handed | Taken | Go
_decoder = msgspec.msgpack.Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """Return a message's frame."""
    return checked(_encode(message))


def decode(body: bytes) -> Message:
    """Return the message in a frame's body.

    Raises:
        Unreadable: it is none.
    """
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise Unreadable(f"no message of a takeover: {error}") from error


def downgrade(ask: Ask) -> str:
    """Return why a daemon cannot take over from this one, or nothing."""
    if ask.format < FORMAT:
        return (
            f"{ask.daemon} understands format {ask.format} of the handover, this daemon has format {FORMAT}:"
            " a downgrade needs a restart"
        )
    return ""

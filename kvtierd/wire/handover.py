"""What two daemons of one machine say to each other when one takes over from the other.

The new one connects to ``takeover.sock`` and says :class:`Ask`. The running one answers :class:`Refusal`, or
:class:`Offer` with the pool's descriptor and what its slots hold, in :class:`Part` after part, while it
serves on. When the new one has made use of all that, it says :class:`Ready`; the running one stops serving
and answers :class:`Handed`, with descriptors, or a refusal. The new one says :class:`Taken` when everything
is in place, and serves only after :class:`Go`; whatever else happens, the running one goes on. All messages
are frames of :mod:`kvtierd.wire.frames` with one msgpack array each, tagged by name.
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


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """The pool, whose descriptor comes along; parts of its slot table follow.

    ``recorded``: whether a daemon that comes after the end of this one finds it.
    """

    pool_id: str
    recorded: bool


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """A part of a generation of the slot table, which begins with the first; the last one is empty."""

    table: bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The new daemon has the pool and knows its blocks; the rest can be handed over."""


class HandedConnection(msgspec.Struct, frozen=True, array_like=True):
    """An attached connection; ``pending``: bytes of requests that were read and not served yet."""

    number: int
    version: int
    features: tuple[str, ...]
    client: str
    process: bytes
    pending: bytes


class Handed(msgspec.Struct, frozen=True, array_like=True, tag="handed"):
    """What the new daemon still needs. With it come descriptors: ``names`` says what each is, in order.

    ``table``: a generation of the slot table, from its first byte: what changed since that of the parts, or,
    if ``whole``, all there is to know. ``notify``: the service manager's address; ``watchdog``: seconds.
    """

    format: int
    next_number: int
    table: bytes
    whole: bool
    live: Live
    connections: tuple[HandedConnection, ...]
    names: tuple[str, ...]
    notify: str = ""
    watchdog: float = 0.0


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The new daemon has everything and waits for the word to serve."""


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """The old daemon will never serve again."""


Message = Ask | Refusal | Offer | Part | Ready | Handed | Taken | Go
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

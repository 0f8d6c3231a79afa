"""The client's half of one connection after another, without I/O: handshake, ids, fences, late replies.

The blocking and the asyncio client drive the same :class:`Link`. It takes bytes and gives replies and bytes
to write; sockets, clocks and waiting are the drivers' business.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from kvtierd.core.effects import Attached, ErrorCode, Loaded, LookedUp, Prepared, Refused, Reply, Revoked
from kvtierd.core.stimuli import Abort, Release, Request
from kvtierd.errors import RemoteProtocolError, RequestRefused
from kvtierd.wire.framing import Deframer, frame
from kvtierd.wire.messages import (
    FEATURES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Hello,
    Welcome,
    decode_server,
    encode,
)

R = TypeVar("R", bound=Reply)

# What a decoder raises for bytes of a peer: besides its own errors, bad UTF-8 and nesting that has no end.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_ID_MAX = 1 << 31

# Seconds that one verb may wait for a daemon that is just coming back, and for one that is late already.
RECONNECT_WAIT = 0.05
OVERDUE_WAIT = 0.005

# Why a verb ended as a miss without the daemon's word; otherwise the reason is its ErrorCode.
AWAY = "away"
LATE = "late"
STALE = "stale"

# Refusals that only a mistake of the caller can cause. All others are passing states and become misses.
RAISED: Final = frozenset({ErrorCode.BAD_REQUEST, ErrorCode.UNKNOWN_TIER, ErrorCode.NOT_ALLOWED})
# Refusals of an attach that the same attach may survive a moment later.
PASSING: Final = frozenset({ErrorCode.BUSY, ErrorCode.STOPPING})


@dataclass(frozen=True, slots=True)
class Miss:
    """No answer that the verb can use. ``reason`` is ``away``, ``late``, ``stale`` or an ErrorCode."""

    reason: str


class Verb(msgspec.Struct, Generic[R]):
    """One request and what its answer must be.

    ``build`` is called with ``id=``. ``patience`` is how many seconds the daemon may take by the request's
    own terms, on top of the client's deadline. ``epoch`` names the connection that the request's job or lease
    belongs to; on any other it is not sent. ``ends`` marks requests that give something back: a daemon that
    is late still gets them, nobody waits for the answer. ``size``: how many keys it names, where a miss must
    know that.
    """

    build: Callable[..., Request]
    reply: type[R]
    patience: float = 0.0
    epoch: int | None = None
    ends: bool = False
    size: int = 0


def outcome(verb: Verb[R], reply: Reply) -> R | Miss:
    """Judge an answer.

    Raises:
        RequestRefused: the daemon found a mistake of the caller.
        RemoteProtocolError: the answer is of a type that this request cannot have.
    """
    if type(reply) is verb.reply:
        return reply
    if isinstance(reply, Refused):
        if reply.code in RAISED:
            raise RequestRefused(reply.code, reply.message)
        return Miss(reply.code)
    raise RemoteProtocolError(f"{type(reply).__name__} does not answer a request for {verb.reply.__name__}")


class Backoff:
    """When to try again: from 0.05 s doubling to 2 s, with jitter."""

    FIRST = 0.05
    MOST = 2.0

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self._failures = 0
        self._until: float | None = None

    def remaining(self) -> float:
        """Seconds until the next attempt may be made; 0 when it may be made now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def failed(self) -> None:
        """An attempt failed or a connection was lost."""
        most = min(self.MOST, self.FIRST * 2 ** min(self._failures, 10))
        self._failures += 1
        self._until = self._clock() + self._rng.uniform(self.FIRST, most)

    def succeeded(self) -> None:
        """A connection stands."""
        self._failures, self._until = 0, None


class Phase(enum.Enum):
    """How far the connection is."""

    IDLE = "idle"
    GREETING = "greeting"
    ATTACHING = "attaching"
    READY = "ready"


class Link:
    """Handshake, request ids and notices of the connections of one session.

    ``attach`` builds the attach request (called with ``id=``); None where only the status is asked for.
    ``output`` holds bytes to be written; the driver removes what it wrote.
    """

    def __init__(self, attach: Callable[..., Request] | None, client: str) -> None:
        self.phase = Phase.IDLE
        self.epoch = 0
        self.attached: Attached | None = None
        self.refused: RequestRefused | None = None
        self.overdue = False
        self.output = bytearray()
        self._attach, self._client = attach, client
        self._last_id = 0
        self._handshake = 0
        self._deframer = Deframer()
        self._awaited: set[int] = set()
        self._orphans: set[int] = set()
        self._revoked = self._acknowledged = self._polled = 0
        self._attaches = 0
        """Asked for since the last one that was answered and mapped."""

    @property
    def ready(self) -> bool:
        """Whether the handshake is done."""
        return self.phase is Phase.READY

    def open(self) -> None:
        """A socket is connected: start the handshake."""
        self.close()
        self._deframer = Deframer()
        self.phase = Phase.GREETING
        hello = Hello(
            id=self._next_id(), versions=(PROTOCOL_MIN, PROTOCOL_MAX), features=FEATURES, client=self._client
        )
        self._handshake = self._write(hello)

    def close(self) -> None:
        """The connection is gone: nobody waits for anything any more."""
        self.phase = Phase.IDLE
        self.overdue = False
        self.output.clear()
        self._awaited.clear()
        self._orphans.clear()

    def forget(self) -> None:
        """This is a forked child: nothing that the parent agreed with the daemon counts here."""
        self.close()
        self.attached = None
        self._revoked = self._acknowledged = self._polled = self._attaches = 0

    def ask(self, build: Callable[..., Request]) -> int:
        """Queue a request and return its id; :meth:`feed` returns the answer with the same id.

        Raises:
            TypeError, LocalProtocolError: the request cannot be encoded; nothing was queued.
        """
        self._last_id = request = self._last_id % _ID_MAX + 1
        self.output += frame(encode(build(id=request)))
        self._awaited.add(request)
        return request

    def single(self, request: int, data: memoryview) -> Reply | None:
        """Return the answer to ``request`` if ``data`` is it and nothing else; ``None``: nothing was taken.

        The short way of :meth:`feed` for a caller that waits for each answer.
        """
        payload = self._deframer.whole(data)
        if payload is None:
            return None
        try:
            reply = decode_server(payload)
        except UNREADABLE:
            return None
        if reply.id != request:
            return None
        self.overdue = False
        self._awaited.discard(request)
        return reply

    def abandon(self, request: int, *, late: bool = False) -> None:
        """Nobody waits for this answer any more. What a late answer hands out is given back unseen."""
        if request in self._awaited:
            self._awaited.discard(request)
            self._orphans.add(request)
            self.overdue = self.overdue or late

    def feed(self, data: bytes | bytearray | memoryview) -> list[Reply]:
        """Take bytes from the daemon and return the replies that somebody waits for.

        Raises:
            RemoteProtocolError: the daemon does not keep to the protocol.
        """
        replies = []
        for payload in self._deframer.feed(data):
            self.overdue = False
            reply = self._decode(payload)
            if reply is None:
                continue
            if isinstance(reply, Revoked):
                self._revoked = max(self._revoked, reply.fence)
            elif reply.id in self._awaited:
                self._awaited.discard(reply.id)
                replies.append(reply)
            elif reply.id in self._orphans:
                self._orphans.discard(reply.id)
                self._give_back(reply)
            elif reply.id == self._handshake and self.phase is not Phase.IDLE:
                self._shake(reply)
        return replies

    def mapped(self, *, again: bool) -> None:
        """The pool of :attr:`attached` is mapped; ``again`` when this process had mapped it before.

        Only then may copies of older jobs still run, so only then is the fence of the attach to be
        acknowledged; a first mapping starts clean. But where an earlier attach went unanswered, the daemon
        may have counted this process in already, and waits for its word.
        """
        assert self.attached is not None
        again = again or self._attaches > 1
        self._attaches = 0
        self._polled = 0
        self._acknowledged = 0 if again else self.attached.fence

    def pending_fence(self, *, polled: bool = False) -> int | None:
        """Return the fence to be acknowledged, if any; ``polled`` remembers that the caller knows of it."""
        if self._revoked <= self._acknowledged:
            return None
        if polled:
            self._polled = self._revoked
        return self._revoked

    def acknowledgeable(self) -> int | None:
        """Return the fence that the caller can speak for: the last one it polled, else the latest."""
        fence = self._polled if self._polled > self._acknowledged else self._revoked
        return fence if fence > self._acknowledged else None

    def acknowledged(self, fence: int) -> None:
        """The daemon took the acknowledgement of this fence."""
        self._acknowledged = max(self._acknowledged, fence)

    def _next_id(self) -> int:
        self._last_id = self._last_id % _ID_MAX + 1
        return self._last_id

    def _write(self, request: Request) -> int:
        self.output += frame(encode(request))
        return request.id

    def _decode(self, payload: bytes | memoryview) -> Reply | None:
        try:
            return decode_server(payload)
        except UNREADABLE as error:
            # A newer daemon may have notices that this client does not know; answers it must know.
            try:
                if msgspec.msgpack.decode(payload, type=_Envelope).id == 0:
                    return None
            except UNREADABLE:
                pass
            raise RemoteProtocolError(f"the daemon sent what is no message: {error}") from error

    def _shake(self, reply: Reply) -> None:
        if isinstance(reply, Refused):
            self.refused = RequestRefused(reply.code, reply.message)
            self.close()
        elif isinstance(reply, Welcome) and self.phase is Phase.GREETING:
            if not PROTOCOL_MIN <= reply.version <= PROTOCOL_MAX:
                raise RemoteProtocolError(f"the daemon chose version {reply.version}, which was not offered")
            if self._attach is None:
                self._settle()
            else:
                self.phase = Phase.ATTACHING
                self._attaches += 1
                self._handshake = self._write(self._attach(id=self._next_id()))
        elif isinstance(reply, Attached) and self.phase is Phase.ATTACHING:
            self.attached, self._revoked = reply, reply.fence
            self._settle()
        else:
            raise RemoteProtocolError(f"{type(reply).__name__} came while {self.phase.value}")

    def _settle(self) -> None:
        self.phase = Phase.READY
        self.refused = None
        self.epoch += 1

    def _give_back(self, reply: Reply) -> None:
        """Nobody saw the slots that this answer hands out, so no copy runs and they can go back at once."""
        if isinstance(reply, Prepared) and reply.job:
            self._orphans.add(self._write(Abort(id=self._next_id(), job=reply.job)))
        elif isinstance(reply, (LookedUp, Loaded)) and reply.lease:
            self._orphans.add(self._write(Release(id=self._next_id(), lease=reply.lease)))


class _Envelope(msgspec.Struct):
    """The least of a reply: whom it answers."""

    id: int

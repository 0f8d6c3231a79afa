"""The daemon's half of one engine connection: bytes in, requests out; which request is allowed when.

No I/O. The owner feeds what it read, writes :meth:`ServerConnection.take_output` and what
:meth:`ServerConnection.send` returns, and closes once :attr:`ServerConnection.closed`. Everything that
decides about a connection's state is in ``RULES`` (requests) and ``ANSWERS`` (the daemon's replies) below.
"""

from __future__ import annotations

import enum
import typing
from typing import Final

import msgspec

from kvtierd.core.effects import Attached, Done, ErrorCode, Refused, Reply
from kvtierd.core.model import Index
from kvtierd.core.stimuli import Attach, Goodbye, LadderRequest
from kvtierd.errors import LocalProtocolError, RemoteProtocolError
from kvtierd.wire.framing import Deframer, frame
from kvtierd.wire.messages import (
    FEATURES,
    MAX_FRAME_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    ClientMessage,
    Hello,
    Order,
    StatusRequest,
    SurveyRequest,
    Unattached,
    Welcome,
    decode_client,
    encode,
)

# What a decoder raises for bytes of a peer: besides its own errors, bad UTF-8 and nesting that has no end.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

# A stranger may not make the daemon hold more than this before it has said hello.
GREETING_MAX_BYTES = 64 << 10


class State(enum.Enum):
    """Where a connection stands."""

    NEW = "new"
    GREETED = "greeted"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    CLOSING = "closing"
    CLOSED = "closed"


class Kind(enum.Enum):
    """What a request means to the connection; all that only the ladder understands is ``VERB``."""

    HELLO = "hello"
    STATUS = "status"
    SURVEY = "survey"
    ATTACH = "attach"
    GOODBYE = "goodbye"
    VERB = "verb"


class Verdict(enum.Enum):
    """What a reply of the daemon means to the connection."""

    ACCEPTED = "accepted"
    DECLINED = "declined"
    PARTED = "parted"


# A state: the request is taken and the connection goes there. A code: it is refused and nothing changes.
RULES: Final[dict[State, dict[Kind, State | ErrorCode]]] = {
    State.NEW: {
        Kind.HELLO: State.GREETED,
        Kind.STATUS: ErrorCode.NOT_ATTACHED,
        Kind.SURVEY: ErrorCode.NOT_ATTACHED,
        Kind.ATTACH: ErrorCode.NOT_ATTACHED,
        Kind.GOODBYE: ErrorCode.NOT_ATTACHED,
        Kind.VERB: ErrorCode.NOT_ATTACHED,
    },
    State.GREETED: {
        Kind.HELLO: ErrorCode.NOT_ALLOWED,
        Kind.STATUS: State.GREETED,
        Kind.SURVEY: State.GREETED,
        Kind.ATTACH: State.ATTACHING,
        Kind.GOODBYE: State.CLOSED,
        Kind.VERB: ErrorCode.NOT_ATTACHED,
    },
    State.ATTACHING: {
        Kind.HELLO: ErrorCode.NOT_ALLOWED,
        Kind.STATUS: State.ATTACHING,
        Kind.SURVEY: State.ATTACHING,
        Kind.ATTACH: ErrorCode.NOT_ALLOWED,
        Kind.GOODBYE: ErrorCode.NOT_ATTACHED,
        Kind.VERB: ErrorCode.NOT_ATTACHED,
    },
    State.ATTACHED: {
        Kind.HELLO: ErrorCode.NOT_ALLOWED,
        Kind.STATUS: State.ATTACHED,
        Kind.SURVEY: State.ATTACHED,
        Kind.ATTACH: ErrorCode.NOT_ALLOWED,
        Kind.GOODBYE: State.CLOSING,
        Kind.VERB: State.ATTACHED,
    },
    State.CLOSING: dict.fromkeys(Kind, ErrorCode.NOT_ALLOWED),
}

ANSWERS: Final[dict[tuple[State, Verdict], State]] = {
    (State.ATTACHING, Verdict.ACCEPTED): State.ATTACHED,
    (State.ATTACHING, Verdict.DECLINED): State.GREETED,
    (State.CLOSING, Verdict.PARTED): State.CLOSED,
}

_WHY: Final[dict[State, str]] = {
    State.NEW: "say hello first",
    State.GREETED: "attach first",
    State.ATTACHING: "wait for the answer to attach",
    State.ATTACHED: "this connection is greeted and attached already",
    State.CLOSING: "nothing may follow goodbye",
}

_KINDS: Final[dict[type, Kind]] = {
    Hello: Kind.HELLO,
    StatusRequest: Kind.STATUS,
    SurveyRequest: Kind.SURVEY,
    **dict.fromkeys(typing.get_args(Order), Kind.STATUS),
    Attach: Kind.ATTACH,
    Goodbye: Kind.GOODBYE,
}


class _Envelope(msgspec.Struct):
    """The least that makes a message answerable."""

    id: Index


def agree(hello: Hello, versions: tuple[int, int], features: tuple[str, ...]) -> int | str:
    """Return the version in force for a client, or why there is none."""
    low, high = max(hello.versions[0], versions[0]), min(hello.versions[1], versions[1])
    if low > high:
        theirs, ours = "-".join(map(str, hello.versions)), "-".join(map(str, versions))
        return f"no common protocol version: the client speaks {theirs}, this daemon {ours}"
    missing = sorted(set(hello.required) - set(features))
    if missing:
        return f"this daemon does not have the required feature(s) {', '.join(missing)}"
    return high


class ServerConnection:
    """State, framing and handshake of one connection, seen from the daemon.

    ``daemon`` is the name and version told in Welcome. ``unwelcome``: why this peer gets no further than its
    hello, if so. Not thread-safe: one owner, one loop.
    """

    def __init__(
        self,
        *,
        daemon: str = "",
        versions: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX),
        features: tuple[str, ...] = FEATURES,
        max_bytes: int = MAX_FRAME_BYTES,
        unwelcome: str = "",
    ) -> None:
        self.state = State.NEW
        self.version = 0
        self.features: tuple[str, ...] = ()
        self.client = ""
        self._daemon, self._versions, self._offered = daemon, versions, features
        self._max_bytes = max_bytes
        self._unwelcome = unwelcome
        self._deframer = Deframer(min(GREETING_MAX_BYTES, max_bytes))
        self._output: list[bytes] = []
        self._attach_id = self._goodbye_id = 0

    @property
    def closed(self) -> bool:
        """True when nothing more is to be read; write the output that is left, then close."""
        return self.state is State.CLOSED

    @property
    def pending(self) -> int:
        """Bytes of the peer that are held and not understood yet."""
        return 0 if self.closed else self._deframer.pending

    @property
    def ready(self) -> bool:
        """Whether a whole frame waits: :meth:`receive` goes on without more bytes."""
        return not self.closed and self._deframer.ready

    def single(self, data: bytes) -> LadderRequest | None:
        """Return the request if ``data`` is one whole frame with an ordinary verb and nothing is held.

        The short way of :meth:`receive` for nearly all requests of an engine; ``None``: nothing was taken.
        """
        if self.state is not State.ATTACHED or (payload := self._deframer.whole(data)) is None:
            return None
        try:
            message = decode_client(payload)
        except _UNREADABLE:
            return None
        if type(message) in _KINDS or not message.id:
            return None
        return message  # type: ignore[return-value]  # all others are the ladder's

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Keep bytes of the peer for the next :meth:`receive`."""
        self._deframer.push(data)

    def receive(
        self, data: bytes | bytearray | memoryview = b"", *, frames: int | None = None, size: int = 0
    ) -> list[Unattached | LadderRequest]:
        """Take bytes from the peer and return the requests that the daemon has to answer.

        Answers that the connection gives by itself (handshake, refusals) wait in :meth:`take_output`. With
        ``frames`` it stops after so many, after those that fill ``size`` bytes, or after one that is dear to
        answer (status, survey); :attr:`ready` tells then whether there is more.

        Raises:
            RemoteProtocolError: these are not messages of this protocol; the connection is closed now.
        """
        requests: list[Unattached | LadderRequest] = []
        self._deframer.push(data)
        stop_at = self._deframer.pending - size
        try:
            while not self.closed and (payload := self._deframer.pop()) is not None:
                message = self._decode(payload)
                if message is not None and self._admit(message):
                    assert not isinstance(message, Hello)
                    requests.append(message)
                if frames is not None:
                    frames -= 1
                    dear = isinstance(message, Unattached)
                    if frames <= 0 or dear or self._deframer.pending <= stop_at:
                        break
        except RemoteProtocolError:
            self.state = State.CLOSED
            raise
        return requests

    def rest(self) -> bytes:
        """Return what was received and not taken yet, for another connection object to go on with."""
        return self._deframer.rest()

    def resume(self, version: int, features: tuple[str, ...], client: str) -> None:
        """Go on with a connection that another object greeted and attached."""
        self.version, self.features, self.client = version, features, client
        self._deframer.max_bytes = self._max_bytes
        self.state = State.ATTACHED

    def take_output(self) -> list[bytes]:
        """Return the framed answers that the connection gave by itself, and forget them."""
        output, self._output = self._output, []
        return output

    def send(self, reply: Reply) -> bytes:
        """Return the frame of a reply or notice; empty when the connection is closed and nobody listens.

        Sending the answer to attach or goodbye moves the connection on.
        """
        if self.state is State.CLOSED:
            return b""
        data = frame(encode(reply))
        if self.state is not State.ATTACHED:  # nothing that is sent then moves it
            self._follow(reply)
        return data

    def attached(self, reply: Attached) -> None:
        """The daemon accepted the attach; :meth:`send` of the same reply does this as well.

        Raises:
            LocalProtocolError: no attach with this id is waiting for its answer.
        """
        if self.state is State.ATTACHED and reply.id == self._attach_id:
            return
        if self.state is not State.ATTACHING or reply.id != self._attach_id:
            raise LocalProtocolError(
                f"no attach {reply.id} is waiting on a connection that is {self.state.value}"
            )
        self._follow(reply)

    def _follow(self, reply: Reply) -> None:
        if reply.id == 0:
            return
        if isinstance(reply, Attached):
            verdict = Verdict.ACCEPTED
        elif reply.id == self._goodbye_id:
            verdict = Verdict.PARTED
        elif reply.id == self._attach_id and isinstance(reply, Refused):
            verdict = Verdict.DECLINED
        else:
            return
        self.state = ANSWERS.get((self.state, verdict), self.state)

    def _decode(self, payload: bytes) -> ClientMessage | None:
        """Decode a message; one that can be answered but not understood is refused here."""
        try:
            message = decode_client(payload)
        except _UNREADABLE as error:
            try:
                envelope = msgspec.msgpack.decode(payload, type=_Envelope)
            except _UNREADABLE:
                raise RemoteProtocolError(f"a frame holds no message of this protocol: {error}") from error
            self._refuse(envelope.id, ErrorCode.BAD_REQUEST, str(error))
            return None
        if message.id == 0:
            self._refuse(0, ErrorCode.BAD_REQUEST, "Expected `int` >= 1 - at `$.id` (0 is for notices)")
            return None
        return message

    def _admit(self, message: ClientMessage) -> bool:
        """Apply the rules to a request; True when the daemon has to answer it."""
        kind = _KINDS.get(type(message), Kind.VERB)
        target = RULES[self.state][kind]
        if isinstance(target, ErrorCode):
            self._refuse(
                message.id, target, f"{kind.value} on a {self.state.value} connection: {_WHY[self.state]}"
            )
            return False
        if isinstance(message, Hello):
            self._greet(message, target)
            return False
        if kind is Kind.ATTACH:
            self._attach_id = message.id
        elif kind is Kind.GOODBYE:
            self._goodbye_id = message.id
            if target is State.CLOSED:  # never attached: nobody but the connection has to know
                self._reply(Done(id=message.id))
        self.state = target
        return not self.closed

    def _greet(self, hello: Hello, target: State) -> None:
        if self._unwelcome:
            self._refuse(hello.id, ErrorCode.NOT_ALLOWED, self._unwelcome)
            self.state = State.CLOSED
            return
        agreed = agree(hello, self._versions, self._offered)
        if isinstance(agreed, str):
            self._refuse(hello.id, ErrorCode.BAD_VERSION, agreed)
            self.state = State.CLOSED
            return
        self.version, self.client = agreed, hello.client
        wanted = {*hello.features, *hello.required}
        self.features = tuple(name for name in self._offered if name in wanted)
        self._deframer.max_bytes = self._max_bytes
        welcome = Welcome(id=hello.id, version=agreed, features=self.features, daemon=self._daemon)
        self._reply(welcome)
        self.state = target

    def _refuse(self, request: int, code: ErrorCode, message: str) -> None:
        self._reply(Refused(id=request, code=code, message=message))

    def _reply(self, reply: Reply) -> None:
        """Answer without the daemon; unlike what the daemon sends, this never moves the connection."""
        self._output.append(frame(encode(reply)))

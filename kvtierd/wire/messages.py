"""Engine protocol v1: the handshake around the core's requests and answers, and their one codec.

Every message is a msgpack map with a ``type`` tag, inside a frame (:mod:`kvtierd.wire.framing`). Rules of
evolution: new fields get defaults, types never change, tags are never reused, unknown fields are ignored.
``PROTOCOL.md`` beside this file lists every message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvtierd.core import effects, stimuli
from kvtierd.core.effects import Reply, SurveyEntry
from kvtierd.core.model import Index
from kvtierd.core.stimuli import Request

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_FRAME_BYTES = 16 << 20
PRESENCE = "presence"
FEATURES: tuple[str, ...] = (PRESENCE,)
"""``presence``: an attach brings a third descriptor, the cells of :mod:`kvtierd.core.presence`."""


Level = Literal["debug", "info", "warning", "error"]
"""Of the daemon's log."""


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection: the versions that the client speaks and features it wants."""

    versions: tuple[int, int]
    features: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    client: str = ""


class StatusRequest(Request, frozen=True, kw_only=True, tag="status"):
    """Ask for the daemon's status; needs no attach."""


class SurveyRequest(Request, frozen=True, kw_only=True, tag="survey"):
    """One page of what is resident in all namespaces; on the control socket only, needs no attach.

    ``cursor`` 0 begins; otherwise it is the last page's.
    """

    tier: str | None = None
    cursor: Index = 0
    limit: Annotated[int, Meta(ge=1, le=65536)] = 1024


class LogLevelRequest(Request, frozen=True, kw_only=True, tag="log_level"):
    """Change the level of the daemon's log, or (``None``) ask for it; on the control socket only."""

    level: Level | None = None


class DrainRequest(Request, frozen=True, kw_only=True, tag="drain"):
    """Take no stores any more, be unready, and write down what only the pool holds (``undo``: be as before).

    On the control socket only. Asked again it changes nothing and tells how far it is.
    """

    undo: bool = False


class ReloadRequest(Request, frozen=True, kw_only=True, tag="reload"):
    """Take the changed tier file over, all of it or nothing (``dry_run``: only say).

    On the control socket only.
    """

    dry_run: bool = False


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    """The version and features in force on this connection."""

    version: int
    features: tuple[str, ...] = ()
    daemon: str = ""


class StatusReport(Reply, frozen=True, kw_only=True, tag="status_report"):
    """The daemon's status as a tree of plain values (keys are documented in the README)."""

    body: dict[str, Any]


class LogLevel(Reply, frozen=True, kw_only=True, tag="log_level_in_force"):
    """The level that is in force from now on."""

    level: str


class Draining(Reply, frozen=True, kw_only=True, tag="draining"):
    """How far a drain is: blocks that wait to be written or are being written, by tier.

    ``blocked``: the tiers that take nothing now, and why.
    """

    draining: bool
    waiting: dict[str, int]
    blocked: dict[str, str] = msgspec.field(default_factory=dict)


class ConfigChange(msgspec.Struct, frozen=True, array_like=True):
    """A key of the tier file that differs; ``refusal``: why only a restart takes it over, or empty."""

    key: str
    before: str
    after: str
    refusal: str = ""


class Reloaded(Reply, frozen=True, kw_only=True, tag="reloaded"):
    """``outcome``: ``applied``, ``unchanged`` or ``refused``; ``problem`` says why (a line for each)."""

    outcome: str
    changes: tuple[ConfigChange, ...] = ()
    problem: str = ""


class SurveyPage(Reply, frozen=True, kw_only=True, tag="survey_page"):
    """``cursor`` is 0 after the last page. ``models``: what is known of the page's namespaces."""

    entries: tuple[SurveyEntry, ...]
    cursor: int
    models: dict[str, str] = msgspec.field(default_factory=dict)


Order = LogLevelRequest | DrainRequest | ReloadRequest | stimuli.OperatorRequest
"""What changes the daemon; only the control socket takes it."""
Unattached = StatusRequest | SurveyRequest | Order
"""What can be asked without an attach."""
ClientMessage = Hello | Unattached | stimuli.LadderRequest
ServerMessage = Welcome | StatusReport | SurveyPage | LogLevel | Draining | Reloaded | effects.LadderReply


def verb_of(message: type[Request]) -> str:
    """Return the name of a request in metrics and logs: its tag on the wire."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


def encode(message: Request | Reply) -> bytes:
    """Return a message's msgpack bytes, without the frame around it."""
    return _encoder.encode(message)


def decode_client(payload: bytes | memoryview) -> ClientMessage:
    """Decode what a client sent.

    Raises:
        msgspec.MsgspecError: not msgpack, an unknown type or a field that does not fit.
    """
    return _client_decoder.decode(payload)


def decode_server(payload: bytes | memoryview) -> ServerMessage:
    """Decode what a daemon sent; errors as in :func:`decode_client`."""
    return _server_decoder.decode(payload)

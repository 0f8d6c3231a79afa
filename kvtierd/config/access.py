"""Sections ``access`` and ``engine``: who may use the sockets, and how much one of them may hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict, WithJsonSchema

from kvtierd.config.fields import Duration, Problem, Section, Size

_MODE = r"^0[0-7]{3}$"
_SOME_MODE = 0o111


def _check_mode(value: str) -> str:
    if len(value) != 4 or value[0] != "0" or not set(value) <= set("01234567"):
        raise ValueError('write four octal digits in quotes, such as "0660"')
    if int(value, 8) & _SOME_MODE or not int(value, 8) & 0o600 == 0o600:
        raise ValueError("the owner must read and write, and nobody executes a socket")
    return value


Mode = Annotated[
    str,
    AfterValidator(_check_mode),
    WithJsonSchema({"type": "string", "pattern": _MODE, "examples": ["0660"]}),
]
Id = Annotated[int, Field(ge=0, lt=(1 << 32) - 1)]


class Peers(Section):
    """Who may connect, by what the kernel says of the peer; both empty: whomever the mode lets in."""

    uids: Annotated[tuple[Id, ...], Strict(False)] = ()
    gids: Annotated[tuple[Id, ...], Strict(False)] = ()


class Access(Section):
    """The Unix sockets: their modes and group, and who may connect to each.

    Whoever may use the control socket can take every engine's blocks away, so it is the daemon's own user's
    unless ``control_mode`` says otherwise; the status can be read at the engines' socket, too.
    """

    mode: Mode = "0660"
    control_mode: Mode = "0600"
    group: str | Id | None = None
    engine: Peers = Peers()
    control: Peers = Peers()

    def mode_bits(self, *, control: bool) -> int:
        """Return the mode of one of the sockets as a number."""
        return int(self.control_mode if control else self.mode, 8)


class Engine(Section):
    """Bounds on what engines may hold. ``lease_ttl`` is the ceiling for leases of loads.

    ``on_last_engine_gone: drain``: when no engine is left, what only the pool holds (blocks for tiers with
    ``demote: on_evict``) is written down; serving goes on. ``max_requests`` (unanswered) and ``max_leases``
    (jobs included) are one connection's; ``max_buffered`` is what all connections together may have half sent
    or not read.
    """

    job_ttl: Duration = 60.0
    lease_ttl: Duration = 60.0
    shutdown_grace: Duration = 10.0
    on_last_engine_gone: Literal["keep", "drain"] = "keep"
    max_frame_bytes: Annotated[Size, Field(ge=64 << 10, le=1 << 30)] = 16 << 20
    max_connections: Annotated[int, Field(ge=2, le=65536)] = 256
    max_requests: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    max_leases: Annotated[int, Field(ge=1, le=1 << 20)] = 16384
    max_buffered: Annotated[Size, Field(ge=1 << 20)] = 64 << 20
    hello_timeout: Duration = 5.0
    frame_timeout: Duration = 30.0


def access_problems(access: Access) -> Iterator[Problem]:
    """Yield what is wrong between the values of the section."""
    for name, mode, peers in (
        ("engine", access.mode, access.engine),
        ("control", access.control_mode, access.control),
    ):
        if int(mode, 8) & 0o006 and not peers.uids and not peers.gids:
            yield ("access", name), f"must list uids or gids: mode {mode} lets everybody connect"


def engine_problems(engine: Engine) -> Iterator[Problem]:
    """Yield what is wrong between the values of the section."""
    if engine.max_buffered < engine.max_frame_bytes:
        yield ("engine", "max_buffered"), "is less than one message (max_frame_bytes)"

"""Whose events kvtierd passes on: the engines' own event sockets, one for each dp rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from kvtierd.config.endpoints import Endpoint, parse_endpoint
from kvtierd.config.fields import Duration, Problem, Section

MAX_HOLD = 1.0
"""Seconds: a store must not be news of the past when it leaves."""


def _check_endpoint(value: str) -> str:
    parse_endpoint(value)
    return value


_EndpointField = Annotated[str, AfterValidator(_check_endpoint)]


class Relay(Section):
    """One engine's PUB socket, which kvtierd connects to or, where the engine connects, binds.

    ``replay``: the engine's replay socket, always connected to; without it a lost batch costs all that is
    known of the engine's cache. ``dp_rank``: the rank that its events are passed on with; absent: the one
    that they carry. ``hold``: how long the event of a block stored in the pool waits for the engine's own.
    """

    connect: _EndpointField | None = None
    bind: _EndpointField | None = None
    replay: _EndpointField | None = None
    dp_rank: Annotated[int, Field(ge=0, lt=1 << 20)] | None = None
    hold: Duration | None = 0.02


def relay_problems(relays: Sequence[Relay], own: Sequence[Endpoint]) -> Iterator[Problem]:
    """Yield what is wrong with relays. ``own``: the endpoints that the audiences bind."""
    for index, relay in enumerate(relays):
        path = ("events", "relay", index)
        for key, text in _problems_of(relay, own):
            yield (*path, key), text
        others = relays[:index]
        if relay.connect is not None and any(relay.connect == other.connect for other in others):
            yield (*path, "connect"), "another relay listens to the same socket"
        if len(relays) > 1 and relay.dp_rank is None:
            yield (*path, "dp_rank"), "with several relays, write each one's dp rank"
        elif relay.dp_rank is not None and any(relay.dp_rank == other.dp_rank for other in others):
            yield (*path, "dp_rank"), f"another relay has dp rank {relay.dp_rank} already"


def _problems_of(relay: Relay, own: Sequence[Endpoint]) -> Iterator[tuple[str, str]]:
    if (relay.connect is None) == (relay.bind is None):
        yield "connect", "write either connect, or bind where the engine connects"
    if relay.bind is not None:
        place = parse_endpoint(relay.bind)
        if not place.is_loopback or not (place.port or place.path):
            yield "bind", "write a loopback address and its port, or ipc: whoever reaches it is believed"
    for key, where in (("connect", relay.connect), ("replay", relay.replay)):
        if where is None:
            continue
        place = parse_endpoint(where)
        if place.is_wildcard or not (place.port or place.path):
            yield key, "write the engine's own host and port"
        elif any(place.collides(other) for other in own):
            yield key, "is an address that an audience binds: the engine needs another one"
    if relay.hold is not None and relay.hold > MAX_HOLD:
        yield "hold", "is at most 1s"

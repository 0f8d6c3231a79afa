"""The metrics of what engines ask for and hold."""

from __future__ import annotations

from collections.abc import Iterable

from kvtierd.core.effects import ErrorCode
from kvtierd.core.stimuli import Role
from kvtierd.edges.metrics.family import (
    Figures,
    Reading,
    counter,
    gauge,
    histogram,
    noted,
    number,
    scalar,
)
from kvtierd.edges.request_figures import ASKED
from kvtierd.wire.messages import verb_of

VERBS = tuple(sorted(map(verb_of, ASKED)))
OUTCOMES = ("ok", "refused")


def _sessions(figures: Figures) -> Iterable[Reading]:
    roles = [session.get("role") for session in figures.status.get("sessions", ())]
    for role in Role:
        yield (role.value,), float(roles.count(role.value))


def _engines(figures: Figures) -> Iterable[Reading]:
    yield (), float(len({session.get("engine_id") for session in figures.status.get("sessions", ())}))


def _layouts(figures: Figures) -> Iterable[Reading]:
    yield (), float(len(figures.status.get("layouts", ())))


def _requests(figures: Figures) -> Iterable[Reading]:
    for verb in VERBS:
        counts = figures.part("engine", "requests", "verbs", verb)
        for outcome in OUTCOMES:
            yield (verb, outcome), number(counts.get(outcome))


def _failed_copies(figures: Figures) -> Iterable[Reading]:
    for rank, blocks in {"0": 0, **figures.part("failed_copies")}.items():
        yield (rank,), number(blocks)


def _refusals(figures: Figures) -> Iterable[Reading]:
    for code in ErrorCode:
        yield (code.value,), number(figures.part("engine", "requests", "refusals").get(code.value))


def _durations(figures: Figures) -> Iterable[Reading]:
    for verb in VERBS:
        yield (verb,), noted(figures, "request", verb)


FAMILIES = (
    gauge("engine_sessions", "Attached sessions.", ("role",), _sessions),
    gauge("engines", "Engines with an attached session.", (), _engines),
    gauge(
        "engine_connections", "Open connections on the engine socket.", (), scalar("engine", "connections")
    ),
    counter(
        "engine_connections_accepted",
        "Connections accepted since the start.",
        (),
        scalar("engine", "accepted"),
    ),
    counter(
        "engine_protocol_errors",
        "Connections closed because the other side broke the protocol.",
        (),
        scalar("engine", "protocol_errors"),
    ),
    counter("requests", "Answered requests.", ("verb", "outcome"), _requests),
    counter("request_refusals", "Refused requests, by error code.", ("code",), _refusals),
    histogram("request_seconds", "Seconds from a request's arrival to its answer.", ("verb",), _durations),
    gauge("requests_unanswered", "Requests without an answer yet.", (), scalar("engine", "unanswered")),
    gauge("store_jobs", "Stores between reservation and commit.", (), scalar("jobs")),
    gauge("leases", "Leases that pin blocks.", (), scalar("leases")),
    gauge("loads_waiting", "Loads that wait for a promotion.", (), scalar("loads_waiting")),
    gauge("promotions_unread", "Promoted blocks that nobody has read yet.", (), scalar("promotions_unread")),
    counter(
        "failed_copies",
        "Blocks that were not stored because the worker of a rank could not copy its part.",
        ("rank",),
        _failed_copies,
    ),
    gauge("layouts", "Layouts that have a share of the pool.", (), _layouts),
)

"""The metrics of the event stream, its journal and the engines' own events that join it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvtierd.edges.metrics.family import Figures, Read, Reading, counter, gauge, number, scalar

KINDS = ("stored", "removed")
REPLAY_OUTCOMES = {
    "done": "replays_done",
    "abandoned": "replays_abandoned",
    "refused": "replays_refused",
    "limited": "replays_limited",
    "malformed": "replay_malformed",
}


def _audience(figures: Figures, label: str) -> Mapping[str, Any]:
    return figures.part("events", "audiences", label)


def _field(name: str) -> Read:
    """Return a reader of one figure of every audience."""

    def read(figures: Figures) -> Iterable[Reading]:
        for audience in figures.plan.audiences:
            yield (audience.label,), number(_audience(figures, audience.label).get(name))

    return read


def _told(figures: Figures) -> Iterable[Reading]:
    for audience in figures.plan.audiences:
        told = _audience(figures, audience.label).get("told", {})
        for medium in audience.media:
            for kind in KINDS:
                yield (audience.label, medium, kind), number(told.get(medium, {}).get(kind))


def _replays(figures: Figures) -> Iterable[Reading]:
    for audience in figures.plan.audiences:
        for outcome, name in REPLAY_OUTCOMES.items():
            yield (audience.label, outcome), number(_audience(figures, audience.label).get(name))


def _degraded(figures: Figures) -> Iterable[Reading]:
    for audience in figures.plan.audiences:
        yield (audience.label,), float(bool(_audience(figures, audience.label).get("sequence_degraded")))


def _relay(name: str) -> Read:
    """Return a reader of one figure of every relay, which are told apart by their place in the tier file."""

    def read(figures: Figures) -> Iterable[Reading]:
        engines = figures.part("events", "relay").get("engines", ())
        for index in range(figures.plan.relays):
            report = engines[index] if index < len(engines) else {}
            yield (str(index),), number(report.get(name))

    return read


def _journal_degraded(figures: Figures) -> Iterable[Reading]:
    yield (), float(bool(figures.part("events", "journal").get("degraded")))


AUDIENCE = ("audience",)

FAMILIES = (
    counter(
        "events",
        "Placement changes told to an audience; blocks of all tiers, and the engine's own (medium GPU).",
        ("audience", "medium", "kind"),
        _told,
    ),
    counter("event_batches", "Batches published, empty ones included.", AUDIENCE, _field("batches")),
    counter("event_bytes", "Bytes of published batches.", AUDIENCE, _field("bytes")),
    counter(
        "event_heartbeats", "Silences that were ended by sending something.", AUDIENCE, _field("heartbeats")
    ),
    counter("event_batches_dropped", "Batches that a socket did not take.", AUDIENCE, _field("dropped")),
    counter("event_replays", "Ended replays.", ("audience", "outcome"), _replays),
    counter("event_replay_requests", "Replays asked for.", AUDIENCE, _field("replay_requests")),
    counter("event_replay_batches", "Batches sent in replays.", AUDIENCE, _field("replay_batches")),
    counter(
        "event_snapshots",
        "Replays that began before the ring and were answered with the state instead.",
        AUDIENCE,
        _field("snapshots"),
    ),
    counter(
        "event_unmatched_removals",
        "Removals of what was never announced; anything but 0 is a bug.",
        AUDIENCE,
        _field("unmatched_removals"),
    ),
    gauge("event_replays_active", "Replays that run or wait.", AUDIENCE, _field("replays_active")),
    gauge("event_subscribers", "Connections to an audience's PUB socket.", AUDIENCE, _field("subscribers")),
    gauge("event_queue_length", "Changes that wait to be sent.", AUDIENCE, _field("waiting")),
    gauge("event_ring_batches", "Batches kept for replays.", AUDIENCE, _field("ring_batches")),
    gauge("event_ring_bytes", "Bytes of batches kept for replays.", AUDIENCE, _field("ring_bytes")),
    gauge("event_sequence", "Number of the last batch.", AUDIENCE, _field("sequence")),
    gauge("event_residencies", "Residencies announced and not taken back.", AUDIENCE, _field("announced")),
    gauge("event_sequence_degraded", "1 while numbers cannot be kept across a restart.", AUDIENCE, _degraded),
    gauge(
        "journal_bytes",
        "Bytes of the record of what was announced.",
        (),
        scalar("events", "journal", "bytes"),
    ),
    gauge("journal_degraded", "1 while what is announced cannot be recorded.", (), _journal_degraded),
    counter(
        "journal_failures", "Faults of the announced journal.", (), scalar("events", "journal", "failures")
    ),
    gauge("relay_connected", "1 while an engine's own events are heard.", ("relay",), _relay("connected")),
    gauge("relay_gpu_blocks", "Blocks that an engine says are on its GPU.", ("relay",), _relay("gpu_blocks")),
    counter("relay_events", "Events heard from an engine.", ("relay",), _relay("events")),
    counter("relay_gaps", "Batches of an engine that were missed at first.", ("relay",), _relay("gaps")),
    counter(
        "relay_unrepaired",
        "Gaps that no replay could fill: the engine's blocks were taken back.",
        ("relay",),
        _relay("unrepaired"),
    ),
    counter("relay_malformed", "Messages of an engine that were no events.", ("relay",), _relay("malformed")),
)

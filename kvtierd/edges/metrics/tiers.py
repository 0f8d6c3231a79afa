"""The metrics of the tiers and of the pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtierd.advice import tier_condition
from kvtierd.core.model import Departure, SkipReason
from kvtierd.core.statistics import CASCADE_SKIPS, DECLINED, GIVEN_UP, PROMOTION_REFUSALS
from kvtierd.core.stimuli import Status
from kvtierd.edges.metrics.family import (
    Family,
    Figures,
    Kind,
    Read,
    Reading,
    counter,
    gauge,
    histogram,
    noted,
    number,
    scalar,
)

CONDITIONS = ("ok", "indexing", "slow", "degraded", "stalled")
OPERATIONS = ("read", "write", "delete", "probe")
BLOCK_OUTCOMES = tuple(status.value for status in Status)
PROBE_OUTCOMES = ("found", "absent", "unknown")
ERROR_KINDS = (
    "corrupt",
    "exception",
    "failed",
    "full",
    "gone",
    "refused",
    "stalled",
    "undeletable",
)


def _field(name: str, *, unlimited: bool = False) -> Read:
    """Return a reader of one figure of every tier; ``None`` is infinite where that means no limit."""

    def read(figures: Figures) -> Iterable[Reading]:
        for tier, report in figures.each_tier():
            value = report.get(name)
            yield (tier,), math.inf if unlimited and value is None and report else number(value)

    return read


def _below(name: str) -> Read:
    """Return a reader of one figure of every tier below the pool."""

    def read(figures: Figures) -> Iterable[Reading]:
        for tier, report in _secondaries(figures):
            yield (tier,), number(report.get(name))

    return read


def _secondaries(figures: Figures) -> Iterator[tuple[str, Mapping[str, Any]]]:
    below = figures.secondaries
    return ((tier, report) for tier, report in figures.each_tier() if tier in below)


def _info(figures: Figures) -> Iterable[Reading]:
    for tier in figures.plan.tiers:
        yield tuple(tier[label] for label in TIER_LABELS), 1.0


def _state(figures: Figures) -> Iterable[Reading]:
    for tier, report in figures.each_tier():
        now = tier_condition(report)
        for name in CONDITIONS:
            yield (tier, name), float(name == now)


def _degraded(figures: Figures) -> Iterable[Reading]:
    yield (
        (),
        float(sum(tier_condition(report) not in ("ok", "indexing") for _, report in figures.each_tier())),
    )


def _left(figures: Figures) -> Iterable[Reading]:
    for tier, report in figures.each_tier():
        for why in Departure:
            yield (tier, why.value), number(report.get("left", {}).get(why.value))


def _skipped(figures: Figures) -> Iterable[Reading]:
    for index, (tier, report) in enumerate(figures.each_tier()):
        reasons = CASCADE_SKIPS if index else tuple(why.value for why in SkipReason)
        for why in reasons:
            yield (tier, why), number(report.get("skipped", {}).get(why))


def _declined(figures: Figures) -> Iterable[Reading]:
    for tier, report in _secondaries(figures):
        for why in DECLINED:
            yield (tier, why), number(report.get("declined", {}).get(why))


def _mover(name: str, operations: Iterable[str] = OPERATIONS) -> Read:
    """Return a reader of one figure of every kind of operation of every tier below the pool."""
    wanted = tuple(operations)

    def read(figures: Figures) -> Iterable[Reading]:
        for tier in figures.secondaries:
            for operation in wanted:
                yield (tier, operation), number(figures.part("movers", tier, operation).get(name))

    return read


def _outcomes(figures: Figures) -> Iterable[Reading]:
    for tier in figures.secondaries:
        for operation in OPERATIONS:
            found = figures.part("movers", tier, operation, "outcomes")
            for outcome in PROBE_OUTCOMES if operation == "probe" else BLOCK_OUTCOMES:
                yield (tier, operation, outcome), number(found.get(outcome))


def _errors(figures: Figures) -> Iterable[Reading]:
    """Tell faults by kind; a block that a deletion finds gone is none."""
    for tier, report in _secondaries(figures):
        mover = figures.part("movers", tier)
        kinds = {operation: figures.part("movers", tier, operation) for operation in OPERATIONS}
        counters = report.get("counters", {})
        read, write, delete = (kinds[name].get("outcomes", {}) for name in ("read", "write", "delete"))
        errors = {
            "corrupt": read.get("corrupt", 0),
            "exception": sum(kind.get("errors", 0) for kind in kinds.values()),
            "failed": sum(outcomes.get("failed", 0) for outcomes in (read, write, delete)),
            "full": write.get("full", 0),
            "gone": read.get("gone", 0),
            "refused": sum(kind.get("refused", 0) for kind in kinds.values()),
            "stalled": mover.get("stalls", {}).get("total", 0),
            "undeletable": counters.get("undeletable", 0),
        }
        for kind in ERROR_KINDS:
            yield (tier, kind), number(errors[kind])


def _stuck_threads(figures: Figures) -> Iterable[Reading]:
    for tier in figures.secondaries:
        yield (tier,), number(figures.part("movers", tier, "stalls").get("now"))


def _durations(figures: Figures) -> Iterable[Reading]:
    for tier in figures.secondaries:
        for operation in OPERATIONS:
            yield (tier, operation), noted(figures, "operation", tier, operation)


def _by_name(part: str, names: Iterable[str]) -> Read:
    wanted = tuple(names)

    def read(figures: Figures) -> Iterable[Reading]:
        for name in wanted:
            yield (name,), number(figures.part(part).get(name))

    return read


def _made(what: str, *good: str) -> Read:
    """Return a reader of the pool's bytes that are as ``what`` says."""

    def read(figures: Figures) -> Iterable[Reading]:
        pool = figures.part("pool")
        done = figures.part("pool", what).get("state") in good
        yield (), number(pool.get("bytes")) if done else 0.0

    return read


TIER_LABELS = ("tier", "type", "medium", "locality", "policy")

FAMILIES = (
    Family("tier", Kind.INFO, "What a tier is, from the tier file.", TIER_LABELS, _info),
    gauge("tier_state", "1 for the condition that a tier is in.", ("tier", "state"), _state),
    gauge("degraded_tiers", "Tiers that are slow, degraded or stalled.", (), _degraded),
    gauge("tier_used_bytes", "Bytes that resident blocks take.", ("tier",), _field("used_bytes")),
    gauge(
        "tier_capacity_bytes",
        "Bytes that a tier may take; +Inf without a limit.",
        ("tier",),
        _field("capacity_bytes", unlimited=True),
    ),
    gauge("tier_blocks", "Resident blocks.", ("tier",), _field("blocks")),
    counter(
        "tier_hits",
        "Keys that lookups found in a tier first; a promoted block counts where it came from, once.",
        ("tier",),
        _field("hits"),
    ),
    counter(
        "tier_misses",
        "Keys that lookups found neither in a tier nor in those above it.",
        ("tier",),
        _field("misses"),
    ),
    counter("tier_loaded_blocks", "Blocks that loads gave to engines.", ("tier",), _field("loads")),
    counter("tier_stored_blocks", "Blocks that became resident.", ("tier",), _field("stored")),
    counter("tier_removed_blocks", "Blocks announced as gone.", ("tier",), _field("removed")),
    counter("tier_evictions", "Blocks that left a tier, by reason.", ("tier", "reason"), _left),
    counter(
        "tier_stores_skipped",
        "Blocks that were to be stored and were not, by reason.",
        ("tier", "reason"),
        _skipped,
    ),
    counter(
        "tier_declined_blocks",
        "Blocks that a tier has and that were not read from there, by reason.",
        ("tier", "reason"),
        _declined,
    ),
    gauge("tier_queued_blocks", "Blocks that wait to be written.", ("tier",), _below("wanted")),
    gauge(
        "tier_undeletable_bytes", "Bytes that could not be deleted.", ("tier",), _below("undeletable_bytes")
    ),
    counter(
        "tier_operation_blocks",
        "Blocks of ended operations (reads are promotions, writes the cascade), by outcome.",
        ("tier", "op", "outcome"),
        _outcomes,
    ),
    counter(
        "tier_transfer_bytes",
        "Payload bytes moved between the pool and a tier.",
        ("tier", "op"),
        _mover("bytes", ("read", "write")),
    ),
    histogram(
        "tier_operation_seconds",
        "Seconds from an operation's first job to its last.",
        ("tier", "op"),
        _durations,
    ),
    gauge(
        "tier_inflight_bytes",
        "Bytes on their way.",
        ("tier", "op"),
        _mover("in_flight_bytes", ("read", "write")),
    ),
    gauge(
        "tier_inflight_blocks", "Blocks of operations under way.", ("tier", "op"), _mover("in_flight_blocks")
    ),
    counter("tier_errors", "Faults of a tier, by kind.", ("tier", "kind"), _errors),
    gauge("tier_stuck_threads", "Worker threads past the tier's deadline.", ("tier",), _stuck_threads),
    counter(
        "promotions_refused",
        "Blocks that could not be promoted, by reason.",
        ("reason",),
        _by_name("promotions_refused", PROMOTION_REFUSALS),
    ),
    counter(
        "lookup_blocks",
        "Keys that lookups asked for; the tiers' hits and the misses add up to it.",
        (),
        scalar("lookups", "blocks"),
    ),
    counter("lookup_missed_blocks", "Keys that lookups found nowhere.", (), scalar("lookups", "misses")),
    counter(
        "lookup_repeated_blocks",
        "Keys of lookups that only asked again, while or after a promotion or probe; counted nowhere else.",
        (),
        scalar("lookups", "repeats"),
    ),
    counter(
        "given_up",
        "Jobs, leases, loads and promotions that ended without their holder or in vain.",
        ("what",),
        _by_name("given_up", GIVEN_UP),
    ),
    gauge("pool_bytes", "Size of the pool.", (), scalar("pool", "bytes")),
    gauge(
        "pool_prefaulted_bytes",
        "Bytes of the pool that are pre-faulted.",
        (),
        scalar("pool", "prefaulted_bytes"),
    ),
    gauge("pool_locked_bytes", "Bytes of the pool that are locked in memory.", (), _made("lock", "locked")),
    gauge(
        "pool_pinned_bytes", "Bytes of the pool that are pinned for a GPU here.", (), _made("pin", "pinned")
    ),
    gauge(
        "pool_quarantined_slots", "Slots that some process may still touch.", (), scalar("quarantined_slots")
    ),
)

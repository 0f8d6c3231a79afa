"""The metrics of the daemon itself."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from kvtierd import __version__
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

STATES = ("starting", "ready", "draining", "stopping", "aborting")
RELOAD_OUTCOMES = ("applied", "refused", "unchanged")
LEVELS = ("warning", "error", "critical")
CONFIG_LABELS = ("digest", "pool_backing", "pool_lock", "pool_pin", "pool_huge_pages")


def _build(figures: Figures) -> Iterable[Reading]:
    yield (__version__, platform.python_version()), 1.0


def _config(figures: Figures) -> Iterable[Reading]:
    yield tuple(figures.plan.config[label] for label in CONFIG_LABELS), 1.0


def _state(figures: Figures) -> Iterable[Reading]:
    for state in STATES:
        yield (state,), float(figures.status.get("state") == state)


def _hanging(figures: Figures) -> Iterable[Reading]:
    yield (), float(len(figures.part("hanging")))


def _of(part: str, names: Iterable[str]) -> Read:
    wanted = tuple(names)

    def read(figures: Figures) -> Iterable[Reading]:
        for name in wanted:
            yield (name,), number(figures.part(*part.split(".")).get(name))

    return read


def _turns(figures: Figures) -> Iterable[Reading]:
    yield (), noted(figures, "turn")


def _lag(figures: Figures) -> Iterable[Reading]:
    yield (), noted(figures, "lag")


FAMILIES = (
    Family("build", Kind.INFO, "The daemon's version and Python's.", ("version", "python"), _build),
    Family(
        "config",
        Kind.INFO,
        "The tier file in force: a digest of all values, and what the pool asks for.",
        CONFIG_LABELS,
        _config,
    ),
    gauge("state", "1 for the state that the daemon is in.", ("state",), _state),
    gauge("uptime_seconds", "Seconds since the daemon started.", (), scalar("uptime_seconds")),
    histogram(
        "turn_seconds", "Seconds that a turn took; a lookup that is answered at sight takes none.", (), _turns
    ),
    gauge("turn_age_seconds", "Seconds since the last turn ended.", (), scalar("turn_age_seconds")),
    histogram("loop_lag_seconds", "Seconds that a timer of the event loop came late.", (), _lag),
    counter(
        "loop_stalls",
        "Times that the event loop stood for a second or more.",
        (),
        scalar("watch", "loop_stalls"),
    ),
    gauge(
        "loop_longest_stall_seconds",
        "The longest time that the event loop stood.",
        (),
        scalar("watch", "loop_longest_stall_seconds"),
    ),
    gauge("hanging", "Things outside the loop that make no progress (tiers, the stream).", (), _hanging),
    counter("log_records", "Log records at warning or above.", ("level",), _of("log.records", LEVELS)),
    counter(
        "log_left_out",
        "Log records that were only counted, as they repeated others.",
        (),
        scalar("log", "left_out"),
    ),
    counter(
        "log_dropped", "Log lines that were dropped, as nobody read the log.", (), scalar("log", "dropped")
    ),
    counter(
        "config_reloads", "Reloads of the tier file.", ("outcome",), _of("config.reloads", RELOAD_OUTCOMES)
    ),
    gauge(
        "config_last_reload_success_timestamp_seconds",
        "When the tier file in force was loaded, in seconds since the epoch.",
        (),
        scalar("config", "loaded_at"),
    ),
)

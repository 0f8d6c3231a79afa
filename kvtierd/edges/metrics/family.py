"""What a metric family is: its promise (name, type, labels, help) and how it is read from the figures.

The names, types and labels are a versioned promise. A family is never incremented: it is read from a
:class:`Figures` when somebody scrapes, so that metrics cost nothing in between and agree with the status.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtierd.edges.histogram import Histogram
from kvtierd.edges.metrics.plan import Plan

PREFIX = "kvtierd_"


class Kind(enum.StrEnum):
    """Prometheus' types, as far as they are used here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Figures:
    """All that is known of a daemon at one moment.

    ``status``: what :meth:`kvtierd.daemon.Daemon.status` says; parts that do not exist yet are missing.
    ``plan``: the names by which series exist from the start, whatever has happened.
    Histograms are keyed by (what, label values).
    """

    status: Mapping[str, Any]
    plan: Plan
    histograms: Mapping[tuple[str, ...], Histogram] = field(default_factory=dict)

    def part(self, *path: str) -> Mapping[str, Any]:
        """Return a mapping inside the status, an empty one where there is none."""
        found: Any = self.status
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def each_tier(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Iterate over the tiers of the tier file with their figures, empty before they are open."""
        known = {tier["name"]: tier for tier in self.status.get("tiers", ())}
        for tier in self.plan.tiers:
            yield tier["tier"], known.get(tier["tier"], {})

    @property
    def secondaries(self) -> tuple[str, ...]:
        """The names of the tiers below the pool."""
        return tuple(tier["tier"] for tier in self.plan.tiers[1:])


Value = float | Histogram
Reading = tuple[tuple[str, ...], Value]
Read = Callable[[Figures], Iterable[Reading]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` without prefix and without the ``_total`` or ``_info`` that its type adds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Read

    @property
    def series(self) -> str:
        """The name of the family's series (a histogram's without ``_bucket`` and the like)."""
        suffix = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")
        return f"{PREFIX}{self.name}{suffix}"


def counter(name: str, help_text: str, labels: Iterable[str], read: Read) -> Family:
    """Return a counter; ``name`` without ``_total``."""
    return Family(name, Kind.COUNTER, help_text, tuple(labels), read)


def gauge(name: str, help_text: str, labels: Iterable[str], read: Read) -> Family:
    """Return a gauge."""
    return Family(name, Kind.GAUGE, help_text, tuple(labels), read)


def histogram(name: str, help_text: str, labels: Iterable[str], read: Read) -> Family:
    """Return a histogram."""
    return Family(name, Kind.HISTOGRAM, help_text, tuple(labels), read)


def scalar(*path: str) -> Read:
    """Return a reader of one number in the status, 0 where it is missing or says nothing."""
    *parents, name = path

    def read(figures: Figures) -> Iterable[Reading]:
        yield (), number(figures.part(*parents).get(name))

    return read


def number(value: Any) -> float:
    """Return a figure as a number; booleans count as 0 and 1, and what is no number as 0."""
    return float(value) if isinstance(value, int | float) else 0.0


def noted(figures: Figures, *key: str) -> Histogram:
    """Return a histogram of the figures, an empty one where nothing was noted yet."""
    return figures.histograms.get(key) or Histogram()

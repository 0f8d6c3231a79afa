"""What was measured: rows of one thing on kvtierd and its rivals, as Markdown, JSON and a chart."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtierd.cli.bench_figures import Figure, chart

OURS = "kvtierd"
FORMAT = 1


@dataclass
class Row:
    """One thing measured on several subjects: a value a round and subject.

    ``how`` says what is done on each side; ``goals``: by rival, how many times better kvtierd has to be.
    """

    what: str
    unit: str
    how: str
    more_is_better: bool = True
    goals: Mapping[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, subject: str, value: float) -> None:
        """Add a round's value."""
        self.values.setdefault(subject, []).append(value)

    def value(self, subject: str) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.values[subject])

    def ratio(self, rival: str) -> float:
        """Return how many times better kvtierd is."""
        ours, theirs = self.value(OURS), self.value(rival)
        better, worse = (ours, theirs) if self.more_is_better else (theirs, ours)
        return better / worse if worse else 0.0

    def rivals(self) -> list[str]:
        """Return whom kvtierd is compared with here."""
        return [name for name in self.values if name != OURS] if OURS in self.values else []

    def as_json(self) -> dict[str, Any]:
        """Return plain values, every round's among them."""
        return {
            "what": self.what,
            "how": self.how,
            "unit": self.unit,
            "more_is_better": self.more_is_better,
            "values": self.values,
            "ratios": {rival: round(self.ratio(rival), 3) for rival in self.rivals()},
            "goals": dict(self.goals),
        }


def write(folder: Path, rows: Sequence[Row], notes: Mapping[str, str]) -> None:
    """Write ``peers.md``, ``peers.json`` and ``peers.svg``; ``notes``: who was not measured, and why."""
    machine = f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    (folder / "peers.md").write_text("\n".join(markdown(rows, notes, machine)) + "\n", "utf-8")
    body = {
        "format": FORMAT,
        "machine": machine,
        "rows": [row.as_json() for row in rows],
        "notes": dict(notes),
    }
    (folder / "peers.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    figures = [
        Figure(f"{row.what}: {rival}", row.value(OURS), row.unit, row.value(rival), row.more_is_better)
        for row in rows
        for rival in row.rivals()
    ]
    (folder / "peers.svg").write_text(chart("kvtierd (blue) and its rivals (grey)", figures, {}), "utf-8")


def markdown(rows: Sequence[Row], notes: Mapping[str, str], machine: str) -> Iterator[str]:
    """Yield the lines of a table: a line for each thing and rival."""
    yield f"Medians of alternating rounds ({machine}). Ratio: how many times better kvtierd is."
    yield ""
    yield "| what | rival | kvtierd | rival | ratio | goal |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        for rival in row.rivals():
            ours, theirs = (f"{row.value(name):,.4g} {row.unit}" for name in (OURS, rival))
            ratio, goal = row.ratio(rival), row.goals.get(rival)
            verdict = "" if goal is None else f"{goal:g}x {'met' if ratio >= goal else 'MISSED'}"
            yield f"| {row.what} | {rival} | {ours} | {theirs} | {ratio:.2f}x | {verdict} |"
    yield ""
    for how in dict.fromkeys(row.how for row in rows):
        yield f"- {', '.join(row.what for row in rows if row.how == how)}: {how}"
    for subject, why in notes.items():
        yield f"- **Not measured: {subject}**: {why}"

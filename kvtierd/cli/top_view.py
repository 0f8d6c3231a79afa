"""What ``kvtierd top`` draws: two looks at a status make rates, a row of looks makes a chart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvtierd.advice import advise, tier_condition
from kvtierd.cli.common import text
from kvtierd.config.units import human_size

Status = Mapping[str, Any]
LOOKS = 60
"""Of the chart: a minute, at one look a second."""
BAR = 20
WIDE, NARROW = 100, 76
BLOCKS = " ▁▂▃▄▅▆▇█"
COLOURS = {"ok": "green", "slow": "yellow", "degraded": "red", "stalled": "red"}
LEVELS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


class Screen:
    """The last two looks and the hit rate of the last :data:`LOOKS`."""

    def __init__(self) -> None:
        self._status: Status = {}
        self._before: Status = {}
        self._at = self._before_at = 0.0
        self._rates: deque[float | None] = deque(maxlen=LOOKS)
        self._lost = ""

    def take(self, status: Status, now: float) -> None:
        """Take a look; ``now`` in seconds of any clock that only goes forward."""
        if status.get("pid") != self._status.get("pid"):
            self._status, self._before = {}, {}  # another daemon counts from 0
        self._before, self._before_at = self._status, self._at
        self._status, self._at, self._lost = status, now, ""
        if self._before:
            hits, misses = self._grown(_hits), self._grown(_misses)
            self._rates.append(hits / (hits + misses) if hits + misses > 0 else None)

    def lose(self, why: str) -> None:
        """No daemon answered: what is shown is old."""
        self._lost = why

    def render(self, width: int) -> RenderableType:
        """Return the whole picture for a terminal of ``width`` columns."""
        parts: list[RenderableType] = [self._heading(), self._tiers(width), self._hit_rate(width)]
        return Group(*parts, *self._engines(), *self._audiences(), *self._advice())

    # -- rates --------------------------------------------------------------------------------------

    def _grown(self, count: Any, key: str | None = None) -> float:
        """How much a counter grew a second, between the last two looks."""
        if not self._before or self._at <= self._before_at:
            return 0.0
        now, before = (
            count(look) if key is None else count(look, key) for look in (self._status, self._before)
        )
        return float(max(0.0, (now - before) / (self._at - self._before_at)))

    # -- parts --------------------------------------------------------------------------------------

    def _heading(self) -> Text:
        status = self._status
        line = Text.assemble(
            ("kvtierd ", "bold"),
            text(status.get("version", "?")),
            f"  pid {text(status.get('pid', '?'))}  ",
            (text(status.get("state", "?")), "green" if status.get("state") == "ready" else "yellow"),
            f"  up {int(status.get('uptime_seconds', 0))} s",
        )
        if self._lost:
            line.append(f"\n{text(self._lost)}: what follows is old", style="bold red")
        return line

    def _tiers(self, width: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=False)
        # What a narrow terminal cannot show is in `status`; the state must always be seen.
        rates = RATES if width >= WIDE else RATES[:1]
        for name in ("tier", "", "used", "of", "blocks", *(name for name, _ in rates), "state"):
            table.add_column(name, justify="left" if name in ("tier", "", "state") else "right", no_wrap=True)
        bar = BAR if width >= WIDE else 8 if width >= NARROW else 0
        for tier in _maps(self._status.get("tiers")):
            name = str(tier.get("name"))
            condition = tier_condition(tier)
            table.add_row(
                escape(text(name)),
                _bar(tier, bar),
                _size(tier.get("used_bytes")),
                _size(tier.get("capacity_bytes")),
                f"{tier.get('blocks', 0):,}",
                *(f"{self._grown(count, name):,.0f}" for _, count in rates),
                Text(condition, style=COLOURS.get(condition, "cyan")),
            )
        return table

    def _hit_rate(self, width: int) -> Text:
        known = [rate for rate in self._rates if rate is not None]
        row = "".join(
            "·" if rate is None else BLOCKS[1 + round(rate * (len(BLOCKS) - 2))]
            for rate in list(self._rates)[-max(8, width - 40) :]
        )
        last = f"{100 * known[-1]:.0f} %" if known else "nothing asked for yet"
        return Text.assemble("hit rate  ", (row, "green"), f"  {last}")

    def _engines(self) -> Iterator[RenderableType]:
        sessions = list(_maps(self._status.get("sessions")))
        engines = sorted({text(session.get("engine_id")) for session in sessions})
        work = ", ".join(
            f"{self._status[key]:,} {words}"
            for key, words in (
                ("leases", "leases"),
                ("jobs", "stores under way"),
                ("loads_waiting", "loads waiting"),
            )
            if self._status.get(key)
        )
        yield Text(f"engines  {', '.join(engines) or 'none attached'}{'; ' if work else ''}{work}")

    def _audiences(self) -> Iterator[RenderableType]:
        for name, audience in _mapping(_mapping(self._status.get("events")).get("audiences")).items():
            where = audience.get("bind") or audience.get("connect") or "?"
            counts = f"{self._grown(_audience_events, name):,.0f} events/s, batch {audience.get('sequence')}"
            lost = audience.get("dropped", 0)
            line = Text(f"readers  {text(name)} at {text(where)}: {counts}")
            if lost:
                line.append(f", {lost:,} batches dropped", style="red")
            yield line

    def _advice(self) -> Iterator[RenderableType]:
        for advice in advise(self._status):
            yield Text.assemble(
                (f"{advice.level}  ", LEVELS.get(advice.level, "")),
                text(advice.what),
                (f"  {text(advice.do)}", "dim"),
            )


def _bar(tier: Mapping[str, Any], width: int) -> Text:
    used, limit = tier.get("used_bytes"), tier.get("capacity_bytes")
    if not isinstance(used, int) or not limit:
        return Text("─" * width, style="dim")
    share = min(1.0, used / limit)
    filled = round(share * width)
    return Text.assemble(("█" * filled, "green"), ("░" * (width - filled), "dim"))


def _size(value: Any) -> str:
    return "unlimited" if value is None else human_size(value) if isinstance(value, int) else "?"


def _tier(status: Status, name: str) -> Mapping[str, Any]:
    return next((tier for tier in _maps(status.get("tiers")) if tier.get("name") == name), {})


def _counter(tier: Mapping[str, Any], name: str) -> float:
    return float(_mapping(tier.get("counters")).get(name, 0))


def _tier_hits(status: Status, name: str) -> float:
    return _counter(_tier(status, name), "lookup_hits")


def _tier_loads(status: Status, name: str) -> float:
    return float(_tier(status, name).get("loads", 0))


def _tier_stored(status: Status, name: str) -> float:
    return float(_tier(status, name).get("stored", 0))


def _tier_removed(status: Status, name: str) -> float:
    return float(_tier(status, name).get("removed", 0))


def _audience_events(status: Status, name: str) -> float:
    audiences = _mapping(_mapping(status.get("events")).get("audiences"))
    return float(_mapping(audiences.get(name)).get("events", 0))


def _hits(status: Status) -> float:
    return sum(_counter(tier, "lookup_hits") for tier in _maps(status.get("tiers")))


def _misses(status: Status) -> float:
    return sum(_counter(tier, "lookup_misses") for tier in _maps(status.get("tiers")))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in value or () if isinstance(item, Mapping))


RATES: tuple[tuple[str, Callable[[Status, str], float]], ...] = (
    ("hits/s", _tier_hits),
    ("loads/s", _tier_loads),
    ("stores/s", _tier_stored),
    ("out/s", _tier_removed),
)
"""Columns of a tier; the first alone where there is little room."""

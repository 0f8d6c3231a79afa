"""``kvtierd status``: asks a running daemon over its socket. Imports the client, never the daemon.

What people need at a glance fits a terminal of 80 columns; every figure is in ``--json``. The report is a
tree whose keys may grow; what is missing is left out.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from kvtierd.advice import tier_condition
from kvtierd.cli.common import add_socket, control_socket, table, text
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode, Unavailable

_WIDTH = 80
_WORK = (
    ("jobs", "stores under way"),
    ("leases", "leases"),
    ("loads_waiting", "loads waiting"),
    ("promotions_unread", "promotions unread"),
    ("quarantined_slots", "slots in quarantine"),
    ("operations", "tier operations"),
)
_TROUBLE = ("dropped", "orphans", "replays_abandoned", "replays_refused", "replay_malformed", "curve_refused")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "status",
        help="ask a running daemon how it is",
        description="Print the status of a running daemon; --json has every figure."
        " Exit code 0: it answered, 69: none does.",
    )
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing, only set the exit code")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0, or 69 where no daemon answers."""
    from kvtierd.client import Client

    try:
        client = Client(str(control_socket(args)), deadline=args.deadline)
        try:
            report = client.status()
        finally:
            client.close()
    except Unavailable:
        if args.quiet:
            return ExitCode.UNAVAILABLE
        raise
    if args.json and not args.quiet:
        print(json.dumps(report, indent=2, default=str))
    elif not args.quiet:
        print("\n".join(render(report)))
    return ExitCode.OK


def render(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for people."""
    yield "kvtierd " + "  ".join(_heading(report))
    for section in (_pool, _tiers, _tenants, _layouts, _sessions, _work, _events, _advice):
        yield from section(report)


def _heading(report: Mapping[str, Any]) -> Iterator[str]:
    yield text(report.get("version", "?"))
    yield text(report.get("state", "?"))
    if isinstance(seconds := report.get("uptime_seconds"), int | float):
        yield f"up {_span(int(seconds))}"
    if "pid" in report:
        yield f"pid {text(report['pid'])}"


def _pool(report: Mapping[str, Any]) -> Iterator[str]:
    pool = _mapping(report.get("pool"))
    if not pool:
        return
    size, ready = pool.get("bytes"), pool.get("prefaulted_bytes")
    line = f"pool  {_size(size)}"
    if ready != size:
        line += f", {_size(ready)} ready"
    yield line
    for name, made in pool.items():
        if isinstance(made, Mapping) and "state" in made:
            reason = f" ({text(made['reason'])})" if made.get("reason") else ""
            yield f"  {text(name)}: {text(made['state'])}{reason}"


def _tiers(report: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    troubles = []
    for tier in _mappings(report.get("tiers")):
        used, limit = tier.get("used_bytes"), tier.get("capacity_bytes")
        full = f"{100 * used / limit:.0f}%" if isinstance(used, int) and limit else "-"
        condition = text(tier_condition(tier))
        row = {"tier": text(tier.get("name")), "used": _size(used), "of": _size(limit), "full": full}
        for column in ("blocks", "stored", "removed", "loads"):
            row[column] = text(tier.get(column, "-"))
        rows.append({**row, "condition": condition})
        if why := tier.get("reason") or (tier.get("last_fault") if condition != "ok" else ""):
            troubles.append(f"  {text(tier.get('name'))}: {text(why)}")
    yield from _section("tiers", rows)
    yield from troubles


def _tenants(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield who has what, once there is more than one tenant or a share."""
    tenants = _mappings(report.get("tenants"))
    shared = False
    rows = []
    for tenant in tenants:
        for tier, has in _mapping(tenant.get("tiers")).items():
            has = _mapping(has)
            share = has.get("share_bytes")
            shared = shared or bool(share)
            if share or has.get("blocks"):
                rows.append(
                    {
                        "tenant": text(tenant.get("tenant")),
                        "tier": text(tier),
                        "used": _size(has.get("used_bytes", 0)),
                        "share": _size(share) if share else "-",
                        "blocks": text(has.get("blocks", "-")),
                        "evicted": text(has.get("evicted", "-")),
                    }
                )
    if shared or len({row["tenant"] for row in rows}) > 1:
        yield from _section("tenants", rows)


def _layouts(report: Mapping[str, Any]) -> Iterator[str]:
    named = any(layout.get("tenant") for layout in _mappings(report.get("layouts")))
    rows = [
        {
            "layout": text(layout.get("namespace"))[:8],
            "model": text(layout.get("model")),
            **({"tenant": text(layout.get("tenant") or "-")} if named else {}),
            "slot": _size(layout.get("slot_bytes")),
            "slots": text(layout.get("slots")),
            "free": text(layout.get("free_slots")),
            "sessions": text(layout.get("attached_sessions")),
        }
        for layout in _mappings(report.get("layouts"))
    ]
    yield from _section("layouts", rows)


def _sessions(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        {
            "engine": text(session.get("engine_id")),
            "role": text(session.get("role")),
            "rank": text(session.get("rank")),
            "dp": text(session.get("dp_rank")),
            "layout": text(session.get("namespace"))[:8],
        }
        for session in _mappings(report.get("sessions"))
    ]
    yield from _section("sessions", rows) if rows else ["sessions  none"]


def _work(report: Mapping[str, Any]) -> Iterator[str]:
    busy = [f"{report[key]} {words}" for key, words in _WORK if report.get(key)]
    yield f"work  {', '.join(busy) or 'nothing under way'}"


def _events(report: Mapping[str, Any]) -> Iterator[str]:
    events = _mapping(report.get("events"))
    audiences = _mapping(events.get("audiences")) or ({"events": events} if events else {})
    for name, audience in audiences.items():
        audience = _mapping(audience)
        where = text(audience.get("bind") or audience.get("connect") or "?")
        sent = audience.get("sequence", "-")
        line = f"events  {text(name)}: {where}, {'no batch yet' if sent is None else f'batch {text(sent)}'}"
        line += f", {text(audience.get('announced', '-'))} residencies announced"
        yield line
        trouble = [f"{audience[key]} {key}" for key in _TROUBLE if audience.get(key)]
        if audience.get("sequence_degraded"):
            trouble.append(text(audience["sequence_degraded"]))
        if trouble:
            yield f"  {', '.join(trouble)}"


def _advice(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong and what to do; notes are for the status page."""
    from kvtierd.advice import NOTE, advise

    try:
        found = [advice for advice in advise(report) if advice.level != NOTE]
    except (AttributeError, KeyError, TypeError, ValueError):  # a report of another version
        return
    for advice in found:
        yield from textwrap.wrap(f"{advice.level}  {text(advice.what)}", _WIDTH, subsequent_indent="  ")
        yield from textwrap.wrap(text(advice.do), _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _section(title: str, rows: list[dict[str, str]]) -> Iterator[str]:
    if rows:
        yield title
        yield from (f"  {line}" for line in table(rows))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _size(value: Any) -> str:
    from kvtierd.config.units import human_size

    if value is None:
        return "unlimited"
    return human_size(value) if isinstance(value, int) else text(value)


def _span(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{value}{unit}" for value, unit in parts[:2])

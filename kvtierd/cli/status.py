"""``kvtierd status``: asks a running daemon over its socket. Imports the client, never the daemon.

The report is a tree whose keys may grow; what is not known here is printed as it is, what is missing is left
out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvtierd.cli.common import add_socket, control_socket, table, text
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode, Unavailable

_ONLY_IN_JSON = ("counters", "movers", "extent_bytes", "deleting_bytes")
_FULL_BY = (("bytes", "max_bytes"), ("used_bytes", "max_bytes"), ("bytes", "capacity_bytes"))


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
    """Yield the lines of a report for people: plain values, then sections and tables."""
    plain = {key: value for key, value in report.items() if not isinstance(value, (Mapping, list, tuple))}
    if plain:
        yield "  ".join(f"{text(key)} {_value(key, value)}" for key, value in plain.items())
    for key in [key for key in report if key not in plain and key not in _ONLY_IN_JSON]:
        rows = _rows(report[key])
        if rows is None:
            yield f"{text(key)}:"
            yield from (f"  {name}: {value}" for name, value in _facts(report[key]))
        elif rows:
            yield f"{text(key)}:"
            yield from (f"  {line}" for line in table(rows))
        else:
            yield f"{text(key)}: none"


def _rows(section: Any) -> list[dict[str, str]] | None:
    """Return a list, or a mapping of names to mappings without plain values, as rows of a table."""
    if isinstance(section, Mapping):
        children = list(section.values())
        if not children or not all(isinstance(child, Mapping) and len(child) > 1 for child in children):
            return None
        if any("state" in child and "name" not in child for child in children):
            return None
        entries: list[Any] = [{"name": key, **child} for key, child in section.items()]
    else:
        entries = list(section)
    return [_row(entry) if isinstance(entry, Mapping) else {"": text(entry)} for entry in entries]


def _row(entry: Mapping[str, Any]) -> dict[str, str]:
    row = dict(_facts(entry))
    for used, limit in _FULL_BY:
        top = entry.get(limit)
        if isinstance(entry.get(used), int) and isinstance(top, int) and top > 0:
            row["full"] = f"{100 * entry[used] / top:.1f}%"
            break
    return row


def _facts(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value) of everything in a section that is for people, in its order."""
    for key, value in section.items():
        if key in _ONLY_IN_JSON:
            continue
        name = f"{prefix}{text(key)}"
        if isinstance(value, Mapping) and "state" in value and set(value) <= {"state", "reason"}:
            reason = value.get("reason")
            yield name, text(value["state"]) + (f" ({text(reason)})" if reason else "")
        elif isinstance(value, Mapping):
            yield from _facts(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            yield name, ", ".join(text(item) for item in value) or "none"
        else:
            yield name, _value(key, value)


def _value(key: object, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int) and str(key).endswith("bytes"):
        from kvtierd.config.units import human_size

        return human_size(value)
    return f"{value:.3f}" if isinstance(value, float) else text(value)

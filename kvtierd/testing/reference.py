"""Makes ``kvtierd/REFERENCE.md``: every name that people meet outside, listed from where the code has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from kvtierd.config.change import verdict
from kvtierd.core.effects import ErrorCode
from kvtierd.core.model import Departure, KeyState, SkipReason
from kvtierd.errors import ExitCode

HEAD = """# Reference

Made from the code (`python -m kvtierd.testing.generated`), and a test keeps it so.

- [Exit codes](#exit-codes)
- [Refusals of the engine protocol](#refusals), [why a store was skipped](#skipped-stores), [what a
  lookup says](#lookups), [why a block left a tier](#departures)
- [Keys of the tier file](#keys-of-the-tier-file)
- [Metrics](#metrics)
- [Events of the log](#events-of-the-log)
- What readers of the stream get: [ROUTERS.md](wire/ROUTERS.md); every message of an engine:
  [PROTOCOL.md](wire/PROTOCOL.md)
"""
KEYS = """
## Keys of the tier file

As a variable: `KVTIERD__` and the path with `__` between its parts (`KVTIERD__TIERS__1__TTL=2h`).
*live*: a reload changes it; every other key is for the next start. Values are defaults, or the
example that [full.yaml](../config/full.yaml) gives.

| key | value | live | meaning |
|---|---|---|---|
"""


class Key(NamedTuple):
    """One key of the tier file as the commented example has it; ``pattern``: with ``*`` for each element."""

    path: str
    pattern: tuple[str, ...]
    value: str
    meaning: str


def page(full: Path) -> str:
    """Return the whole page; ``full``: the commented tier file."""
    from kvtierd.edges.metrics.exporter import FAMILIES
    from kvtierd.logs.events import EVENTS

    metrics = (f"`{family.series}` ({', '.join(family.labels) or 'no labels'})" for family in FAMILIES)
    return "".join(
        [
            HEAD,
            "\n## Exit codes\n\n| code | meaning |\n|---|---|\n",
            *(f"| {int(code)} | {code.meaning} |\n" for code in ExitCode),
            _names(
                "Refusals", ErrorCode, "Meanings, and what a client does: [PROTOCOL.md](wire/PROTOCOL.md)."
            ),
            _names("Skipped stores", SkipReason, "`prepare_store` gives such a key no slot."),
            _names("Lookups", (state.name for state in KeyState), str(KeyState.__doc__)),
            _names("Departures", Departure, "In metrics and status; readers hear a removal for each."),
            KEYS,
            *(_row(key) for key in keys(full)),
            "\n## Metrics\n\nTypes and meanings: [METRICS.md](edges/metrics/METRICS.md).\n\n",
            *(f"- {metric}\n" for metric in metrics),
            "\n## Events of the log\n\nMeanings and fields: [EVENTS.md](logs/EVENTS.md).\n\n",
            ", ".join(f"`{name}`" for name in EVENTS) + "\n",
        ]
    )


def _names(title: str, names: Iterable[str], about: str) -> str:
    text = " ".join(about.split())
    return f"\n## {title}\n\n{text}\n\n{', '.join(f'`{name!s}`' for name in names)}\n"


def _row(key: Key) -> str:
    live = "yes" if key.value and not verdict(key.pattern) else ""
    value = f"`{key.value}`" if key.value else ""
    return f"| `{key.path}` | {value} | {live} | {key.meaning} |\n"


def keys(full: Path) -> list[Key]:
    """Return every key of the commented tier file, those in comments included, in its order."""
    text = full.read_text(encoding="utf-8")
    text = re.sub(r"^( {2,8})# (?= *(?:- )?[a-z_]+:)", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^( *(?:relay|tenants):) \[\]", r"\1", text, flags=re.MULTILINE)
    lines = ["" if re.match(r" *curve: null", line) else line for line in text.splitlines()]
    document = yaml.compose("\n".join(lines))
    assert document is not None
    return list(_walk(document, (), (), lines))


def _walk(
    node: yaml.Node, path: tuple[str, ...], pattern: tuple[str, ...], lines: list[str]
) -> Iterator[Key]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            kind = _kind(item)
            yield from _walk(item, (*path[:-1], f"{path[-1]}[{kind}]"), (*pattern, "*"), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here, found = (*path, key.value), (*pattern, key.value)
            nested = isinstance(value, yaml.MappingNode | yaml.SequenceNode) and bool(value.value)
            yield Key(".".join(here), found, "" if nested else _value(value, lines), _comment(key, lines))
            if nested:
                yield from _walk(value, here, found, lines)


def _kind(node: yaml.Node) -> str:
    """Return the type of a tier, nothing for other elements of lists."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "type":
                return str(value.value)
    return ""


def _value(node: yaml.Node, lines: list[str]) -> str:
    line = lines[node.start_mark.line]
    return line[node.start_mark.column : node.end_mark.column].strip()


def _comment(key: yaml.Node, lines: list[str]) -> str:
    first = key.start_mark.line
    parts = [lines[first].partition(" # ")[2]]
    for line in lines[first + 1 :]:
        if not re.match(r" {12,}#", line):
            break
        parts.append(line.partition("#")[2])
    return " ".join(" ".join(parts).split()).replace("|", "\\|")

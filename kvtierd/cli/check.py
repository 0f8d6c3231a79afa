"""``kvtierd check``: is the tier file right, and what is in force."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvtierd.cli.main import Subparsers
from kvtierd.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from kvtierd.config.load import Loaded

BUILT_IN = "built in"
_PLAIN = re.compile(r"/?[A-Za-z][A-Za-z0-9_/.-]*|[0-9]+(B|[KMGTP]iB|ms|s|m|h)", re.ASCII)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "check",
        help="check a tier file and show the values in force",
        description="Check a tier file with the environment's overrides. Exit code 0: right, 78: not. Ports,"
        " memory and paths are tried when a daemon starts.",
    )
    parser.add_argument("--config", metavar="F", required=True, help="the tier file")
    parser.add_argument("--print-effective", action="store_true", help="print every value and its origin")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Check, print, and return 0 or 78."""
    from kvtierd.config.load import load_tier_file

    try:
        loaded = load_tier_file(args.config, os.environ)
        origins = dict(_origins(loaded))
    except ConfigError as error:
        if args.json:
            print(json.dumps({"ok": False, "errors": str(error).splitlines(), "warnings": []}, indent=2))
        else:
            print(error, file=sys.stderr)
        return ExitCode.CONFIG
    for warning in loaded.warnings:
        print(f"{loaded.path}: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(_answer(loaded, origins, effective=args.print_effective), indent=2))
    elif args.print_effective:
        print("\n".join(effective_yaml(loaded)))
    else:
        print("\n".join(summary(loaded, origins)))
    return ExitCode.OK


def summary(loaded: Loaded, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines that say what was read, and what only the start of a daemon can tell."""
    from kvtierd.config.units import format_size

    tier_file = loaded.tier_file
    named = []
    for tier in tier_file.tiers:
        limit = getattr(tier, "max_bytes", None)
        bound = f", at most {format_size(limit)}" if isinstance(limit, int) else limit and f", {limit}"
        named.append(f"{tier.name} ({tier.type}{bound or ''})")
    yield f"{loaded.path}: ok"
    yield f"  pool: {format_size(tier_file.pool.bytes)}; tiers: {', '.join(named)}"
    for tier in tier_file.tiers:
        if origins[tier.name] != BUILT_IN:
            yield f"  tier {tier.name}: {tier.type}, {origins[tier.name]}"
    yield "  ports, memory and paths are tried at start, not here"


def effective_yaml(loaded: Loaded) -> Iterator[str]:
    """Yield the lines of a tier file with all values in force, each with its origin as a comment."""
    for text, path in _lines(loaded.tier_file.model_dump(mode="json"), "", ""):
        origin = loaded.origins.get(path)
        yield f"{text:<44}  # {origin}" if origin else text


def _origins(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Yield each tier and where its type comes from; a package's is imported and tried on its options.

    Raises:
        ConfigError: it cannot be used.
    """
    from kvtierd.config.schema import PluginTier

    for tier in loaded.tier_file.tiers:
        if isinstance(tier, PluginTier):
            from kvtierd.edges.backends.registry import load, make_added

            make_added(tier.name, tier.type, tier.options)
            yield tier.name, f"from {load(tier.name, tier.type)[0].origin}"
        else:
            yield tier.name, BUILT_IN


def _answer(loaded: Loaded, tiers: Mapping[str, str], *, effective: bool) -> dict[str, object]:
    answer: dict[str, object] = {
        "ok": True,
        "errors": [],
        "warnings": list(loaded.warnings),
        "tier_types": dict(tiers),
    }
    if effective:
        answer["effective"] = loaded.tier_file.model_dump(mode="json")
        answer["origins"] = dict(loaded.origins)
    return answer


def _lines(value: Any, path: str, indent: str) -> Iterator[tuple[str, str]]:
    """Yield (line of YAML, dotted path of the value on it) for a mapping or a list."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, child in pairs:
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, list):
            for number, (text, owner) in enumerate(_lines(child, here, indent + "  ")):
                yield (f"{indent}- {text.lstrip()}" if number == 0 else text), owner
        elif isinstance(child, (dict, list)) and child:
            yield f"{indent}{key}:", here
            yield from _lines(child, here, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(child)}", here


def _scalar(value: object) -> str:
    """Return one value as YAML; a JSON string is also a YAML one."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in ("true", "false", "null"):
        return value
    return json.dumps(value)

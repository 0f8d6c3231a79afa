"""What several commands share: where the daemon is, tables and text for people. Light to import."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

DEFAULT_RUNTIME_DIR = "/run/kvtierd"


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which daemon to ask and how long."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--socket", metavar="PATH", help=f"default: {DEFAULT_RUNTIME_DIR}/control.sock")
    where.add_argument("--config", metavar="F", help="find the socket through this tier file")
    parser.add_argument(
        "--deadline", type=seconds, default=2.0, metavar="S", help="seconds to wait (default 2)"
    )


def control_socket(args: argparse.Namespace) -> Path:
    """Return the control socket that the arguments of :func:`add_socket` mean."""
    if args.socket:
        return Path(args.socket)
    if args.config:
        from kvtierd.config.load import load_tier_file

        return load_tier_file(args.config, os.environ).tier_file.runtime_dir / "control.sock"
    return Path(os.environ.get("KVTIERD__RUNTIME_DIR", DEFAULT_RUNTIME_DIR)) / "control.sock"


def seconds(text: str) -> float:
    """Read a number of seconds, at most an hour."""
    value = float(text)
    if not 0 < value <= 3600:
        raise ValueError(text)
    return value


def table(rows: Sequence[dict[str, str]], right: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a table, columns in the order met, those in ``right`` aligned so."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    widths = {column: max(len(column), *(len(row.get(column, "-")) for row in rows)) for column in columns}
    for row in ({column: column for column in columns}, *rows):
        cells = [
            row.get(column, "-").rjust(widths[column])
            if column in right
            else row.get(column, "-").ljust(widths[column])
            for column in columns
        ]
        yield "  ".join(cells).rstrip()


def text(value: object) -> str:
    """Return ``str(value)`` with what a terminal could take for a command made visible."""
    plain = str(value)
    return plain if plain.isprintable() else plain.encode("unicode_escape").decode()

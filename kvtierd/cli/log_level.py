"""``kvtierd log-level``: shows or changes how much a running daemon logs, without a restart."""

from __future__ import annotations

import argparse
import json

from kvtierd.cli.common import add_socket, control_socket
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode

LEVELS = ("debug", "info", "warning", "error")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "log-level",
        help="show or change how much a running daemon logs",
        description="Print the level of a running daemon's log; with LEVEL change it first, until the next"
        " restart. At debug there is a line for each request and each operation of a tier.",
    )
    parser.add_argument("level", nargs="?", choices=LEVELS, help="the level from now on")
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the level in force; return 0."""
    from kvtierd.client import Client

    client = Client(str(control_socket(args)), deadline=args.deadline)
    try:
        level = client.log_level(args.level)
    finally:
        client.close()
    print(json.dumps({"level": level}) if args.json else level)
    return ExitCode.OK

"""``kvtierd version``."""

from __future__ import annotations

import argparse
import json
import platform

from kvtierd import __version__
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("version", help="print the version")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Print kvtierd's version, with ``--json`` also Python's and the kernel's."""
    if args.json:
        facts = {"kvtierd": __version__, "python": platform.python_version(), "kernel": platform.release()}
        print(json.dumps(facts))
    else:
        print(f"kvtierd {__version__}")
    return ExitCode.OK

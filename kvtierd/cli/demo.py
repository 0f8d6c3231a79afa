"""``kvtierd demo``: a daemon, a fake engine and a router's view, together for some seconds.

A real daemon with a small pool and a bounded disk tier runs on a temporary folder. A fake engine replays
conversations against it, with real bytes that are compared on every load. In the end, what a router folded
from the events has to be what the daemon holds.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="show a daemon, an engine and a router at work, and check every byte",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exits 0 only if every loaded byte was right, every tier served loads, blocks were evicted "
        "from\nevery tier, and the router's view equals the daemon's inventory.",
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="pace the requests over this time")
    parser.add_argument("--requests", type=count, default=600, help="requests to replay (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, nothing else")
    parser.set_defaults(run=run)


def count(text: str) -> int:
    """Read a positive whole number; named for argparse's message about a bad one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the demo; whatever happens, its daemon is stopped and its folder removed."""
    from kvtierd.cli.demo_run import play
    from kvtierd.testing.local_daemon import short_folder

    # Ended by SIGTERM, we still have to stop our daemon: take it as a Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with short_folder("demo") as folder:
            return play(args, folder)
    finally:
        signal.signal(signal.SIGTERM, before)

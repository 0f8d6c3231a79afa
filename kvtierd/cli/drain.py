"""``kvtierd drain``: takes a running daemon out of service while it goes on answering loads."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from kvtierd.cli.common import add_socket, control_socket, seconds, text
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode

if TYPE_CHECKING:
    from kvtierd.wire.messages import Draining

POLL_SECONDS = 0.2


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "drain",
        help="take no stores, be unready and write down what only the pool holds",
        description="From now on a running daemon answers /readyz with 503 and takes no stores; loads are"
        " served on, and what only the pool holds is written to the tiers that are otherwise written on"
        f" eviction. Exit code {ExitCode.TEMPORARY:d} with --wait: not all of it could be written in time.",
    )
    parser.add_argument(
        "--wait", nargs="?", type=seconds, const=600.0, metavar="S", help="until it is written (default 600)"
    )
    parser.add_argument("--undo", action="store_true", help="take stores again and be ready")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)


def run(args: argparse.Namespace) -> int:
    """Drain and print; return 0, or 75 where the wait ends too early."""
    from kvtierd.client import Client
    from kvtierd.wire.messages import Draining, DrainRequest

    with Client(str(control_socket(args)), deadline=args.deadline) as client:
        now = client.order(DrainRequest, Draining, undo=args.undo)
        end = time.monotonic() + (args.wait or 0.0)
        while now.draining and _left(now) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            now = client.order(DrainRequest, Draining)
    print(json.dumps(_plain(now)) if args.json else _words(now))
    waited_in_vain = args.wait is not None and now.draining and _left(now)
    return ExitCode.TEMPORARY if waited_in_vain else ExitCode.OK


def _left(now: Draining) -> int:
    return sum(now.waiting.values())


def _plain(now: Draining) -> dict[str, object]:
    return {"draining": now.draining, "waiting": now.waiting, "blocked": now.blocked}


def _words(now: Draining) -> str:
    if not now.draining:
        return "in service"
    waiting = [f"{count:,} blocks to {text(tier)}" for tier, count in now.waiting.items() if count]
    blocked = [f"{text(tier)} takes nothing now: {text(reason)}" for tier, reason in now.blocked.items()]
    return "; ".join(["draining", f"to be written: {', '.join(waiting) or 'nothing'}", *blocked])

"""``kvtierd top``: a daemon at work, live in a terminal; without a terminal one look, then the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from kvtierd.cli.common import add_socket, control_socket, seconds
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode, KvtierdError, Unavailable

INTERVAL = 1.0


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "top",
        help="watch a running daemon at work",
        description="Show tiers, engines, readers and what needs a hand, renewed every second, until Ctrl-C."
        " It goes on while the daemon is away. Without a terminal: two looks, for rates, then the end.",
    )
    add_socket(parser)
    parser.add_argument(
        "--interval", type=seconds, default=INTERVAL, metavar="S", help="seconds between looks (default 1)"
    )
    parser.add_argument(
        "--count", type=int, default=0, metavar="N", help="end after N looks (default: never)"
    )


def run(args: argparse.Namespace) -> int:
    """Show until interrupted; 69 where no daemon answers at first."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:
        raise KvtierdError("top needs the package rich: pip install 'kvtierd[cli]'") from None
    from kvtierd.cli.top_view import Screen

    console = Console(file=sys.stdout)
    screen = Screen()
    looks = args.count if args.count > 0 or console.is_terminal else 2
    screen.take(_ask(args), time.monotonic())
    if not console.is_terminal:
        for _ in range(looks - 1):
            time.sleep(args.interval)
            screen.take(_ask(args), time.monotonic())
        console.print(screen.render(console.width))
        return ExitCode.OK
    with Live(screen.render(console.width), console=console, screen=True, auto_refresh=False) as live:
        taken = 1
        while not looks or taken < looks:
            time.sleep(args.interval)
            try:
                screen.take(_ask(args), time.monotonic())
            except Unavailable as error:
                screen.lose(str(error))
            live.update(screen.render(console.width), refresh=True)
            taken += 1
    return ExitCode.OK


def _ask(args: argparse.Namespace) -> Mapping[str, Any]:
    from kvtierd.client import Client

    client = Client(str(control_socket(args)), deadline=args.deadline)
    try:
        return client.status()
    finally:
        client.close()

"""``kvtierd serve``: runs the daemon in the foreground until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode

LEVELS = ("debug", "info", "warning", "error")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="run the daemon",
        description="Run the daemon until SIGTERM or SIGINT; a second signal ends it at once.",
    )
    parser.add_argument("--config", metavar="F", required=True, help="the tier file")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument(
        "--paranoid", action="store_true", help="check every invariant after every turn (slow: for tests)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve; return 0 after a clean stop."""
    import uvloop

    from kvtierd.config.load import load_tier_file

    logging.basicConfig(
        stream=sys.stderr,
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    loaded = load_tier_file(Path(args.config), os.environ)
    for warning in loaded.warnings:
        logging.getLogger("kvtierd.config").warning("%s", warning)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded.tier_file, paranoid=args.paranoid))
    return ExitCode.OK


def _tame_collector() -> None:
    """Keep full garbage collections out of the turns.

    A collection of the oldest generation walks every block of the index (a second for millions) and finds
    nothing there: the index has no cycles. Young objects are collected as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1 << 30)


async def _serve(tier_file: object, *, paranoid: bool) -> None:
    from kvtierd.config.schema import TierFile
    from kvtierd.daemon import Daemon

    assert isinstance(tier_file, TierFile)
    daemon = Daemon(tier_file, paranoid=paranoid)
    _tame_collector()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    await daemon.run()

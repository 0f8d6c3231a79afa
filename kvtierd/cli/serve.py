"""``kvtierd serve``: runs the daemon in the foreground until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtierd import __version__
from kvtierd.cli.main import Subparsers
from kvtierd.config.units import human_size
from kvtierd.errors import ExitCode

if TYPE_CHECKING:
    from kvtierd.config.schema import TierFile

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

    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        stream=sys.stderr,
        level=args.log_level.upper(),
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    loaded = load_tier_file(Path(args.config), os.environ)
    for warning in loaded.warnings:
        logging.getLogger("kvtierd.config").warning("%s", warning)
    _announce(args.config, loaded.tier_file)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded.tier_file, paranoid=args.paranoid))
    return ExitCode.OK


def tame_collector() -> None:
    """Keep full garbage collections out of the turns.

    A collection of the oldest generation walks every block of the index (a second for millions) and finds
    nothing there: the index has no cycles. Young objects are collected as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1 << 30)


def _announce(path: str, tier_file: TierFile) -> None:
    """Say what this daemon is about to run with: the first thing that one looks for at night."""
    log = logging.getLogger("kvtierd")
    log.info("kvtierd %s on %s, pid %d", __version__, path, os.getpid())
    log.info(
        "pool %s (%s), tiers %s, sockets in %s, probes on %s",
        human_size(tier_file.pool.bytes),
        tier_file.pool.backing,
        ", ".join(f"{tier.name} ({tier.type})" for tier in tier_file.tiers),
        tier_file.runtime_dir,
        tier_file.admin.listen or "no address",
    )


async def _serve(tier_file: TierFile, *, paranoid: bool) -> None:
    from kvtierd.daemon import Daemon

    daemon = Daemon(tier_file, paranoid=paranoid)
    tame_collector()
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        logging.getLogger("kvtierd").info("%s: stopping", name)
        daemon.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    await daemon.run()

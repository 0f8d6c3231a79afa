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
from typing import TYPE_CHECKING

from kvtierd import __version__
from kvtierd.cli.main import Subparsers
from kvtierd.config.units import human_size
from kvtierd.errors import ExitCode, KvtierdError
from kvtierd.logs.events import event
from kvtierd.logs.output import LEVELS, Logs

if TYPE_CHECKING:
    from kvtierd.config.load import Loaded
    from kvtierd.config.schema import TierFile

log = logging.getLogger("kvtierd")

TELL_SECONDS = 10.0
"""How often it is told what was left out of the log."""
SWITCH_SECONDS = 0.0005
"""For how long a thread that computes may keep the loop waiting: at the default of 5 ms a few copying threads
made a lookup's median on a busy machine two to six times longer."""
FORMATS = ("auto", "json", "text")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="run the daemon",
        description="Run the daemon until SIGTERM or SIGINT; a second signal ends it at once. SIGHUP reloads"
        " the tier file.",
    )
    parser.add_argument("--config", metavar="F", required=True, help="the tier file")
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="take over from the daemon that runs on this tier file; its engines go on",
    )
    parser.add_argument("--log-level", choices=LEVELS, help="default: log.level of the tier file")
    parser.add_argument("--log-format", choices=FORMATS, help="default: log.format of the tier file")
    parser.add_argument(
        "--paranoid", action="store_true", help="check every invariant after every turn (slow: for tests)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve; return 0 after a clean stop."""
    from kvtierd.config.load import load_tier_file

    loaded = load_tier_file(Path(args.config), os.environ)
    wanted = loaded.tier_file.log
    logs = Logs(sys.stderr, args.log_level or wanted.level, args.log_format or wanted.format)
    try:
        return _run(args, loaded, logs)
    except KvtierdError as error:
        # In the log's own form: whoever reads it by machine must not meet a line of another kind.
        log.critical("%s", error, extra=event("failed", reason=str(error), exit_code=int(error.exit_code)))
        return int(error.exit_code)
    finally:
        logs.close()


def _run(args: argparse.Namespace, loaded: Loaded, logs: Logs) -> int:
    import uvloop

    for warning in loaded.warnings:
        log.warning("%s", warning, extra=event("config_warning"))
    _announce(args.config, loaded.tier_file)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded, logs, paranoid=args.paranoid, takeover=args.takeover))
    return ExitCode.OK


def tame_collector() -> None:
    """Keep garbage collections out of the turns, as far as they can be.

    A collection of the oldest generation walks what was made since the start and finds nothing: neither
    blocks nor the index have cycles, and the collector does not even see what grows with the blocks
    (``tests/unit/test_collector.py``). Young objects are collected as ever, few at a time: with 300,000
    residencies most collections take 0.3 ms, those of the middle generation 2 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 25, 1 << 30)


def _announce(path: str, tier_file: TierFile) -> None:
    """Say what this daemon is about to run with: the first thing that one looks for at night."""
    log.info(
        "kvtierd %s on %s, pid %d",
        __version__,
        path,
        os.getpid(),
        extra=event("started", version=__version__, path=path, pid=os.getpid()),
    )
    log.info(
        "pool %s (%s), tiers %s, sockets in %s, probes on %s",
        human_size(tier_file.pool.bytes),
        tier_file.pool.backing,
        ", ".join(f"{tier.name} ({tier.type})" for tier in tier_file.tiers),
        tier_file.runtime_dir,
        tier_file.admin.listen or "no address",
        extra=event(
            "started", tiers=[tier.name for tier in tier_file.tiers], pool_bytes=tier_file.pool.bytes
        ),
    )


async def _serve(loaded: Loaded, logs: Logs, *, paranoid: bool, takeover: bool) -> None:
    from kvtierd.config.load import load_tier_file
    from kvtierd.daemon import Daemon
    from kvtierd.reload import Reloader

    daemon = Daemon(loaded.tier_file, paranoid=paranoid, takeover=takeover)
    daemon.report.logs = logs.statistics
    daemon.reloader = Reloader(daemon, lambda: load_tier_file(loaded.path, os.environ), loaded.path)
    tame_collector()
    sys.setswitchinterval(SWITCH_SECONDS)
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        log.info("%s: stopping", name, extra=event("stopping", signal=name))
        daemon.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)

    loop.add_signal_handler(signal.SIGHUP, lambda: daemon.reloader.begin("SIGHUP"))

    def tell() -> None:
        logs.limiter.tell()
        loop.call_later(TELL_SECONDS, tell)

    tell()
    await daemon.run()

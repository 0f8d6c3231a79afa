"""``kvtierd bench``: small honest measurements of a daemon on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from kvtierd.cli.demo import count


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser("bench", help="measure a daemon", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    rpc = benches.add_parser(
        "rpc",
        help="round trip of a lookup beside a bare echo",
        description="Time lookups of a few keys, and in turns with them a bare echo of equally long frames "
        "between two processes over the same kind of socket. The daemon is one of its own on a temporary "
        "folder unless --socket names one; on a named one nothing is stored, so that its keys are misses.",
    )
    rpc.add_argument("--socket", metavar="PATH", help="engine socket of a running daemon")
    rpc.add_argument("--keys", type=count, default=16, help="keys in each lookup (default: 16)")
    rpc.add_argument("--seconds", type=float, default=3.0, help="total time (default: 3)")
    rpc.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement and print it."""
    from kvtierd.cli.bench_rpc import measure, report
    from kvtierd.errors import ExitCode

    result = measure(socket_path=args.socket, keys=args.keys, seconds=args.seconds)
    print(report(result, as_json=args.json))
    return ExitCode.OK

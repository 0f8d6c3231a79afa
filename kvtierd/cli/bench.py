"""``kvtierd bench``: small honest measurements of a daemon on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from kvtierd.cli.bench_events import add_events
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
    _add_tiers(benches)
    add_events(benches)
    parser.set_defaults(run=run)


def _add_tiers(benches: Any) -> None:
    tiers = benches.add_parser(
        "tiers",
        help="stores and loads of a tier beside memcpy, plain files or a raw client",
        description="Store and load blocks through a tier's own workers, and in turns with that move the same"
        " bytes by memcpy, by plain sequential file access in the same folder (as dd does) and, for an"
        " object store, by its client alone. Every byte is compared. Figures are medians of the rounds. Plain"
        " files are read from the page cache unless --cold is given; whether the tier is, is up to --io.",
    )
    tiers.add_argument("--path", metavar="DIR", help="measure a filesystem tier in here (default: .)")
    tiers.add_argument("--url", metavar="URL", help="measure an object tier, such as s3://bucket/prefix")
    tiers.add_argument("--endpoint", metavar="URL", help="of an S3-compatible store")
    tiers.add_argument("--region", metavar="R", help="of the bucket")
    tiers.add_argument(
        "--block-bytes", type=size, action="append", metavar="SIZE", help="default: 256KiB, 1MiB and 4MiB"
    )
    tiers.add_argument("--total", type=size, default=256 << 20, metavar="SIZE", help="default: 256MiB")
    tiers.add_argument("--rounds", type=count, default=3, help="default: 3")
    tiers.add_argument(
        "--io", choices=("auto", "direct", "buffered"), default="auto", help="as in a tier file"
    )
    tiers.add_argument("--cold", action="store_true", help="read past the page cache as well")
    tiers.add_argument("--json", action="store_true", help="print one JSON list")


def size(text: str) -> int:
    """Read a size in bytes; named for argparse's message about a bad one."""
    from kvtierd.config.units import parse_size

    return parse_size(int(text) if text.isdigit() else text)


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement and print it."""
    if args.bench == "events":
        return int(args.run_bench(args))
    return _run_tiers(args) if args.bench == "tiers" else _run_rpc(args)


def _run_rpc(args: argparse.Namespace) -> int:
    from kvtierd.cli.bench_rpc import measure, report
    from kvtierd.errors import ExitCode

    result = measure(socket_path=args.socket, keys=args.keys, seconds=args.seconds)
    print(report(result, as_json=args.json))
    return ExitCode.OK


def _run_tiers(args: argparse.Namespace) -> int:
    from pathlib import Path

    from kvtierd.cli import bench_tiers
    from kvtierd.errors import ExitCode

    sizes = tuple(args.block_bytes or (256 << 10, 1 << 20, 4 << 20))
    settings = bench_tiers.Settings(sizes, args.total, args.rounds, args.cold, args.io)
    results = []
    if args.path or not args.url:
        results += bench_tiers.measure_folder(Path(args.path or "."), settings)
    if args.url:
        tier = bench_tiers.object_tier(url=args.url, endpoint=args.endpoint, region=args.region)
        results += bench_tiers.measure_store(tier, settings)
    if args.json:
        print(bench_tiers.as_json(results))
    else:
        print("\n".join(bench_tiers.report(results)))
    return ExitCode.OK

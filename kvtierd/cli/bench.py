"""``kvtierd bench``: small honest measurements of a daemon on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from kvtierd.cli.bench_events import add_events
from kvtierd.cli.bench_figures import add_output, show
from kvtierd.cli.demo import count


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser("bench", help="measure a daemon", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_rpc(benches)
    _add_pool(benches)
    _add_scale(benches)
    _add_clients(benches)
    _add_busy(benches)
    _add_footprint(benches)
    _add_tiers(benches)
    add_events(benches)
    _add_all(benches)
    parser.set_defaults(run=run)


def _add_rpc(benches: Any) -> None:
    rpc = benches.add_parser(
        "rpc",
        help="round trip of lookup, load and store beside a bare echo",
        description="Time verbs of the blocking client, and in turns with them a bare uvloop server that"
        " answers as many bytes with as many over the same kind of socket. The daemon is one of its own on a"
        " temporary folder unless --socket names one; there nothing is stored and only misses are looked up."
        " The client has a core of its own, as in a pod; a round trip on one core takes a quarter of it.",
    )
    rpc.add_argument("--socket", metavar="PATH", help="engine socket of a running daemon")
    rpc.add_argument(
        "--keys", type=count, action="append", metavar="N", help="keys a message (default: 1, 16, 128, 1024)"
    )
    rpc.add_argument("--seconds", type=float, default=8.0, help="total time (default: 8)")
    rpc.add_argument("--together", action="store_true", help="client, daemon and echo on one core")
    add_output(rpc)


def _add_pool(benches: Any) -> None:
    pool = benches.add_parser(
        "pool",
        help="stores and loads of blocks beside memcpy",
        description="Store 16 blocks (prepare, copy, commit; and evict, so that the next is a store again)"
        " and load them through the client, and in turns with that copy the same bytes in memory.",
    )
    pool.add_argument("--block-bytes", type=size, default=2 << 20, metavar="SIZE", help="default: 2MiB")
    pool.add_argument("--seconds", type=float, default=4.0, help="total time (default: 4)")
    add_output(pool)


def _add_scale(benches: Any) -> None:
    scale = benches.add_parser(
        "scale",
        help="cost of lookup, store and memory with more and more blocks",
        description="Fill the core (no socket, bytes or token ids) and time lookups of 1,024 keys and"
        " stores that have to evict. Ratios are to the first size.",
    )
    scale.add_argument(
        "--blocks", type=count, action="append", metavar="N", help="default: 10000, 100000 and 1000000"
    )
    add_output(scale)


def _add_clients(benches: Any) -> None:
    clients = benches.add_parser(
        "clients",
        help="lookups by more and more engines at once",
        description="Lookups of 16 resident keys, one on its way for each engine. Ratios are to"
        " the first count.",
    )
    clients.add_argument(
        "--engines", type=count, action="append", metavar="N", help="default: 1, 4, 16 and 64"
    )
    clients.add_argument("--seconds", type=float, default=4.0, help="total time (default: 4)")
    add_output(clients)


def _add_busy(benches: Any) -> None:
    busy = benches.add_parser(
        "busy",
        help="what an engine waits while the pool evicts, a disk is written and a subscriber hangs",
        description="Time verbs with 16 keys and a bare echo, in turns on an idle daemon and while another"
        " engine stores: every store evicts from a full pool, is written to a full disk, which deletes, and"
        " is told to a subscriber that reads and to one that hangs. Ratios are to the idle daemon; what the"
        " bare echo loses is the machine's.",
    )
    busy.add_argument("--block-bytes", type=size, default=64 << 10, metavar="SIZE", help="default: 64KiB")
    busy.add_argument("--rate", type=count, default=100, help="stores of 16 blocks a second (default: 100)")
    busy.add_argument("--seconds", type=float, default=16.0, help="total time (default: 16)")
    add_output(busy)


def _add_footprint(benches: Any) -> None:
    footprint = benches.add_parser(
        "footprint",
        help="how soon a daemon listens, and what an idle one takes",
        description="Start daemons with a pool of 64 MiB beside a bare interpreter that imports the same"
        " packages; then watch one that an engine and a subscriber are connected to.",
    )
    footprint.add_argument("--seconds", type=float, default=8.0, help="of watching (default: 8)")
    footprint.add_argument("--starts", type=count, default=5, help="that are timed (default: 5)")
    add_output(footprint)


def _add_tiers(benches: Any) -> None:
    tiers = benches.add_parser(
        "tiers",
        help="stores and loads of a tier beside memcpy, plain files or a raw client",
        description="Store and load blocks through a tier's own workers, and in turns with that move the same"
        " bytes by memcpy, by plain loops of pwrite and pread (files as the tier has, in the same folder,"
        " by as many threads, past the page cache as the tier does with this --io: the table names the way)"
        " and, for an object store, by its client alone. Every byte is compared. Figures are medians of the"
        " rounds. Files are read from the page cache, and with --cold also when it holds nothing of them.",
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
    tiers.add_argument(
        "--depth",
        type=count,
        action="append",
        metavar="N",
        help="readers and writers of the tier, and of what it is compared with (default: the tier's 4 and 2)",
    )
    add_output(tiers)


def _add_all(benches: Any) -> None:
    every = benches.add_parser(
        "all",
        help="everything, held against the project's goals",
        description="Run every bench (minutes, even with --short) and print each goal with what came. Goals"
        " are for a machine that does nothing else.",
    )
    every.add_argument("--short", action="store_true", help="less of everything")
    every.add_argument("--part", action="append", metavar="NAME", help="only this (repeat for more)")
    every.add_argument("--path", metavar="DIR", default=".", help="where files are written (default: .)")
    add_output(every)


def size(text: str) -> int:
    """Read a size in bytes; named for argparse's message about a bad one."""
    from kvtierd.config.units import parse_size

    return parse_size(int(text) if text.isdigit() else text)


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement and print it."""
    if args.bench == "events":
        return int(args.run_bench(args))
    if args.bench == "all":
        return _run_all(args)
    return _run_tiers(args) if args.bench == "tiers" else _run_figures(args)


def _run_all(args: argparse.Namespace) -> int:
    from pathlib import Path

    from kvtierd.cli import bench_all
    from kvtierd.errors import ConfigError, ExitCode

    parts = args.part or tuple(bench_all.PARTS)
    if unknown := [part for part in parts if part not in bench_all.PARTS]:
        raise ConfigError(f"no part {unknown[0]!r}: there are {', '.join(bench_all.PARTS)}")
    effort = bench_all.SHORT if args.short else bench_all.FULL
    found = bench_all.measure(effort, parts, Path(args.path))
    show(
        args,
        "all",
        list(found.figures.values()),
        report=bench_all.report(found),
        details=bench_all.details(found),
    )
    return ExitCode.OK


def _run_figures(args: argparse.Namespace) -> int:
    from kvtierd.cli import bench_busy, bench_clients, bench_footprint, bench_pool, bench_rpc, bench_scale
    from kvtierd.errors import ExitCode

    if args.bench == "rpc":
        counts = args.keys or (1, 16, 128, 1024)
        figures = bench_rpc.measure(
            socket_path=args.socket, counts=counts, seconds=args.seconds, together=args.together
        )
    elif args.bench == "pool":
        figures = bench_pool.measure(block_bytes=args.block_bytes, seconds=args.seconds)
    elif args.bench == "scale":
        figures = bench_scale.measure(args.blocks or (10_000, 100_000, 1_000_000))
    elif args.bench == "footprint":
        figures = bench_footprint.measure(seconds=args.seconds, starts=args.starts)
    elif args.bench == "busy":
        load = bench_busy.Load(args.block_bytes, args.rate)
        figures = bench_busy.measure(load=load, seconds=args.seconds)
    else:
        figures = bench_clients.measure(counts=args.engines or (1, 4, 16, 64), seconds=args.seconds)
    show(args, args.bench, figures)
    return ExitCode.OK


def _run_tiers(args: argparse.Namespace) -> int:
    from pathlib import Path

    from kvtierd.cli import bench_tiers, bench_tiers_report
    from kvtierd.errors import ExitCode

    sizes = tuple(args.block_bytes or (256 << 10, 1 << 20, 4 << 20))
    depths = tuple(args.depth or ())
    settings = bench_tiers.Settings(sizes, args.total, args.rounds, args.cold, args.io, depths)
    results = []
    if args.path or not args.url:
        results += bench_tiers.measure_folder(Path(args.path or "."), settings)
    if args.url:
        tier = bench_tiers.object_tier(url=args.url, endpoint=args.endpoint, region=args.region)
        results += bench_tiers.measure_store(tier, settings)
    show(
        args,
        "tiers",
        bench_tiers_report.figures(results),
        report=bench_tiers_report.report(results),
        details=bench_tiers_report.details(results),
    )
    return ExitCode.OK

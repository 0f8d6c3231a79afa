"""Compare kvtierd with its rivals on this machine, in one run (``make bench-peers``)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from . import measure
from .driver import ADAPTERS, Peer
from .rows import OURS, Row, write

DAEMONS = (
    Peer(OURS, ADAPTERS / "kvtierd_daemon.py"),
    Peer("LMCache server", ADAPTERS / "lmcache_server.py", ("engine_driven",), "lmcache"),
    Peer("LMCache server (its own mode)", ADAPTERS / "lmcache_server.py", ("lmcache_driven",), "lmcache"),
    Peer("OpenLake", ADAPTERS / "openlake_daemon.py", (), "openlake"),
)
FILES = (
    Peer(OURS, ADAPTERS / "kvtierd_files.py"),
    Peer("plain files", ADAPTERS / "plain_files.py"),
    Peer("vLLM fs tier", ADAPTERS / "vllm_files.py", (), "vllm"),
    Peer("LMCache fs_native (C++)", ADAPTERS / "lmcache_files.py", ("fs_native",), "lmcache"),
    Peer("LMCache fs (Python)", ADAPTERS / "lmcache_files.py", ("fs",), "lmcache"),
)
PARTS = ("daemons", "footprint", "files")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print where its table lies."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="folder for table, JSON and chart"
    )
    parser.add_argument("--place", type=Path, help="folder whose filesystem is measured (default: the same)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (default: all)")
    parser.add_argument("--subject", action="append", metavar="NAME", help="only these beside kvtierd")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--short", action="store_true", help="only show that everything works")
    chosen = parser.parse_args(arguments)
    sizes = measure.SHORT if chosen.short else measure.Sizes()
    if chosen.rounds:
        sizes = measure.replace(sizes, rounds=chosen.rounds)
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    notes: dict[str, str] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also then it writes what it has
    try:
        run(chosen, sizes, rows, notes)
    finally:
        write(chosen.out, [row for row in rows if row.values], notes)
    print((chosen.out / "peers.md").read_text("utf-8"), end="")
    return 0


def run(chosen: argparse.Namespace, sizes: measure.Sizes, rows: list[Row], notes: dict[str, str]) -> None:
    """Measure what was asked for into ``rows``; ``notes`` says by subject why it was not measured."""
    parts = chosen.part or PARTS

    def of(peers: tuple[Peer, ...]) -> list[Peer]:
        return [p for p in peers if not chosen.subject or p.name in (OURS, *chosen.subject)]

    if "daemons" in parts:
        measure.daemons(of(DAEMONS), sizes, chosen.out, rows, notes)
    if "footprint" in parts:
        measure.footprint(of(DAEMONS), sizes, chosen.out, rows, notes)
    if "files" in parts:
        place = (chosen.place or chosen.out).resolve()
        with tempfile.TemporaryDirectory(prefix="kvtierd-peers-", dir=place) as folder:
            measure.files(of(FILES), sizes, Path(folder), chosen.out, rows, notes)


if __name__ == "__main__":
    raise SystemExit(main())

"""``kvtierd replay``: what tiers of a given size would have served of a recorded request trace.

Runs the real ladder on simulated time; no byte is moved and no daemon is needed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtierd.cli.common import table
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode, KvtierdError

if TYPE_CHECKING:
    from kvtierd.testing.simulate import Result
    from kvtierd.testing.trace import Asked

_POLICIES = ("auto", "lru", "s3fifo", "arc")
_TIERS = re.compile(r"[a-z0-9][a-z0-9_-]*=(\d+|unlimited)(,[a-z0-9][a-z0-9_-]*=(\d+|unlimited))*", re.ASCII)
_NUMBERS = ("blocks", "hit rate", "best possible", "served", "stored", "evicted", "resident")
_LIKE_BLOCKS = 4096


class CannotRead(KvtierdError):
    """The trace's file cannot be read."""

    exit_code = ExitCode.IO


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "replay",
        help="replay a request trace through tiers of a given size",
        description="Replay a request trace through the real tier logic in simulation and print what each"
        " tier would have served, next to the best possible (Belady) for the same room."
        " A trace has one JSON object a line, with timestamp (milliseconds) and hash_ids"
        " (ids of the prompt's prefix blocks, first block first).",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="JSON lines")
    parser.add_argument(
        "--tiers",
        type=_tiers,
        required=True,
        metavar="NAME=BLOCKS,...",
        help="the CPU tier first, then those below it, for instance cpu=10000,disk=100000; below"
        " the first, 'unlimited' will do",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=("auto",),
        metavar="P,...",
        help=f"{', '.join(_POLICIES)}, several of them separated by commas, or all (default auto)",
    )
    parser.add_argument("--block-bytes", type=_positive, metavar="N", help="size of a block, to show bytes")
    parser.add_argument(
        "--latency",
        type=_latency,
        default=0.0,
        metavar="S",
        help="seconds of each storage operation (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _tiers(text: str) -> tuple[tuple[str, int | None], ...]:
    if not _TIERS.fullmatch(text):
        raise argparse.ArgumentTypeError("write NAME=BLOCKS,..., for instance cpu=10000,disk=100000")
    pairs = [part.split("=") for part in text.split(",")]
    tiers = tuple((name, None if blocks == "unlimited" else int(blocks)) for name, blocks in pairs)
    if tiers[0][1] is None:
        raise argparse.ArgumentTypeError(f"{tiers[0][0]} is the pool: it needs a number of blocks")
    if len(dict(tiers)) < len(tiers) or any(blocks == 0 for _, blocks in tiers):
        raise argparse.ArgumentTypeError("each tier needs a name of its own and at least one block")
    return tiers


def _policies(text: str) -> tuple[str, ...]:
    names = _POLICIES if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _POLICIES:
            raise argparse.ArgumentTypeError(f"no policy {name!r}; there are {', '.join(_POLICIES)} and all")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _latency(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 60:
        raise ValueError(text)
    return value


def run(args: argparse.Namespace) -> int:
    """Replay, with a bar on a terminal, and print the figures."""
    from kvtierd.cli.progress import Progress
    from kvtierd.testing.simulate import SimulatedTier, Simulation, best_possible

    requests = _read(args.trace)
    total = sum(len(request.blocks) for request in requests)
    results = []
    for policy in args.policy:
        tiers = [SimulatedTier(name, blocks, policy) for name, blocks in args.tiers]
        simulation = Simulation(tiers, block_bytes=args.block_bytes or _LIKE_BLOCKS, latency=args.latency)
        with Progress(f"replay {policy}", total, quiet=args.json) as progress:
            results.append(simulation.run(requests, progress.advance))
    bests = [best_possible(requests, room) for room in _rooms(args.tiers)]
    unlimited = best_possible(requests, None)
    if args.json:
        print(json.dumps(_report(requests, results, bests, unlimited, args.block_bytes), indent=2))
    else:
        print("\n".join(_lines(args.trace.name, requests, results, bests, unlimited, args.block_bytes)))
    return ExitCode.OK


def _read(path: Path) -> list[Asked]:
    from kvtierd.testing.trace import read_trace

    try:
        with path.open("rb") as lines:
            return read_trace(lines, str(path))
    except OSError as error:
        raise CannotRead(f"{path}: {error.strerror}") from None


def _rooms(tiers: Sequence[tuple[str, int | None]]) -> Iterator[int | None]:
    """Yield the room of the first tier, of the first two together, and so on; ``None``: unlimited."""
    room: int | None = 0
    for _, blocks in tiers:
        room = None if room is None or blocks is None else room + blocks
        yield room


def _report(
    requests: Sequence[Asked],
    results: Sequence[Result],
    bests: Sequence[int],
    unlimited: int,
    block_bytes: int | None,
) -> dict[str, Any]:
    blocks = results[0].blocks
    return {
        "requests": len(requests),
        "blocks": blocks,
        "distinct_blocks": len({block for request in requests for block in request.blocks}),
        "best_possible_unlimited": unlimited / blocks if blocks else 0.0,
        "block_bytes": block_bytes,
        "policies": {result.tiers[0].policy: _of_policy(result, bests) for result in results},
    }


def _of_policy(result: Result, bests: Sequence[int]) -> dict[str, Any]:
    tiers = []
    upto = 0
    for tier, best in zip(result.tiers, bests, strict=True):
        upto += tier.hits
        tiers.append(
            {
                "name": tier.name,
                "capacity": tier.capacity,
                "served": tier.hits,
                "hit_rate": tier.hits / (result.blocks or 1),
                "hit_rate_up_to_here": upto / (result.blocks or 1),
                "best_possible_up_to_here": best / (result.blocks or 1),
                "stored": tier.stored,
                "evicted": tier.evicted,
                "resident": tier.resident,
            }
        )
    return {"hit_rate": result.hits / (result.blocks or 1), "waited_seconds": result.waited, "tiers": tiers}


def _lines(
    name: str,
    requests: Sequence[Asked],
    results: Sequence[Result],
    bests: Sequence[int],
    unlimited: int,
    block_bytes: int | None,
) -> Iterator[str]:
    report = _report(requests, results, bests, unlimited, block_bytes)
    yield (
        f"{name}: {report['requests']:,} requests for {report['blocks']:,} blocks,"
        f" {report['distinct_blocks']:,} of them distinct"
    )
    yield ""
    rows = []
    for policy, figures in report["policies"].items():
        rows += [_row(policy, tier, block_bytes) for tier in figures["tiers"]]
        if len(figures["tiers"]) > 1:
            best = figures["tiers"][-1]["best_possible_up_to_here"]
            rows.append(
                {
                    "policy": policy,
                    "tier": "together",
                    "blocks": "",
                    "hit rate": f"{figures['hit_rate']:.4f}",
                    "best possible": f"{best:.4f}",
                    **dict.fromkeys(_NUMBERS[3:], ""),
                }
            )
    yield from table(rows, _NUMBERS)
    yield ""
    yield ("Rates are shares of all blocks asked for. Best possible: an oracle (Belady) with the room of the")
    yield f"first tier, or of all together; without any limit {report['best_possible_unlimited']:.4f}."


def _row(policy: str, tier: dict[str, Any], block_bytes: int | None) -> dict[str, str]:
    first = tier["hit_rate"] == tier["hit_rate_up_to_here"]
    return {
        "policy": policy,
        "tier": tier["name"],
        "blocks": "unlimited" if tier["capacity"] is None else f"{tier['capacity']:,}",
        "hit rate": f"{tier['hit_rate']:.4f}",
        "best possible": f"{tier['best_possible_up_to_here']:.4f}" if first else "",
        **{name: _amount(tier[name], block_bytes) for name in _NUMBERS[3:]},
    }


def _amount(blocks: int, block_bytes: int | None) -> str:
    from kvtierd.config.units import human_size

    return f"{blocks:,}" if block_bytes is None else human_size(blocks * block_bytes)

"""How ``kvtierd bench tiers`` shows what it measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvtierd.cli.bench_figures import Figure
from kvtierd.config.units import format_size

if TYPE_CHECKING:
    from kvtierd.cli.bench_tiers import Result

BESIDE = {
    "store": ("plain write", "raw put"),
    "load": ("raw get",),  # of files just written: how much the page cache holds depends on the disk
    "load, cached": ("plain read",),
    "load, cold": ("plain read, cold",),
}
"""What each of the tier's figures is compared with, whichever was measured."""


def bare(result: Result, name: str) -> str | None:
    """Return the name of what a tier's figure is compared with, if that was measured."""
    return next((other for other in BESIDE.get(name, ()) if other in result.timings), None)


def figures(results: Sequence[Result]) -> list[Figure]:
    """Return GB/s of stores and loads beside plain files or the raw client; names are unique."""
    found = []
    for result in results:
        kind = "object" if "raw put" in result.timings else "fs"
        case = f"{kind} {format_size(result.block_bytes)}, {result.writers}+{result.readers} workers"
        for name in BESIDE:
            if name in result.timings:
                beside = bare(result, name)
                rate = result.rate(beside) if beside else 0.0
                found.append(Figure(f"{case}: {name}", result.rate(name), "GB/s", rate, more_is_better=True))
    return found


def details(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return every figure and all rounds, as plain values."""
    return [
        {
            "place": result.place,
            "block_bytes": result.block_bytes,
            "blocks": result.count,
            "readers": result.readers,
            "writers": result.writers,
            "figures": {
                name: {
                    "gb_per_second": round(result.rate(name), 3),
                    "cpu_seconds_per_gib": round(result.cpu(name), 3),
                    "seconds": [round(one.seconds, 4) for one in timings],
                }
                for name, timings in result.timings.items()
            },
            "policies": result.policies,
            "checksum_share": {name: round(result.checksum_share(name), 3) for name in ("store", "load")},
        }
        for result in results
    ]


def report(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table for each block size."""
    for result in results:
        blocks = f"{result.count} blocks of {format_size(result.block_bytes)}"
        rounds = len(result.timings["store"])
        yield f"{result.place}: {blocks}, {result.writers} writers, {result.readers} readers, {rounds} rounds"
        yield f"  {'':<18}{'GB/s':>8}{'CPU-s/GiB':>12}{'of it checksum':>17}{'ratio':>9}  plain files by"
        for name in result.timings:
            share = f"{result.checksum_share(name):.0%}" if name == "store" or name.startswith("load") else ""
            line = f"  {name:<18}{result.rate(name):>8.2f}{result.cpu(name):>12.2f}{share:>17}"
            ratio = (
                f"{result.rate(name) / result.rate(beside):.2f}x" if (beside := bare(result, name)) else ""
            )
            yield f"{line}{ratio:>9}  {result.policies.get(name, '')}".rstrip()

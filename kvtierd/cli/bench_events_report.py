"""How ``kvtierd bench events`` prints what it measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.common import table

if TYPE_CHECKING:
    from kvtierd.cli.bench_events import Result

_RIGHT = ("p50", "p99", "count")


def figures(result: Result) -> list[Figure]:
    """Return what can be compared and drawn, beside the bare socket or what it is without the disturbance."""
    found = [
        Figure(f"{one['form']}: events", one["events_per_second"], "/s", more_is_better=True)
        for one in result.forms
    ]
    for one in result.published:
        name = f"published of one core, batches of {one['blocks_per_batch']}"
        found.append(Figure(name, one["blocks_per_second"], "blocks/s", one["bare"], more_is_better=True))
    if latency := result.latency:
        for name, key in (("publishing to a subscriber", "publish"), ("commit to a subscriber", "commit")):
            found += [
                Figure(f"{name}, {share}", latency[key][f"{share}_us"], "us", latency["bare"][f"{share}_us"])
                for share in ("p50", "p99")
            ]
    if stall := result.stall:
        hanging, free = stall["store_beside_a_stalled_subscriber"], stall["store"]
        found.append(Figure("store while a subscriber hangs, p99", hanging["p99_us"], "us", free["p99_us"]))
    for title, part in (("whole state", result.snapshot), ("from 0, as llm-d", result.catch_up)):
        if part:
            found.append(Figure(f"replay, {title}", part["seconds"], "s"))
    return found


def report(result: Result) -> Iterator[str]:
    """Yield the lines of a report."""
    if result.forms:
        rows = [
            {
                "form": one["form"],
                "events/s": f"{one['events_per_second']:,}",
                "bytes/block": f"{one['bytes_per_block']:g}",
            }
            for one in result.forms
        ]
        yield from table(rows, right=("events/s", "bytes/block"))
    if result.published:
        yield ""
        rows = [
            {
                "published of one core": f"batches of {one['blocks_per_batch']} blocks",
                "blocks/s": f"{one['blocks_per_second']:,.0f}",
                "bare PUB": f"{one['bare']:,.0f}",
            }
            for one in result.published
        ]
        yield from table(rows, right=("blocks/s", "bare PUB"))
    if latency := result.latency:
        yield ""
        yield (
            f"to a subscriber, {latency['batches_per_second']:,} batches/s of {latency['blocks_per_batch']}"
            f" blocks ({latency['bytes_per_batch']:,} B)"
        )
        shown = {"from publishing": "publish", "bare PUB/SUB": "bare", "from a commit": "commit"}
        yield from table([{"": name, **_times(latency[key])} for name, key in shown.items()], right=_RIGHT)
        yield f"publishing / bare: {latency['ratio_p50']:g} (p50), {latency['ratio_p99']:g} (p99)"
        yield f"commits reached {latency['commits_per_second']:,}/s"
    if stall := result.stall:
        yield ""
        shown = {"store": "store", "store, one hangs": "store_beside_a_stalled_subscriber"}
        yield from table([{"": name, **_times(stall[key])} for name, key in shown.items()], right=_RIGHT)
        yield f"a stalled subscriber costs a store {stall['ratio_p99']:g} times its p99"
    for title, part in (("whole state", result.snapshot), ("from 0, as llm-d", result.catch_up)):
        if part:
            yield ""
            yield from _replay_lines(title, part)


def _times(delay: dict[str, Any]) -> dict[str, str]:
    return {
        "p50": f"{delay['p50_us']:,.0f} us",
        "p99": f"{delay['p99_us']:,.0f} us",
        "count": f"{delay['count']:,}",
    }


def _replay_lines(title: str, part: dict[str, Any]) -> Iterator[str]:
    past = f" after {part['past_batches']:,} batches" if part.get("past_batches") else ""
    yield (
        f"replay, {title}: {part['replayed_blocks']:,} of {part['resident_blocks']:,} blocks{past}"
        f" in {part['seconds']:g} s, {part['replayed_batches']:,} batches,"
        f" {part['replayed_bytes'] / 1e6:,.0f} MB, {part['missing_numbers']} numbers missing"
    )
    yield f"peak RSS {part['peak_bytes_before'] / 1e6:,.0f} -> {part['peak_bytes_after'] / 1e6:,.0f} MB"
    if part["live"] is not None:
        rows = [
            {"": "live batches", **_times(part["live"])},
            {"": "meanwhile", **_times(part["live_meanwhile"])},
        ]
        yield from table(rows, right=_RIGHT)

"""``kvtierd bench all``: every bench in one run, held against the goals of the project.

A goal is met or missed on this machine, at this moment; ratios say more than times.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtierd.cli import bench_clients, bench_footprint, bench_pool, bench_rpc, bench_scale
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.common import table
from kvtierd.testing.local_daemon import short_folder

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how much is measured; ``blocks`` are the sizes of the index.

    Of files it has to be much: 64 MiB are read from the page cache in 10 ms, and a scheduler was seen to take
    40 until it had two readers on two processors.
    """

    seconds: float
    blocks: tuple[int, int]
    file_bytes: int
    rounds: int


FULL = Effort(8.0, (10_240, 1_024_000), 1 << 30, 5)
SHORT = Effort(2.0, (10_240, 102_400), 256 * MIB, 3)


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted, and what came; ``met`` is ``None`` where nothing was measured."""

    what: str
    goal: str
    measured: str
    met: bool | None


class Found:
    """The figures of one run by name, and the goals they were held against."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.goals: list[Goal] = []

    def add(self, figures: Iterable[Figure]) -> None:
        """Take in what a bench found."""
        for figure in figures:
            self.figures[figure.name] = figure

    def most(self, what: str, limit: float, value: float, unit: str) -> None:
        """Hold a value against what it may be at most."""
        self.goals.append(
            Goal(what, f"at most {_number(limit)}{unit}", f"{_number(value)}{unit}", value <= limit)
        )

    def least(self, what: str, limit: float, value: float, unit: str) -> None:
        """Hold a value against what it has to be at least."""
        self.goals.append(
            Goal(what, f"at least {_number(limit)}{unit}", f"{_number(value)}{unit}", value >= limit)
        )

    def open(self, what: str, goal: str, reason: str) -> None:
        """Say what was not measured, and why."""
        self.goals.append(Goal(what, goal, reason, None))

    def ratio(self, name: str) -> float:
        """Return a figure in units of the bare one."""
        return self.figures[name].ratio or 0.0

    def value(self, name: str) -> float:
        """Return a figure."""
        return self.figures[name].value


def measure(effort: Effort, parts: Sequence[str], folder: Path) -> Found:
    """Run the parts one after the other; files are written below ``folder``."""
    found = Found()
    for part in parts:
        PARTS[part](found, effort, folder)
    return found


def _rpc(found: Found, effort: Effort, _: Path) -> None:
    counts = (16, 128, 1024)
    found.add(bench_rpc.measure(socket_path=None, counts=counts, seconds=2 * effort.seconds))
    for count, limit in ((16, 1.5), (128, 2.0)):
        name = f"lookup of {count} resident keys, p50"
        found.most(f"lookup of {count} keys / bare echo, p50", limit, found.ratio(name), "x")
    rate = max(found.value(f"keys looked up, {count} a message") for count in counts)
    found.least("keys looked up, batched, one core", 1_500_000, rate, "/s")


def _scale(found: Found, effort: Effort, _: Path) -> None:
    found.add(bench_scale.measure(effort.blocks))
    few, many = (f"{size:,} blocks" for size in effort.blocks)
    added = 1024 * (found.value(f"{many}: lookup, a key") - found.value(f"{few}: lookup, a key"))
    if trip := found.figures.get("lookup of 1024 resident keys, p50"):
        found.most(f"round trip of 1,024 keys at {many}, p50", 1000, trip.value + added, " us")
    found.most(f"memory a block at {many}, no token ids", 450, found.value(f"{many}: memory"), " B")
    found.most("memory a token", 5, found.value(f"{few}: memory of a token"), " B")
    for what in ("lookup, a key", "store with eviction, a block"):
        found.most(f"{what}: {many} / {few}", 1.3, found.ratio(f"{many}: {what}"), "x")
    pause = found.value(f"{many}: longest collection")
    found.most(f"longest garbage collection at {many}", 2000, pause, " us")


def _pool(found: Found, effort: Effort, _: Path) -> None:
    found.add(bench_pool.measure(block_bytes=2 * MIB, seconds=effort.seconds))
    for verb in ("store", "load"):
        found.least(f"{verb} of 16 blocks of 2 MiB / memcpy", 0.9, found.ratio(f"{verb} of 16 blocks"), "x")
        found.most(f"{verb}, control a block", 3, found.value(f"{verb}, control per block"), " us")


def _fs(found: Found, effort: Effort, folder: Path) -> None:
    from kvtierd.cli import bench_tiers, bench_tiers_report

    sizes = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
    settings = bench_tiers.Settings(sizes, effort.file_bytes, effort.rounds, cold=True)
    figures = bench_tiers_report.figures(bench_tiers.measure_folder(folder, settings))
    found.add(figures)
    verbs = ("store", "load, cached", "load, cold")
    _hold_tier(found, "fs tier, 256 KiB to 16 MiB", "plain files", verbs, figures)


def _object(found: Found, effort: Effort, _: Path) -> None:
    from kvtierd.cli import bench_tiers, bench_tiers_report
    from kvtierd.config.schema import ObjectTier
    from kvtierd.testing import object_server

    weed = object_server.find_weed(Path(".venvs/seaweedfs/bin"))
    if weed is None or importlib.util.find_spec("obstore") is None:
        what = "weed on PATH" if weed is None else "extra 'object'"
        found.open("object tier / raw client", "at least 0.9x", f"no {what}; or bench tiers --url")
        return
    with short_folder("bench") as folder, object_server.ObjectServer(weed, folder) as server:
        server.make_bucket("bench")
        keys = folder / "credentials"
        keys.write_text(
            f"[default]\naws_access_key_id = {object_server.ACCESS_KEY}\n"
            f"aws_secret_access_key = {object_server.SECRET_KEY}\n"
        )
        given: dict[str, Any] = {
            "name": "bench",
            "type": "object",
            "url": "s3://bench/at",
            "region": object_server.REGION,
        }
        given |= {"endpoint": server.endpoint, "credentials": {"file": str(keys)}}
        settings = bench_tiers.Settings((MIB, 4 * MIB), effort.file_bytes // 2, effort.rounds, cold=False)
        measured = bench_tiers.measure_store(ObjectTier.model_validate(given), settings)
    figures = bench_tiers_report.figures(measured)
    found.add(figures)
    _hold_tier(found, "object tier, 1 and 4 MiB", "raw client", ("store", "load"), figures)


def _hold_tier(found: Found, what: str, bare: str, verbs: Sequence[str], figures: Sequence[Figure]) -> None:
    for verb in verbs:
        worst = min(figure.ratio or 0.0 for figure in figures if figure.name.endswith(f": {verb}"))
        found.least(f"{what}: {verb} / {bare}, worst", 0.9, worst, "x")


def _events(found: Found, effort: Effort, _: Path) -> None:
    from kvtierd.cli import bench_events
    from kvtierd.cli.bench_events_report import figures

    settings = bench_events.Settings(1000, effort.seconds, 0, 0)
    found.add(figures(bench_events.measure(settings, ("published", "latency"))))
    for share, limit in (("p50", 500), ("p99", 2000)):
        value = found.value(f"commit to a subscriber, {share}")
        found.most(f"commit to a subscriber, 1,000 x 16 blocks/s, {share}", limit, value, " us")
    rate = max(
        figure.value for name, figure in found.figures.items() if name.startswith("published of one core")
    )
    found.least("blocks published on one core", 300_000, rate, "/s")


def _busy(found: Found, effort: Effort, _: Path) -> None:
    from kvtierd.cli import bench_busy

    found.add(bench_busy.measure(load=bench_busy.Load(64 << 10, 100), seconds=2 * effort.seconds))
    for verb in ("lookup", "load", "store"):
        found.most(f"{verb}, p99 busy / idle", 3, found.ratio(f"{verb}, p99 beside idle"), "x")


def _clients(found: Found, effort: Effort, _: Path) -> None:
    found.add(bench_clients.measure(counts=(1, 16, 64), seconds=effort.seconds))


def _footprint(found: Found, effort: Effort, _: Path) -> None:
    found.add(bench_footprint.measure(seconds=effort.seconds))
    found.most("start to a listening socket", 0.6, found.value("start to a listening socket"), " s")
    found.most("idle RSS beside the pool", 100, found.value("idle, memory beside the pool"), " MB")
    found.most("idle processor, of a core", 0.5, found.value("idle, of a core"), " %")


PARTS: Mapping[str, Callable[[Found, Effort, Path], None]] = {
    "rpc": _rpc,
    "scale": _scale,
    "pool": _pool,
    "fs": _fs,
    "object": _object,
    "events": _events,
    "busy": _busy,
    "clients": _clients,
    "footprint": _footprint,
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def report(found: Found) -> Iterator[str]:
    """Yield the goals as a table."""
    words = {True: "met", False: "MISSED", None: "-"}
    rows = [
        {"what": one.what, "goal": one.goal, "measured": one.measured, "": words[one.met]}
        for one in found.goals
    ]
    yield from table(rows, right=("goal", "measured"))


def details(found: Found) -> list[dict[str, Any]]:
    """Return the goals as plain values."""
    return [asdict(goal) for goal in found.goals]

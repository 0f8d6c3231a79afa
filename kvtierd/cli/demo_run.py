"""What ``kvtierd demo`` does: paces a workload, keeps count, and judges the end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtierd.cli.demo_view import Frame, Gauge, Ink, LiveView, PlainView, Rate, SilentView, human_bytes
from kvtierd.client import Client
from kvtierd.core.effects import InventoryEntry
from kvtierd.core.model import Group, Layout, hash_of
from kvtierd.errors import ExitCode, Unavailable
from kvtierd.testing.consumer import ReferenceConsumer, residencies
from kvtierd.testing.fake_engine import FakeEngine, Tally
from kvtierd.testing.local_daemon import LocalDaemon
from kvtierd.testing.workload import Workload
from kvtierd.wire.kvevents import BlockRemoved, EventBatch

POOL_BYTES = 24 << 20
DISK_BYTES = 48 << 20
BLOCK_BYTES = 64 << 10
QUIET_SECONDS = 20.0
SAMPLE_SECONDS = 0.25
COURSE = 64
LAYOUT = Layout(
    model="demo",
    dtype="uint8",
    layout="demo",
    groups=(Group(tokens_per_block=16, block_bytes=BLOCK_BYTES),),
    hash_algorithm="sha256",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One tier in the end: what a router knows beside what the daemon holds, in blocks.

    ``evicted`` is what left the tier during the run, as the router was told.
    """

    tier: str
    place: str
    router: int
    daemon: int
    only_router: int
    only_daemon: int
    evicted: int

    @property
    def equal(self) -> bool:
        """Do both name the same blocks?"""
        return not self.only_router and not self.only_daemon


class Meter:
    """Turns running totals into rates over ``SAMPLE_SECONDS``, with their recent course."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._courses = {name: deque[float](maxlen=COURSE) for name in names}
        self._totals = dict.fromkeys(names, 0.0)
        self._at = 0.0

    def sample(self, now: float, totals: dict[str, float]) -> bool:
        """Take the totals at a moment; False, and nothing happens, before a sample's time is over."""
        passed = now - self._at
        if passed < SAMPLE_SECONDS:
            return False
        for name, total in totals.items():
            self._courses[name].append((total - self._totals[name]) / passed)
        self._totals, self._at = dict(totals), now
        return True

    def course(self, name: str) -> tuple[float, ...]:
        """Return the rates so far, per second, the newest last."""
        return tuple(self._courses[name])

    def last(self, name: str) -> float:
        """Return the rate over the last second."""
        recent = self.course(name)[-round(1 / SAMPLE_SECONDS) :]
        return sum(recent) / len(recent) if recent else 0.0


class Router(ReferenceConsumer):
    """The reference consumer, and how many blocks it heard leave each medium."""

    def __init__(self) -> None:
        super().__init__()
        self.removed = Counter[str | None]()

    def fold(self, batch: EventBatch) -> None:
        """Apply one batch to the state."""
        super().fold(batch)
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                self.removed[event.medium] += len(event.block_hashes)

    @property
    def events(self) -> int:
        """Events so far."""
        return self.counts["BlockStored"] + self.counts["BlockRemoved"]


class Show:
    """One run of the demo against a daemon that is up."""

    def __init__(self, args: argparse.Namespace, daemon: LocalDaemon, client: Client) -> None:
        self._args = args
        self._session = client.attach(LAYOUT, engine_id="demo")
        if not self._session.connected:
            raise Unavailable(f"the daemon did not take the attach; its log ends:\n{daemon.log_tail()}")
        self._router = Router()
        self._router.connect(daemon.endpoint, daemon.replay)
        self._engine = FakeEngine(self._session)
        self._meter = Meter(("load", "store", "events"))
        self._start = time.monotonic()
        self._client = client
        self._tiers = client.status()["tiers"]

    def close(self) -> None:
        """Stop listening to the events."""
        self._router.close()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def play(self, view: LiveView | PlainView) -> None:
        """Replay all requests, each at its moment or as soon after it as the machine can."""
        total = self._args.requests
        workload = Workload(seed=self._args.seed, requests=total, pause=total * 0.0375)
        for number, request in enumerate(workload):
            self._engine.replay(request)
            self._look(view)
            while (early := (number + 1) * self._args.seconds / total - self.now) > 0:
                self._router.poll(min(early, 0.05))
                self._look(view)

    def _look(self, view: LiveView | PlainView) -> None:
        self._router.poll(0)
        tally, now = self._engine.tally, self.now
        totals = {"load": tally.verified_bytes, "store": tally.written_bytes, "events": self._router.events}
        if self._meter.sample(now, {name: float(total) for name, total in totals.items()}):
            self._tiers = self._client.status()["tiers"]
        if view.due(now):
            view.show(self.frame(), now)

    def frame(self) -> Frame:
        """Return this moment as the view draws it."""
        tally, meter = self._engine.tally, self._meter
        served = [(tier["name"], tally.hits[tier["name"]]) for tier in self._tiers]
        return Frame(
            title=f"{self._args.requests} requests of chat, {BLOCK_BYTES >> 10} KiB blocks, "
            f"seed {self._args.seed}",
            done=tally.requests,
            total=self._args.requests,
            elapsed=self.now,
            gauges=tuple(_gauge(tier) for tier in self._tiers),
            served=(*served, ("computed", tally.asked - tally.loaded)),
            rates=(
                Rate("load", f"{human_bytes(meter.last('load'))}/s", meter.course("load")),
                Rate("store", f"{human_bytes(meter.last('store'))}/s", meter.course("store")),
                Rate("events", f"{meter.last('events'):,.0f} /s", meter.course("events")),
            ),
            verified_bytes=tally.verified_bytes,
            wrong_blocks=len(tally.mismatches),
        )

    def settle(self) -> list[Difference]:
        """Wait until the stream has told everything; returns the tiers as the router and the daemon see them.

        Copies to disk may still be under way, so both sides are asked until nothing runs any more and they
        agree, for at most ``QUIET_SECONDS``.
        """
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            self._router.poll(0.1)
            inventory = list(self._session.inventory())
            differences = [self._compare(tier["name"], tier["medium"], inventory) for tier in self._tiers]
            status = self._client.status()
            self._tiers = status["tiers"]
            quiet = not status["operations"]
            if (quiet and all(tier.equal for tier in differences)) or time.monotonic() > deadline:
                return differences

    def _compare(self, name: str, medium: str, inventory: list[InventoryEntry]) -> Difference:
        told = {entry for entry in self._router.resident if entry.medium == medium}
        held = residencies(entry for entry in inventory if entry.tier == name)
        return Difference(
            tier=name,
            place=medium,
            router=len(told),
            daemon=len(held),
            only_router=len(told - held),
            only_daemon=len(held - told),
            evicted=self._router.removed[medium],
        )

    def summary(self, tiers: list[Difference], daemon_exit: int | None) -> dict[str, Any]:
        """Return the run's numbers as ``--json`` prints them."""
        tally = self._engine.tally
        faults = list(find_faults(tally, tiers))
        if daemon_exit != 0:
            faults.append(f"the daemon ended with code {daemon_exit}")
        return {
            "ok": not faults,
            "faults": faults,
            "requests": tally.requests,
            "seconds": round(self.now, 2),
            "blocks": {
                "asked": tally.asked,
                "loaded": {tier.tier: tally.hits[tier.tier] for tier in tiers},
                "computed": tally.computed,
                "stored": tally.stored,
                "not_stored": tally.not_stored,
                "missed_promises": tally.missed_promises,
                "wrong": len(tally.mismatches),
            },
            "bytes": {"verified": tally.verified_bytes, "written": tally.written_bytes},
            "stream": {"batches": self._router.counts["batches"], "events": self._router.events},
            "tiers": {tier.tier: asdict(tier) | {"equal": tier.equal} for tier in tiers},
        }


def _gauge(tier: dict[str, Any]) -> Gauge:
    label = " ".join(filter(None, (tier["medium"], tier["locality"])))
    return Gauge(tier["name"], tier["blocks"], tier["used_bytes"], tier["capacity_bytes"], label)


def find_faults(tally: Tally, tiers: list[Difference]) -> Iterator[str]:
    """Yield in words each reason why a run is no success."""
    if tally.mismatches:
        first = hash_of(tally.mismatches[0]).hex()
        yield f"{len(tally.mismatches)} loaded blocks held wrong bytes, the first is {first}"
    for tier in tiers:
        if not tier.equal:
            yield (
                f"{tier.tier}: the router knows {tier.only_router} blocks that are not there "
                f"and misses {tier.only_daemon} that are"
            )
        if not tally.hits[tier.tier]:
            yield f"{tier.tier}: served no load"
        if not tier.evicted:
            yield f"{tier.tier}: evicted nothing, so the run proves little; use more --requests"


def comparison(tiers: list[Difference], ink: Ink) -> list[str]:
    """Return the closing table, in blocks: the router's view beside the daemon's inventory."""
    lines = [f"  {'blocks':<10}  {'a router knows':>16}{'the daemon holds':>19}{'evicted':>10}"]
    for tier in tiers:
        verdict = ink("good", "equal") if tier.equal else ink("bad", "DIFFERENT")
        name = ink(tier.tier, f"{tier.tier:<10}")
        lines.append(f"  {name}  {tier.router:>16}{tier.daemon:>19}{tier.evicted:>10}  {verdict}")
    return [*lines, ""]


def conclusion(summary: dict[str, Any], ink: Ink) -> str:
    """Return the last line: what was proved, or all that failed."""
    if summary["faults"]:
        return f"{ink('bad', 'FAILED')}: {'; '.join(summary['faults'])}"
    verified = human_bytes(summary["bytes"]["verified"])
    return (
        f"{ink('good', 'OK')}: {verified} loaded, every byte right; "
        "a router knows exactly what the daemon holds"
    )


def play(args: argparse.Namespace, folder: Path) -> int:
    """Run the demo on a folder and print it; returns the exit code.

    Raises:
        Unavailable: the daemon did not start or went away.
        KeyboardInterrupt: the user's; the last picture stays.
    """
    ink = Ink.for_stream(sys.stdout)
    draws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    view: LiveView | PlainView = SilentView() if args.json else LiveView() if draws else PlainView()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon(folder, pool_bytes=POOL_BYTES, disk_bytes=DISK_BYTES))
        client = stack.enter_context(Client(daemon.socket, deadline=5.0))
        show = stack.enter_context(contextlib.closing(Show(args, daemon, client)))
        try:
            with view:
                show.play(view)
            tiers = show.settle()
        except KeyboardInterrupt:
            view.keep(show.frame())
            if not args.json:
                print("interrupted")
            raise
        client.close()
        summary = show.summary(tiers, daemon.stop())
        if args.json:
            print(json.dumps(summary))
            for fault in summary["faults"]:
                print(f"kvtierd demo: {fault}", file=sys.stderr)
        else:
            view.keep(show.frame())
            print("\n".join((*comparison(tiers, ink), conclusion(summary, ink))))
        return ExitCode.OK if summary["ok"] else ExitCode.GENERIC

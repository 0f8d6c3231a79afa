"""``kvtierd bench events``: what the event stream costs and how prompt it is, beside a bare PUB/SUB."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtierd.cli.bench_figures import add_output, show
from kvtierd.cli.demo import count

BATCH = 16
"""Blocks of a batch."""
BATCHES = (16, 256)
"""Blocks of a batch where as many as possible are published."""
PARTS = ("forms", "published", "latency", "stall", "snapshot", "catch-up")
JOIN = 0.3
"""Seconds for a subscription to arrive; nothing says when it has."""
ROUNDS = 4
MARGIN = 4096
"""Numbers left for filling, before they begin anew."""
POOL_BLOCKS = 1 << 13
BLOCK_BYTES = 4096


def add_events(benches: Any) -> None:
    """Add the command's arguments."""
    events = benches.add_parser(
        "events",
        help="cost and promptness of the event stream beside a bare PUB/SUB",
        description="Measure: bytes and events a second of each form; how many blocks a second of one core"
        " are published; the time from publishing to a"
        " subscriber, in turns with a bare PUB/SUB of the same bytes, and from an engine's commit to it; what"
        " a subscriber that hangs costs a store; a replay of the whole state while batches go on; and the"
        " same for a reader that asks for all numbers from 0 (llm-d). All on temporary folders and loopback.",
    )
    events.add_argument(
        "--part", action="append", choices=PARTS, help="measure this only (repeat for more; default: all)"
    )
    events.add_argument("--rate", type=count, default=1000, help="batches a second (default: 1000)")
    events.add_argument("--seconds", type=float, default=4.0, help="of each timed part (default: 4)")
    events.add_argument(
        "--blocks", type=count, default=1_000_000, help="resident for the replays (default: 1000000)"
    )
    events.add_argument(
        "--past", type=count, default=10_000_000, help="batches before the catch-up (default: 10000000)"
    )
    add_output(events)
    events.set_defaults(run_bench=run)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the arguments say."""

    rate: int
    seconds: float
    blocks: int
    past: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Times in microseconds."""

    p50_us: float
    p99_us: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Delay:
        """Summarise times in seconds."""
        times = sorted(seconds)
        if not times:
            raise RuntimeError("nothing was measured: no batch arrived")
        at = [times[min(len(times) - 1, int(len(times) * share))] for share in (0.5, 0.99)]
        return cls(round(at[0] * 1e6, 1), round(at[1] * 1e6, 1), len(times))


@dataclass(slots=True)
class Result:
    """What was measured, by part; parts left out are empty."""

    forms: list[dict[str, Any]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] = field(default_factory=dict)
    stall: dict[str, Any] = field(default_factory=dict)
    snapshot: dict[str, Any] = field(default_factory=dict)
    catch_up: dict[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from kvtierd.cli.bench_events_report import figures, report
    from kvtierd.errors import ExitCode

    settings = Settings(args.rate, args.seconds, args.blocks, args.past)
    result = measure(settings, args.part or PARTS)
    show(args, "events", figures(result), report=report(result), details=asdict(result))
    return ExitCode.OK


def measure(settings: Settings, parts: Sequence[str]) -> Result:
    """Measure the parts, one after the other."""
    result = Result()
    if "forms" in parts:
        result.forms = list(_forms(min(1.0, settings.seconds / 4)))
    if "published" in parts:
        result.published = [_published(blocks, settings.seconds / 2) for blocks in BATCHES]
    if "latency" in parts:
        result.latency = _latency(settings)
    if "stall" in parts:
        result.stall = _stall(settings)
    if "snapshot" in parts:
        result.snapshot = _snapshot(settings)
    if "catch-up" in parts:
        result.catch_up = _catch_up(settings)
    return result


# -- the parts


def _forms(seconds: float) -> Iterator[dict[str, Any]]:
    """Time what one audience adds to a turn: projection, numbering, encoding, the ring."""
    from kvtierd.testing.events_bench import stored
    from kvtierd.wire.kvevents import Form
    from kvtierd.wire.projection import Projection, View
    from kvtierd.wire.stream import Limits, StreamLog

    views = [
        (
            f"{form.value}{'' if tokens else ', no tokens'}{', chains packed' if not one else ''}",
            form,
            tokens,
            one,
        )
        for form, tokens, one in (
            (Form.MAP, True, True),
            (Form.MAP, False, True),
            (Form.MAP, True, False),
            (Form.ARRAY, True, True),
            (Form.ARRAY, False, True),
        )
    ]
    for name, form, tokens, one_block in views:
        view = View(form=form, tokens=tokens, one_block=one_block)
        projection, log = Projection(view), StreamLog(Limits(10_000, 64 << 20), view)
        spent = size = blocks = number = 0.0
        while spent < seconds:
            made = [stored(int(blocks) + index) for index in range(BATCH)]
            began = time.perf_counter()
            payload = log.append(int(number), time.time(), 0, projection.apply(made))
            spent += time.perf_counter() - began
            size, blocks, number = size + len(payload), blocks + BATCH, number + 1
        yield {
            "form": name,
            "events_per_second": round(blocks / spent),
            "bytes_per_block": round(size / blocks, 1),
        }


def _published(blocks: int, seconds: float) -> dict[str, Any]:
    from kvtierd.cli.bench_published import measure as published

    return {"blocks_per_batch": blocks, **published(blocks, seconds)}


def _latency(settings: Settings) -> dict[str, Any]:
    """From the turn's events to the subscriber's process, in turns with a bare socket; then from a commit."""
    from kvtierd.testing.events_bench import subscriber

    ours: list[float] = []
    bare: list[float] = []
    seconds = settings.seconds / ROUNDS
    command = {"rate": settings.rate, "seconds": seconds}
    with _publisher() as (child, made), subscriber(made["bind"], made["bare"]) as reader:
        time.sleep(JOIN)
        child.ask(do="hub", blocks=BATCH, rate=100, seconds=0.1)
        size = _taken(reader)["sizes"][0]
        for _ in range(ROUNDS):
            ours += _delays(child, reader, do="hub", blocks=BATCH, **command)
            bare += _delays(child, reader, do="bare", bytes=size, **command)
    daemon, achieved = _from_commits(settings)
    publish, plain = Delay.of(ours), Delay.of(bare)
    return {
        "batches_per_second": settings.rate,
        "blocks_per_batch": BATCH,
        "bytes_per_batch": size,
        "publish": asdict(publish),
        "bare": asdict(plain),
        "ratio_p50": round(publish.p50_us / plain.p50_us, 2),
        "ratio_p99": round(publish.p99_us / plain.p99_us, 2),
        "commit": asdict(daemon),
        "commits_per_second": round(achieved),
    }


def _stall(settings: Settings) -> dict[str, Any]:
    """Time stores with a subscriber that reads, in turns with one more that hangs."""
    from kvtierd.testing.events_bench import subscriber

    free: list[float] = []
    stalled: list[float] = []
    seconds = settings.seconds / ROUNDS
    with _daemon() as daemon, _stores(daemon) as store, subscriber(daemon.endpoint):
        store.run(0.2)
        for _ in range(ROUNDS):
            free += store.run(seconds).stores
            with subscriber(daemon.endpoint) as hanging:
                time.sleep(JOIN)
                hanging.stop_reading()
                stalled += store.run(seconds).stores
    with_all, with_stalled = Delay.of(free), Delay.of(stalled)
    return {
        "store": asdict(with_all),
        "store_beside_a_stalled_subscriber": asdict(with_stalled),
        "ratio_p99": round(with_stalled.p99_us / with_all.p99_us, 2),
    }


def _snapshot(settings: Settings) -> dict[str, Any]:
    """Replay the whole state to one reader while batches go on to another."""
    return _replayed(settings, blocks=settings.blocks)


def _catch_up(settings: Settings) -> dict[str, Any]:
    """Let a reader as llm-d is ask for every number from 0 after a long past.

    That is at its worst just before the numbers begin anew, which they do however long the past was.
    """
    from kvtierd.config.audiences import PRESETS

    latest = int(PRESETS["llm-d"]["renumber_after"]) - MARGIN
    first = min(settings.past, latest)
    found = _replayed(settings, blocks=settings.blocks, first=first, audience={"preset": "llm-d"})
    return {"past_batches": settings.past, **found}


def _replayed(settings: Settings, **publisher: Any) -> dict[str, Any]:
    from kvtierd.testing.events_bench import Child, subscriber

    command = {"do": "hub", "blocks": 1, "rate": settings.rate}
    coalesces = "audience" in publisher
    with _publisher(**publisher) as (child, made), subscriber(made["bind"]) as live:
        time.sleep(JOIN)
        quiet = None if coalesces else _delays(child, live, seconds=settings.seconds / 2, **command)
        start = child.ask(do="statistics")
        with Child("replay", endpoint=made["replay"]) as reader:
            during = None if coalesces else _delays(child, live, seconds=settings.seconds / 2, **command)
            got = reader.hear()
        after = child.ask(do="statistics")
    return {
        "resident_blocks": start["announced"],
        "fill_seconds": round(made["fill_seconds"], 4),
        "seconds": round(got["seconds"], 4),
        "replayed_blocks": got["blocks"],
        "replayed_batches": got["batches"],
        "replayed_bytes": got["bytes"],
        "first_number": got["first"],
        "missing_numbers": got["holes"],
        "renumbered": after["renumbered"],
        "peak_bytes_before": start["peak_bytes"],
        "peak_bytes_after": after["peak_bytes"],
        "live": None if quiet is None else asdict(Delay.of(quiet)),
        "live_meanwhile": None if during is None else asdict(Delay.of(during)),
    }


# -- what they are made of


@contextlib.contextmanager
def _publisher(**settings: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    from kvtierd.testing.events_bench import Child

    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as folder,
        Child("publish", folder=folder, **settings) as child,
    ):
        yield child, child.hear()


def _delays(child: Any, reader: Any, **command: Any) -> list[float]:
    """Return how long each batch took from the call to a subscriber of both sockets."""
    sent = child.ask(**command)["sent"]
    arrived: list[float] = next((times for times in _taken(reader)["arrived"] if times), [])
    if len(arrived) != len(sent):
        raise RuntimeError(f"{len(sent)} batches were sent and {len(arrived)} arrived: try a lower --rate")
    return [at - began for began, at in zip(sent, arrived, strict=True)]


def _taken(reader: Any) -> dict[str, Any]:
    """Return what a subscriber has noted, once it has everything."""
    time.sleep(JOIN)
    found: dict[str, Any] = reader.ask(take=True)
    return found


@contextlib.contextmanager
def _daemon() -> Iterator[Any]:
    from kvtierd.testing.local_daemon import LocalDaemon, short_folder

    tiers = {"tiers": [{"name": "cpu", "type": "cpu", "policy": "lru"}]}
    with (
        short_folder("bench") as folder,
        LocalDaemon(folder, pool_bytes=POOL_BLOCKS * BLOCK_BYTES, disk_bytes=0, changes=tiers) as running,
    ):
        yield running


@dataclass(slots=True)
class Stores:
    """Times of one run: when each commit began (by the first block's event hash), and whole stores."""

    commits: dict[int, float] = field(default_factory=dict)
    stores: list[float] = field(default_factory=list)


class Storing:
    """An engine that stores a batch of blocks at a time, without a byte of payload."""

    def __init__(self, session: Any) -> None:
        from kvtierd.testing.events_bench import stored

        self._session = session
        self._made: Callable[[int], Any] = stored
        self._next = 0

    def run(self, seconds: float, rate: float | None = None) -> Stores:
        """Store for a while, at ``rate`` batches a second or as fast as it goes."""
        done, start = Stores(), time.monotonic()
        index = 0
        while (now := time.monotonic()) < start + seconds:
            due = start + index / rate if rate else now
            if due > now:
                time.sleep(due - now)
            blocks = [self._made(number).block for number in range(self._next, self._next + BATCH)]
            self._next, index = self._next + BATCH, index + 1
            began = time.monotonic()
            job = self._session.prepare_store(
                [block.key for block in blocks], meta=[block.meta for block in blocks]
            )
            done.commits[blocks[0].hashes[0]] = time.monotonic()
            job.commit()
            done.stores.append(time.monotonic() - began)
        return done


@contextlib.contextmanager
def _stores(daemon: Any) -> Iterator[Storing]:
    from kvtierd.client import Client, Group, Layout
    from kvtierd.testing.events_bench import TOKENS

    groups = (Group(tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES),)
    layout = Layout(model="kvtierd-bench", dtype="uint8", layout="none", groups=groups)
    with Client(daemon.socket, deadline=5.0) as client:
        yield Storing(client.attach(layout, engine_id="bench"))


def _from_commits(settings: Settings) -> tuple[Delay, float]:
    """Return the time from an engine's commit to a subscriber, and how many a second there were."""
    from kvtierd.testing.events_bench import subscriber

    with (
        _daemon() as daemon,
        _stores(daemon) as store,
        subscriber(daemon.endpoint, decode=True) as reader,
    ):
        time.sleep(JOIN)
        done = store.run(settings.seconds, settings.rate)
        (told,) = _taken(reader)["told"]
    delays = [at - done.commits[first] for at, first in told if first in done.commits]
    return Delay.of(delays), len(done.commits) / settings.seconds

"""The event stream as a subscriber gets it: promptness, wire forms, labels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvtierd.client import BlockKey, BlockMeta, Session
from kvtierd.core.model import block_key, event_hash, hash_of
from kvtierd.testing.daemon_rig import FILE, DaemonRig, Router, fs_tier, keys_of, load, loose, store
from kvtierd.testing.workload import WorkBlock

Make = Callable[..., DaemonRig]


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """vLLM 0.33's struct: these keys and no others."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


Batch = tuple[float, list[BlockStored | BlockRemoved], int]


class RawRouter(Router):
    """Keeps each payload as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: list[bytes] = []

    def feed(self, number: int, payload: bytes) -> int | None:
        self.payloads.append(payload)
        return super().feed(number, payload)


def heard(router: Router, medium: str, block: WorkBlock, kind: str = "BlockStored") -> bool:
    return any(told[:2] == (kind, medium) for told in router.told(block))


def silent(make: Make, **options: object) -> tuple[DaemonRig, Session]:
    """A daemon that sends nothing by itself, with a router that hears it."""
    rig = make(heartbeat="1h", **options)
    rig.daemon.start()
    session = rig.attach()
    rig.router.connect(rig.daemon.endpoint, rig.daemon.replay)
    rig.router.following = True
    knocks = iter(loose(500, "knock"))
    while not rig.router.counts["batches"]:
        store(session, [next(knocks)])
        rig.router.poll(0.02)
    rig.settle()
    return rig, session


def test_one_store_then_silence_is_told_within_100_ms(make: Make) -> None:
    """L26."""
    rig, session = silent(make)
    (block,) = loose(1)
    store(session, [block])
    rig.router.wait_for(lambda r: heard(r, "CPU", block), 0.1)
    rig.router.wait_for(lambda r: heard(r, "STORAGE", block), 0.1)


def test_an_eviction_in_the_background_is_told_within_100_ms(make: Make) -> None:
    """L26: the disk makes room for a write after the store was answered; no request follows it."""
    rig, session = silent(make, disk_bytes=4 * FILE)
    made = loose(4)
    for block in made:
        store(session, [block])
    rig.settle()
    store(session, loose(1, "last"))
    rig.router.wait_for(lambda r: any(heard(r, "STORAGE", b, "BlockRemoved") for b in made), 0.1)


def test_an_event_leaves_with_its_turn(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The issue: from the request that makes a block visible to the subscriber that knows it.

    Measured: the commit's round trip, and the whole way until the event is decoded here. A stream that
    waited for a tick, a heartbeat or the next request would take tens of milliseconds.
    """
    rig, session = silent(make, tiers=[], slots=1024, paranoid=False)
    trips, ways = [], []
    for block in loose(300):
        job = session.prepare_store([block.key], meta=[block.meta])
        start = time.perf_counter()
        job.commit()
        answered = time.perf_counter()
        before = len(rig.router.batches)
        rig.router.wait_for(lambda r, n=before: len(r.batches) > n, 1.0)  # type: ignore[misc]
        trips.append((answered - start) * 1e3)
        ways.append((time.perf_counter() - start) * 1e3)
    cuts = {"answer": statistics.quantiles(trips, n=100), "event": statistics.quantiles(ways, n=100)}
    with capsys.disabled():
        for name, cut in cuts.items():
            print(f"\ncommit -> {name}: p50 {cut[49]:.3f} ms, p99 {cut[98]:.3f} ms", end="")
    assert cuts["event"][49] < 5.0


def test_hashes_come_out_as_they_went_in(make: Make) -> None:
    """L32, L33, L34: same type and value, above 2^63 too; keys lie on the disk as they came."""
    rig = make()
    rig.router = raw = RawRouter()
    rig.start()
    session = rig.attach()
    forms: list[Callable[[BlockKey], int | bytes]] = [
        lambda key: (1 << 63) + event_hash(key) // 2 + 1,
        hash_of,
    ]
    made = [
        WorkBlock(b.key, BlockMeta(hashes=(forms[n % 2](b.key),), token_ids=(1, 2, 3, 4), block_size=4))
        for n, b in enumerate(loose(8))
    ]
    store(session, made)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    rig.settle()
    batches = [msgspec.msgpack.decode(payload, type=Batch) for payload in raw.payloads]
    sent = [event.block_hashes for _, events, _ in batches for event in events]
    stored = [list(block.meta.hashes) for block in made]
    assert sorted(sent, key=repr) == sorted(
        stored * 3, key=repr
    )  # into the pool and onto the disk, out again
    assert sorted(rig.copies()) == sorted(keys_of(made))
    assert load(session, made) == ["disk"] * 8


def test_keys_of_every_length_get_a_file_each_and_come_back(rig: DaemonRig) -> None:
    """L34: 1 to 64 bytes, and keys that differ in group, length or leading zeros only."""
    session = rig.attach()
    keys = [block_key(bytes([0] * n + [7])) for n in range(0, 64, 7)] + [
        block_key(b"\xff" * 64),
        block_key(b"/"),
    ]
    for number, key in enumerate(keys):
        assert session.put(key, bytes([number]) * 4096)
    rig.settle()
    session.evict(keys, ["cpu"])
    assert [session.get(key) for key in keys] == [bytes([number]) * 4096 for number in range(len(keys))]


LABELS = [("LOCAL", "REMOTE"), ("REMOTE", None), (None, "LOCAL")]


@pytest.mark.parametrize(("fs", "lake"), LABELS)
def test_locality_is_what_the_tier_file_says(make: Make, fs: str | None, lake: str | None) -> None:
    """L35: FS and object tiers publish STORAGE; locality is never inferred; removals carry the same."""
    rig = make()
    rig.router = raw = RawRouter()
    below = [fs_tier(rig.folder, "disk"), {"name": "lake", "type": "object", "url": "memory://lake"}]
    for tier, locality in zip(below, (fs, lake), strict=True):
        if locality is not None:
            tier["locality"] = locality
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], *below]))
    rig.start()
    session = rig.attach()
    media = [("CPU", None), ("STORAGE", fs), ("STORAGE", lake)]
    expected = [
        {"type": kind, "medium": medium} | ({"locality": locality} if locality else {})
        for kind in ("BlockStored", "BlockRemoved")
        for medium, locality in media
    ]
    for block, rich in zip(loose(2), (True, False), strict=True):
        raw.payloads.clear()
        store(session, [block], rich=rich)
        rig.settle()
        session.evict([block.key])
        rig.settle()
        events = [event for payload in raw.payloads for event in msgspec.msgpack.decode(payload)[1]]
        labels = [{k: e[k] for k in ("type", "medium", "locality") if k in e} for e in events]
        assert labels[0] == expected[0]
        assert sorted(labels[1:3], key=str) == sorted(expected[1:3], key=str)  # each tier at its own pace
        assert labels[3:] == expected[3:]
        filled = {(len(e["token_ids"]), e["block_size"]) for e in events if e["type"] == "BlockStored"}
        assert filled == ({(4, 4)} if rich else {(0, 0)})


def test_two_tiers_of_one_label_are_one_residency_to_a_router(make: Make) -> None:
    """Contract 8: stored when the first copy comes, removed when the last one goes."""
    rig = make()
    below = [fs_tier(rig.folder, name, locality="LOCAL") for name in ("disk", "ssd")]
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], *below]))
    rig.start()
    session = rig.attach()
    (block,) = loose(1)
    store(session, [block])
    rig.settle()
    for tier in ("disk", "ssd"):
        told = [what for what in rig.router.told(block) if what[1] == "STORAGE"]
        assert told == [("BlockStored", "STORAGE", "LOCAL")]
        session.evict([block.key], [tier])
        rig.settle()
    told = [what for what in rig.router.told(block) if what[1] == "STORAGE"]
    assert told == [("BlockStored", "STORAGE", "LOCAL"), ("BlockRemoved", "STORAGE", "LOCAL")]


def test_a_router_that_joins_late_knows_the_same(make: Make) -> None:
    """Contract, L22 in small: more batches than the ring holds, evictions among them."""
    rig = make(slots=16, disk_bytes=24 * FILE)
    rig.edit(lambda body: body["events"].update(ring_batches=8))
    rig.start()
    session = rig.attach()
    for block in loose(60):
        store(session, [block])
    rig.settle()
    with Router() as late:
        rig.follow(late)
        rig.agree(late)
        assert late.counts["replays"] == 1
        store(session, loose(5, "more"))
        rig.agree(late)
        assert late.counts["replays"] == 1

"""The filesystem tier's root at a real daemon: its bounds, its order, and its faults."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import KeyState, Layout
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import (
    BIG,
    BIG_BLOCK,
    LAYOUT,
    DaemonRig,
    keys_of,
    layout_of,
    load,
    loose,
    store,
)
from kvtierd.testing.workload import WorkBlock
from kvtierd.wire.kvevents import BlockRemoved, BlockStored

Make = Callable[..., DaemonRig]
Mounted = Callable[..., Any]
MIB = 1 << 20
LRU = {"policy": "lru"}


def occupied(root: Path) -> int:
    """Return what a folder takes of its filesystem, in bytes."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:  # a temporary, renamed by now
                continue
    return total


def limit(rig: DaemonRig, nbytes: int, **more: object) -> None:
    """Set the disk's ``max_bytes`` and other options for the next start."""
    rig.edit(lambda body: body["tiers"][1].update(max_bytes=f"{nbytes >> 10}KiB", **more))


def on_disk(rig: DaemonRig, blocks: list[WorkBlock]) -> list[WorkBlock]:
    """Return those of the blocks that a lookup finds on the disk, once they left the pool."""
    with rig.client.attach(rig.layout, engine_id="asker") as session:
        session.evict(keys_of(blocks), ["cpu"])
        states = session.lookup(keys_of(blocks)).states
    return [block for block, state in zip(blocks, states, strict=True) if state is KeyState.COLD]


class Watch:
    """Measures a folder again and again in a thread; ``most`` is the most that was seen."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = self.looks = 0

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, occupied(self._root))
            self.looks += 1

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


# -- bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [BIG, layout_of("mid", 64 << 10)], ids=["files", "packed"])
def test_four_times_the_limit_never_takes_more_than_the_limit(make: Make, layout: Layout) -> None:
    """L66: 256 MiB into 64 MiB, by all that the root occupies; oldest first, a removal for each victim."""
    size = layout.groups[0].block_bytes
    rig = make(layout=layout, slots=32 * MIB // size, paranoid=False)
    limit(rig, 64 * MIB, **LRU)
    rig.start()
    session = rig.attach()
    made = loose(256 * MIB // size)
    step = 8 * MIB // size
    with Watch(rig.folder / "disk") as watch:
        for start in range(0, len(made), step):
            assert len(store(session, made[start : start + step])) == step
            rig.settle()
            some = made[start : start + 4]
            session.evict(keys_of(some), ["cpu"])
            assert load(session, some) == ["disk"] * 4
    assert watch.looks > 10
    assert 48 * MIB < watch.most <= 64 * MIB
    disk = [event for event in rig.router.events if event.medium == "STORAGE"]
    told = {
        kind: [e.block_hashes[0] for e in disk if isinstance(e, kind)] for kind in (BlockStored, BlockRemoved)
    }
    assert told[BlockStored] == [block.meta.hashes[0] for block in made]
    left = rig.tier("disk")["blocks"]
    assert len(told[BlockRemoved]) == len(made) - left == rig.counter("disk", "evictions")
    session.reset(["cpu"])
    assert on_disk(rig, made[-left + step :]) == made[-left + step :], "what was stored last"


@pytest.mark.parametrize("layout", [BIG, LAYOUT], ids=["files", "packed"])
def test_index_stream_and_folder_agree_at_each_step(make: Make, layout: Layout) -> None:
    """L77: the disk evicts, then the pool does, then both; nobody counts on a copy that is not there."""
    size = 4096 + layout.groups[0].block_bytes
    rig = make(layout=layout, slots=6)
    limit(rig, 10 * size)
    rig.start()
    session = rig.attach()
    made, rng = loose(24), random.Random(1)
    for number in range(40):
        block = made[number] if number < len(made) else rng.choice(made)
        match number % 4:
            case 1:
                session.evict([block.key], ["disk"])
            case 2:
                load(session, [block])
            case _:
                store(session, [block])
        used = rig.settle()["tiers"][1]["used_bytes"]
        listed = {entry.key for entry in session.inventory("disk")}
        assert set(rig.copies()) == listed
        assert used == len(listed) * size <= 10 * size
        rig.agree()


def test_a_lower_limit_after_a_restart_is_reached_in_the_background(make: Make) -> None:
    """L67: ready as soon as ever; the oldest go, with removals; stores are admitted within the limit."""
    rig = make(slots=1024, paranoid=False)
    limit(rig, 32 * MIB, **LRU)
    rig.start()
    session = rig.attach()
    made = loose(3000)
    for start in range(0, 3000, 500):
        assert len(store(session, made[start : start + 500])) == 500
        rig.settle()
    assert rig.tier("disk")["blocks"] == 3000
    assert rig.daemon.stop() == 0
    limit(rig, 16 * MIB, **LRU)
    began = time.monotonic()
    rig.daemon.start()
    session = rig.attach()
    took = time.monotonic() - began
    new = loose(50, "new")
    assert len(store(session, new)) == 50, "the pool takes blocks while the disk is read"
    rig.follow(rig.router)
    status = rig.settle()
    assert took < 5
    assert status["tiers"][1]["used_bytes"] <= 16 * MIB
    assert occupied(rig.folder / "disk") <= 16 * MIB
    left = status["tiers"][1]["blocks"] - len(on_disk(rig, new))
    assert left > 1500
    kept = on_disk(rig, made)
    assert set(keys_of(kept)) <= set(keys_of(made[-left - 64 :])), "the oldest went, give or take a batch"
    assert len(kept) == left


@pytest.mark.parametrize("layout", [BIG, LAYOUT], ids=["files", "packed"])
def test_the_order_of_use_outlives_a_restart_and_what_is_new_is_not_old(make: Make, layout: Layout) -> None:
    """L76: of ten blocks the one used last stays, and so does one that is stored after the restart."""
    rig = make(layout=layout)
    limit(rig, 12 * (4096 + layout.groups[0].block_bytes), **LRU)
    rig.start()
    session = rig.attach()
    made = loose(10)
    for block in made:
        assert store(session, [block])
        rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made[:1]) == ["disk"]
    rig.settle()
    assert rig.counter("disk", "evictions") == 0
    rig.restart()
    session = rig.attach()
    for victims, block in enumerate(loose(4, "new"), 1):
        assert store(session, [block])
        rig.settle()
        assert on_disk(rig, made) == [made[0], *made[1 + victims :]]
        assert on_disk(rig, [block]) == [block]


def test_a_victim_that_cannot_be_deleted_is_skipped_and_told_of_once(make: Make) -> None:
    """L68: the next ones go; when none can be deleted nothing is written, and nobody spins."""
    rig = make(layout=BIG, slots=16)
    limit(rig, 12 * (4096 + BIG_BLOCK), **LRU)
    rig.start()
    session = rig.attach()

    def block_of(path: Path) -> None:
        """Put something in the file's place that no unlink removes."""
        path.unlink()
        path.mkdir()
        (path / "x").touch()

    made = loose(30)
    for block in made[:10]:
        store(session, [block])
    rig.settle()
    block_of(rig.copies()[made[0].key].path)
    for block in made[10:16]:
        assert store(session, [block])
        rig.settle()
    assert rig.counter("disk", "undeletable") == 1
    assert rig.tier("disk")["undeletable_bytes"] == 4096 + BIG_BLOCK
    assert on_disk(rig, made[:16]) == made[7:16]
    stuck = [rig.copies()[block.key].path for block in made[7:16]]
    for path in stuck:
        block_of(path)
    for block in made[16:]:
        assert store(session, [block]), "the pool takes it"
        rig.settle()
    assert on_disk(rig, made[16:]) == []
    assert rig.counter("disk", "cascade_dropped_no_room") > 0
    lines = [line for line in rig.daemon.log.read_text().splitlines() if "delete" in line]
    assert len(lines) == 1, lines
    heard, (_, used) = rig.router.counts["batches"], rig.resources()
    rig.router.wait_for(lambda r: r.counts["batches"] >= heard + 6, what="heartbeats")
    assert rig.resources()[1] - used < 0.2
    rig.agree()


# -- faults ------------------------------------------------------------------------------------------


def test_a_root_that_is_absent_is_made(make: Make) -> None:
    """L79."""
    rig = make()
    shutil.rmtree(rig.folder / "disk")
    deep = rig.folder / "not" / "yet" / "there"
    rig.edit(lambda body: body["tiers"][1].update(path=str(deep)))
    rig.start()
    made = loose(3)
    store(rig.attach(), made)
    rig.settle()
    assert sorted(rig.copies(root=str(deep))) == sorted(keys_of(made))


def test_a_root_that_goes_away_keeps_its_blocks_and_comes_back(rig: DaemonRig) -> None:
    """L43, L79: a passing fault is a miss now and a hit later; the pool goes on meanwhile."""
    made = loose(3)
    session = rig.attach()
    store(session, made)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    disk, away = rig.folder / "disk", rig.folder / "away"
    disk.rename(away)
    assert load(session, made) == []
    assert session.lookup(keys_of(made)).states == (KeyState.COLD,) * 3
    for _ in range(5):
        assert load(session, made) == []
    assert (rig.tier("disk")["condition"], disk.exists()) == ("degraded", False)
    assert session.lookup(keys_of(made)).states == (KeyState.MISS,) * 3, "not asked any more for a while"
    assert "ESTALE" in rig.tier("disk")["reason"]
    assert len(store(session, loose(2, "new"))) == 2
    assert load(session, loose(2, "new")) == ["cpu"] * 2
    away.rename(disk)
    wait_for(lambda: load(session, made) == ["disk"] * 3, "the disk to be asked again")
    wait_for(
        lambda: store(session, loose(1, str(time.monotonic()))) and rig.tier("disk")["stored"] > 3, "a write"
    )
    wait_for(lambda: rig.tier("disk")["condition"] == "ok", "the tier to be well")
    assert [("BlockRemoved", "STORAGE", "LOCAL") in rig.router.told(block) for block in made] == [False] * 3


def test_a_mount_that_goes_away_and_comes_back(make: Make, mounted: Mounted) -> None:
    """L70, L79: nothing is written into the folder below it; its blocks are hits again afterwards."""
    rig = make()
    root = rig.folder / "disk"
    with mounted(rig.folder / "device", root, "8m") as mount:
        rig.start()
        assert not list(root.rglob(".tmp-*")), "what was tried at the start is gone"
        session = rig.attach()
        made = loose(4)
        store(session, made)
        rig.settle()
        session.evict(keys_of(made), ["cpu"])
        assert load(session, made[:1]) == ["disk"]
        mount.detach()
        assert load(session, made[1:]) == []
        store(session, loose(2, "new"))
        wait_for(lambda: "ESTALE" in rig.tier("disk")["last_fault"], "the tier to notice")
        assert list(root.iterdir()) == []
        mount.attach()
        wait_for(lambda: load(session, made[1:]) == ["disk"] * 3, "the disk to be asked again")
        rig.agree()
        assert rig.daemon.stop() == 0


def test_a_full_filesystem_costs_old_blocks_and_nothing_else(make: Make, mounted: Mounted) -> None:
    """ENOSPC: no false event, no half block; then the same filesystem turns read-only, and back."""
    rig = make(slots=256, paranoid=False)
    with mounted(rig.folder / "device", rig.folder / "disk", "2m") as mount:
        limit(rig, 1 << 30, **LRU)
        rig.start()
        session = rig.attach()
        made = loose(600)
        for start in range(0, 600, 50):
            assert len(store(session, made[start : start + 50])) == 50
            rig.settle()
            rig.agree()
            assert set(rig.copies()) == {entry.key for entry in session.inventory("disk")}
        kept = on_disk(rig, made)
        assert len(kept) > 100
        for start in range(0, len(kept), 50):
            assert load(session, kept[start : start + 50]) == ["disk"] * len(kept[start : start + 50])
        session.reset(["cpu"])
        session.evict(keys_of(kept[:50]))
        rig.settle()
        mount.detach()
        mount.attach(writable=False)
        assert load(session, kept[60:62]) == ["disk"] * 2
        assert len(store(session, loose(20, "ro"))) == 20
        rig.settle()
        assert on_disk(rig, loose(20, "ro")) == []
        assert "EROFS" in rig.tier("disk")["last_fault"]
        mount.detach()
        mount.attach()
        before = rig.tier("disk")["stored"]

        def written() -> bool:
            store(session, loose(1, str(time.monotonic())))
            return bool(rig.tier("disk")["stored"] > before)

        wait_for(written, "a write to go well", timeout=20, poll=0.1)
        rig.agree()
        assert rig.daemon.stop() == 0

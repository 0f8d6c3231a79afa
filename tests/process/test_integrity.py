"""Broken, missing, swapped and foreign files: a block is a hit only if it proves what it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.client import KeyState, Session
from kvtierd.testing.daemon_rig import BLOCK, FILE, DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.workload import WorkBlock, payload

Make = Callable[..., DaemonRig]


def cold(rig: DaemonRig, blocks: list[WorkBlock]) -> Session:
    """Store blocks and leave them on the disk alone."""
    session = rig.attach()
    assert len(store(session, blocks)) == len(blocks)
    rig.settle()
    session.evict(keys_of(blocks), ["cpu"])
    return session


def flip(path: Path, offset: int) -> None:
    """Flip all bits of one byte, in place: length and name stay right."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def quarantine(rig: DaemonRig) -> list[str]:
    """Return the names of the block files that were kept aside."""
    return sorted(path.name.split(".", 2)[2] for path in (rig.folder / "disk" / "quarantine").iterdir())


def removed_from_disk(rig: DaemonRig, block: WorkBlock) -> int:
    return rig.router.told(block).count(("BlockRemoved", "STORAGE", "LOCAL"))


def check_lost(rig: DaemonRig, session: Session, bad: WorkBlock, good: list[WorkBlock]) -> None:
    """A bad file costs one miss: gone from lookups and stream at once, the others are fine."""
    assert load(session, [bad]) == []
    assert session.lookup([bad.key]).states == (KeyState.MISS,)
    rig.settle()
    assert removed_from_disk(rig, bad) == 1
    assert not rig.file(bad).exists()
    assert load(session, good) == ["disk"] * len(good)


def test_a_truncated_file_is_one_miss_and_a_new_store_heals_it(rig: DaemonRig) -> None:
    """L42."""
    bad, *good = made = loose(3)
    session = cold(rig, made)
    os.truncate(rig.file(bad), FILE - 1)
    check_lost(rig, session, bad, good)
    assert rig.counter("disk", "read_corrupt") == 1
    assert load(session, [bad]) == []
    assert rig.counter("disk", "read_corrupt") == 1, "the file is not opened again"
    store(session, [bad])
    rig.settle()
    session.evict([bad.key], ["cpu"])
    assert load(session, [bad]) == ["disk"]
    rig.settle()
    assert removed_from_disk(rig, bad) == 1


SPOTS = {
    "magic": 0,
    "lengths": 12,
    "payload checksum": 40,
    "metadata": 70,
    "padding": 3000,
    "header checksum": 4095,
    "first byte": 4096,
    "last byte": FILE - 1,
}


def test_a_flipped_bit_anywhere_is_never_loaded(rig: DaemonRig) -> None:
    """L63: body, header, checksums; the file is kept aside, the removal announced, the counter raised."""
    made = loose(len(SPOTS) + 2)
    session = cold(rig, made)
    for bad, offset in zip(made, SPOTS.values(), strict=False):
        flip(rig.file(bad), offset)
    good = made[len(SPOTS) :]
    for count, bad in enumerate(made[: len(SPOTS)], 1):
        check_lost(rig, session, bad, good)
        assert rig.counter("disk", "read_corrupt") == count
        session.evict(keys_of(good), ["cpu"])
    assert quarantine(rig) == sorted(rig.file(bad).name for bad in made[: len(SPOTS)])


def test_swapped_files_are_two_misses(rig: DaemonRig) -> None:
    """L63: right length, right checksums, another block."""
    one, two, good = made = loose(3)
    session = cold(rig, made)
    aside = rig.folder / "aside"
    rig.file(one).rename(aside)
    rig.file(two).rename(rig.file(one))
    aside.rename(rig.file(two))
    for bad in (one, two):
        check_lost(rig, session, bad, [good])
        session.evict([good.key], ["cpu"])
    assert rig.counter("disk", "read_corrupt") == 2


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "crash"])
def test_a_scan_takes_only_what_proves_itself(rig: DaemonRig, crash: bool) -> None:
    """L63, L78: bad files of every kind are there at the start; none is a hit, none stops the scan."""
    made = loose(12)
    session = cold(rig, made)
    files = [rig.file(block) for block in made]
    flip(files[0], 70)  # header
    flip(files[1], 4095)  # its checksum
    flip(files[2], 5000)  # body: found on load
    os.truncate(files[3], 0)
    os.truncate(files[4], 100)
    with files[5].open("ab") as file:
        file.write(b"more")
    body6, body7 = files[6].read_bytes(), files[7].read_bytes()
    files[6].write_bytes(body7)
    files[7].write_bytes(body6)
    space = files[8].parent.parent
    strangers = [
        space / "README.txt",
        files[8].with_name("notes"),
        files[8].with_name("ab.cd"),
        space.parent / "x",
    ]
    for path in strangers:
        path.write_text("not ours")
    (space / ("00" if files[8].parent.name != "00" else "01")).mkdir(exist_ok=True)
    files[8].with_name("dd" * 32 + ".0").symlink_to("/etc/passwd")
    files[8].with_name(f"aaaa{files[8].parent.name}.0").mkdir()
    rig.restart(crash=crash)
    session = rig.attach()
    rig.settle()
    states = session.lookup(keys_of(made)).states
    cold_ones, missing = (KeyState.COLD,), (KeyState.MISS,)
    assert states == missing * 2 + cold_ones + missing * 5 + cold_ones * 4
    check_lost(rig, session, made[2], made[8:])
    assert all(path.read_text() == "not ours" for path in strangers)
    assert quarantine(rig) == sorted(path.name for path in files[:8])
    store(session, made[:8])
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made) == ["disk"] * 12


def test_a_read_failure_in_the_middle_gives_the_blocks_before_it_and_nothing_else(rig: DaemonRig) -> None:
    """L61: block 3 of 8 is corrupt: 2 are loaded, nobody writes to targets 3 to 8, 2 hits are counted."""
    made = chain(8)
    session = cold(rig, made)
    flip(rig.file(made[2]), 6000)
    target = bytearray(b"\xca" * BLOCK * 8)
    with session.load(keys_of(made), deadline=5.0) as got:
        for number, view in enumerate(got.views()):
            target[number * BLOCK : (number + 1) * BLOCK] = view
        assert len(got.keys) == 2
    good = b"".join(payload(block.key, BLOCK) for block in made[:2])
    assert target == good + b"\xca" * BLOCK * 6
    assert rig.counter("cpu", "load_from_disk") == 2
    assert rig.counter("cpu", "load_from_cpu") == 0
    assert session.lookup(keys_of(made)).prefix == 2
    rig.settle()
    assert removed_from_disk(rig, made[2]) == 1
    store(session, [made[2]])
    assert load(session, made) == ["cpu"] * 8


def test_a_slot_that_a_failed_read_wrote_to_serves_the_next_block(make: Make) -> None:
    """A read that fails its proof leaves rubbish in a slot; nobody ever gets it as a block."""
    rig = make(slots=2).start()
    bad, good = made = loose(2)
    session = cold(rig, made)
    flip(rig.file(bad), 6000)
    assert load(session, [bad]) == []
    assert load(session, [good]) == ["disk"]
    assert session.lookup([bad.key]).states == (KeyState.MISS,)
    assert len(store(session, loose(2, "new"))) == 2
    assert load(session, loose(2, "new")) == ["cpu"] * 2


def test_a_file_removed_by_somebody_else_is_a_miss(rig: DaemonRig) -> None:
    """L75."""
    bad, *good = made = loose(3)
    session = cold(rig, made)
    rig.file(bad).unlink()
    check_lost(rig, session, bad, good)
    assert rig.counter("disk", "read_gone") == 1
    assert quarantine(rig) == []


def test_a_disk_that_went_away_keeps_its_blocks_and_comes_back(rig: DaemonRig) -> None:
    """L43, L79: a passing fault is a miss now and a hit later; the pool goes on meanwhile."""
    made = loose(3)
    session = cold(rig, made)
    disk, away = rig.folder / "disk", rig.folder / "away"
    disk.rename(away)
    assert load(session, made) == []
    assert session.lookup(keys_of(made)).states == (KeyState.COLD,) * 3
    assert len(store(session, loose(2, "new"))) == 2
    rig.settle()
    assert rig.tier("disk")["last_fault"]
    away.rename(disk)
    assert load(session, made) == ["disk"] * 3
    assert [removed_from_disk(rig, block) for block in made] == [0, 0, 0]


def test_an_engine_may_reuse_its_buffer_right_after_the_commit(rig: DaemonRig) -> None:
    """L62: what was committed is what is loaded, from the pool and from the disk."""
    session = rig.attach()
    buffer = bytearray(BLOCK)
    made = loose(20)
    for block in made:
        buffer[:] = payload(block.key, BLOCK)
        assert session.put(block.key, memoryview(buffer), block.meta)
        buffer[:] = b"\xff" * BLOCK
    assert load(session, made) == ["cpu"] * 20
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made) == ["disk"] * 20


def test_a_bounded_disk_never_holds_more_than_its_bytes(make: Make) -> None:
    """L66 in small: by what the files occupy, with removals for what goes, oldest first."""
    rig = make(slots=16, disk_bytes=10 * FILE).start()
    session = rig.attach()
    made = loose(40)
    root = rig.folder / "disk" / "v1"
    for block in made:
        store(session, [block])
        status = rig.settle()
        files = [path for path in root.rglob("*.0") if path.is_file()]
        assert sum(path.stat().st_blocks * 512 for path in files) <= 10 * FILE
        assert status["tiers"][1]["used_bytes"] <= 10 * FILE
    session.evict(keys_of(made), ["cpu"])
    states = session.lookup(keys_of(made)).states
    kept = states.count(KeyState.COLD)
    assert kept >= 8
    assert states[-kept:] == (KeyState.COLD,) * kept

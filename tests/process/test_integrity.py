"""Broken, missing, swapped and foreign bytes: a block is a hit only if it proves what it is.

Each test runs with a file for every block, and with small blocks packed into segments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.client import KeyState, Layout, Session, group_of, hash_of
from kvtierd.testing.daemon_rig import BIG, LAYOUT, DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.workload import WorkBlock, payload

Make = Callable[..., DaemonRig]

COLD, MISS = KeyState.COLD, KeyState.MISS


@pytest.fixture(params=[BIG, LAYOUT], ids=["files", "packed"])
def layout(request: pytest.FixtureRequest) -> Layout:
    """Big blocks, which have a file each, and small ones."""
    assert isinstance(request.param, Layout)
    return request.param


def cold(rig: DaemonRig, blocks: list[WorkBlock]) -> Session:
    """Store blocks and leave them on the disk alone."""
    session = rig.attach()
    assert len(store(session, blocks)) == len(blocks)
    rig.settle()
    session.evict(keys_of(blocks), ["cpu"])
    return session


def quarantine(rig: DaemonRig) -> list[str]:
    """Return the names (hash and group) of the blocks that were kept aside."""
    return sorted(path.name.split(".", 2)[2] for path in (rig.folder / "disk" / "quarantine").iterdir())


def names(blocks: list[WorkBlock]) -> list[str]:
    return sorted(f"{hash_of(block.key).hex()}.{group_of(block.key)}" for block in blocks)


def removed_from_disk(rig: DaemonRig, block: WorkBlock) -> int:
    return rig.router.told(block).count(("BlockRemoved", "STORAGE", "LOCAL"))


def check_lost(rig: DaemonRig, session: Session, bad: WorkBlock, good: list[WorkBlock]) -> None:
    """A bad copy costs one miss: gone from lookups, stream and disk at once, the others are fine."""
    before = removed_from_disk(rig, bad)  # a crash makes what was told last doubtful, and told again
    assert load(session, [bad]) == []
    assert session.lookup([bad.key]).states == (MISS,)
    rig.settle()
    assert removed_from_disk(rig, bad) == before + 1
    assert bad.key not in rig.copies()
    assert load(session, good) == ["disk"] * len(good)


def test_a_short_file_is_a_miss_and_a_new_store_heals_it(rig: DaemonRig, layout: Layout) -> None:
    """L42: of a segment that was cut, the block at the edge and those behind it are lost."""
    made = loose(3)
    for block in made:  # one after the other, for writers at the same time have a segment each
        session = cold(rig, [block])
    copies = rig.copies()
    assert len({copy.path for copy in copies.values()}) == (1 if layout is LAYOUT else 3)
    first, edge, behind = sorted(made, key=lambda block: copies[block.key].offset)
    copies[edge.key].cut(copies[edge.key].nbytes - 1)
    lost = [edge, behind] if layout is LAYOUT else [edge]
    for number, bad in enumerate(lost):
        check_lost(rig, session, bad, [block for block in made if block not in lost and not number])
    assert rig.counter("disk", "read_corrupt") == 1
    assert rig.counter("disk", "read_gone") == len(lost) - 1
    assert load(session, [edge]) == []
    assert rig.counter("disk", "read_corrupt") == 1, "it is not read again"
    store(session, lost)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, [first, *lost]) == ["disk"] * (1 + len(lost))
    rig.settle()
    assert [removed_from_disk(rig, bad) for bad in lost] == [1] * len(lost)


SPOTS = {
    "magic": 0,
    "lengths": 12,
    "payload checksum": 40,
    "metadata": 70,
    "padding": 3000,
    "header checksum": 4095,
    "first byte": 4096,
    "last byte": -1,
}


def test_a_flipped_bit_anywhere_is_never_loaded(rig: DaemonRig) -> None:
    """L63: body, header, checksums; the copy is kept aside, the removal announced, the counter raised."""
    made = loose(len(SPOTS) + 2)
    session = cold(rig, made)
    copies = rig.copies()
    for bad, offset in zip(made, SPOTS.values(), strict=False):
        copies[bad.key].flip(offset % copies[bad.key].nbytes)
    good = made[len(SPOTS) :]
    for count, bad in enumerate(made[: len(SPOTS)], 1):
        check_lost(rig, session, bad, good)
        assert rig.counter("disk", "read_corrupt") == count
        session.evict(keys_of(good), ["cpu"])
    assert quarantine(rig) == names(made[: len(SPOTS)])


def test_swapped_copies_are_two_misses(rig: DaemonRig) -> None:
    """L63: right length, right checksums, another block."""
    one, two, good = made = loose(3)
    session = cold(rig, made)
    first, second = rig.copies()[one.key], rig.copies()[two.key]
    bodies = first.read(), second.read()
    first.write(bodies[1])
    second.write(bodies[0])
    for bad in (one, two):
        assert load(session, [bad]) == []
        assert session.lookup([bad.key]).states == (MISS,)
        assert load(session, [good]) == ["disk"]
        session.evict([good.key], ["cpu"])
    rig.settle()
    assert [removed_from_disk(rig, bad) for bad in (one, two)] == [1, 1]
    assert set(rig.copies()) == {good.key}
    assert rig.counter("disk", "read_corrupt") == 2


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "crash"])
def test_a_scan_takes_only_files_that_prove_themselves(make: Make, crash: bool) -> None:
    """L63, L78: bad files of every kind are there at the start; none is a hit, none stops the scan."""
    rig = make(layout=BIG).start()
    made = loose(12)
    session = cold(rig, made)
    copies = rig.copies()
    at = [copies[block.key] for block in made]
    at[0].flip(70)  # header
    at[1].flip(4095)  # its checksum
    at[2].flip(5000)  # body: found on load
    at[3].cut(0)
    at[4].cut(100)
    with at[5].path.open("ab") as file:
        file.write(b"more")
    bodies = at[6].read(), at[7].read()
    at[6].write(bodies[1])
    at[7].write(bodies[0])
    shard = at[8].path.parent
    strangers = [shard.parent / "README", shard / "notes", shard / "ab.cd", shard.parent.parent / "x"]
    for path in strangers:
        path.write_text("not ours")
    (shard / ("dd" * 31 + shard.name + ".0")).symlink_to("/etc/passwd")
    (shard / f"aaaa{shard.name}.0").mkdir()
    rig.restart(crash=crash)
    session = rig.attach()
    rig.settle()
    assert session.lookup(keys_of(made)).states == (MISS,) * 2 + (COLD,) + (MISS,) * 5 + (COLD,) * 4
    check_lost(rig, session, made[2], made[8:])
    assert all(path.read_text() == "not ours" for path in strangers)
    assert quarantine(rig) == names(made[:8])
    heal(rig, session, made)


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "crash"])
def test_a_scan_takes_only_slots_that_prove_themselves(make: Make, crash: bool) -> None:
    """L63, L78: bad slots, bad segments and strange names beside them; the good ones are all found."""
    rig = make().start()
    made = loose(12)
    session = cold(rig, made)
    copies = rig.copies()
    at = [copies[block.key] for block in made]
    at[0].flip(70)
    at[1].flip(4095)
    at[2].flip(5000)  # body: found on load
    at[3].remove()
    at[4].write(bytes(3996), at=100)  # half a header
    at[5].write(at[8].read())  # a block that is there already
    bodies = at[6].read(), at[7].read()
    at[6].write(bodies[1])  # which slot a block lies in means nothing
    at[7].write(bodies[0])
    folder = at[8].path.parent
    strangers = [folder / "README", folder / "4097-0123456789abcdef", folder / "8192-xyz"]
    for path in strangers:
        path.write_text("not ours")
    (folder / f"8192-{'0' * 16}").touch()
    (folder / f"8192-{'1' * 16}").write_bytes(os.urandom(1 << 20))
    (folder / f"8192-{'2' * 16}").symlink_to("/etc/passwd")
    (folder / f"8192-{'3' * 16}").mkdir()
    with at[8].path.open("rb") as file:  # slots of another size
        (folder / f"12288-{'4' * 16}").write_bytes(file.read(2 << 20))
    rig.restart(crash=crash)
    session = rig.attach()
    rig.settle()
    assert session.lookup(keys_of(made)).states == (MISS,) * 2 + (COLD,) + (MISS,) * 3 + (COLD,) * 6
    check_lost(rig, session, made[2], made[6:])
    assert all(path.read_text() == "not ours" for path in strangers)
    assert Path("/etc/passwd").read_bytes()
    heal(rig, session, made)


def heal(rig: DaemonRig, session: Session, made: list[WorkBlock]) -> None:
    """Store blocks, some of which are there: all come back from the disk, now and after a restart."""
    store(session, made)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made) == ["disk"] * len(made)
    rig.restart()
    session = rig.attach()
    rig.settle()
    assert load(session, made) == ["disk"] * len(made)


def test_a_read_failure_in_the_middle_gives_the_blocks_before_it_and_nothing_else(
    rig: DaemonRig, layout: Layout
) -> None:
    """L61: block 3 of 8 is corrupt: 2 are loaded, nobody writes to targets 3 to 8, 2 hits are counted."""
    size = layout.groups[0].block_bytes
    made = chain(8)
    session = cold(rig, made)
    rig.copies()[made[2].key].flip(6000)
    target = bytearray(b"\xca" * size * 8)
    with session.load(keys_of(made), deadline=5.0) as got:
        for number, view in enumerate(got.views()):
            target[number * size : (number + 1) * size] = view
        assert len(got.keys) == 2
    good = b"".join(payload(block.key, size) for block in made[:2])
    assert target == good + b"\xca" * size * 6
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
    rig.copies()[bad.key].flip(6000)
    assert load(session, [bad]) == []
    assert load(session, [good]) == ["disk"]
    assert session.lookup([bad.key]).states == (MISS,)
    assert len(store(session, loose(2, "new"))) == 2
    assert load(session, loose(2, "new")) == ["cpu"] * 2


def test_a_copy_removed_by_somebody_else_is_a_miss(rig: DaemonRig) -> None:
    """L75."""
    bad, *good = made = loose(3)
    session = cold(rig, made)
    rig.copies()[bad.key].remove()
    check_lost(rig, session, bad, good)
    assert rig.counter("disk", "read_gone") == 1
    assert quarantine(rig) == []


def test_an_engine_may_reuse_its_buffer_right_after_the_commit(rig: DaemonRig, layout: Layout) -> None:
    """L62: what was committed is what is loaded, from the pool and from the disk."""
    size = layout.groups[0].block_bytes
    session = rig.attach()
    buffer = bytearray(size)
    made = loose(20)
    for block in made:
        buffer[:] = payload(block.key, size)
        assert session.put(block.key, memoryview(buffer), block.meta)
        buffer[:] = b"\xff" * size
    assert load(session, made) == ["cpu"] * 20
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made) == ["disk"] * 20

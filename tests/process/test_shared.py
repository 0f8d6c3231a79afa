"""Several daemons on one root with ``shared: true``."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtierd.client import KeyState, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import FILE, DaemonRig, fs_tier, keys_of, load, loose, store
from kvtierd.testing.on_disk import copies
from kvtierd.testing.workload import WorkBlock, payload

Make = Callable[..., DaemonRig]
DAEMONS = 4


@pytest.fixture
def rigs(make: Make) -> list[DaemonRig]:
    """Running daemons whose one tier below the pool is the same folder."""
    made = [make(slots=256) for _ in range(DAEMONS)]
    tier = fs_tier(made[0].folder, shared=True, locality="REMOTE")
    for rig in made:
        rig.edit(lambda body: body.update(tiers=[body["tiers"][0], tier]))
    with ThreadPoolExecutor(DAEMONS) as pool:
        list(pool.map(lambda rig: rig.start(), made))
    return made


def everywhere(act: Callable[[int], None]) -> None:
    """Act for each daemon at the same time."""
    with ThreadPoolExecutor(DAEMONS) as pool:
        list(pool.map(act, range(DAEMONS)))


def told_of_disk(rig: DaemonRig, block: WorkBlock) -> list[str]:
    return [kind for kind, medium, _ in rig.router.told(block) if medium == "STORAGE"]


def found(session: Session, blocks: list[WorkBlock]) -> bool:
    """Whether lookups that may look for them know all blocks by now."""
    states = session.lookup(keys_of(blocks), promote=True).states
    return all(state in (KeyState.COLD, KeyState.HIT) for state in states)


def test_daemons_that_write_the_same_keys_at_once_leave_one_whole_file_each(rigs: list[DaemonRig]) -> None:
    """L64: no error, no temporary, one announcement per daemon; then all use what one has, or removed."""
    root = rigs[0].folder / "disk"
    made = loose(100)
    sessions = [rig.attach() for rig in rigs]
    barrier = threading.Barrier(DAEMONS)

    def write(number: int) -> None:
        mine = random.Random(number).sample(made, len(made))
        barrier.wait(20)
        for start in range(0, 100, 10):
            assert len(store(sessions[number], mine[start : start + 10])) == 10

    everywhere(write)
    for rig in rigs:
        status = rig.settle()
        assert status["tiers"][1]["blocks"] == 100
        assert status["tiers"][1]["last_fault"] == ""
        assert all(told_of_disk(rig, block) == ["BlockStored"] for block in made)
    was_there_already_is_not_written_again(rigs, sessions)
    assert not list(root.rglob(".tmp-*"))
    files = copies(root, rigs[0].layout.namespace())
    assert sorted(files) == sorted(keys_of(made))
    for key, file in files.items():
        assert file.nbytes == FILE
        assert file.read()[file.header :] == payload(key, FILE - file.header)
    for session in sessions:
        session.evict(keys_of(made), ["cpu"])
        assert load(session, made) == ["disk"] * 100
    one_finds_what_another_stored(rigs, sessions)
    what_one_removed_is_a_miss_for_the_others(rigs, sessions, made[:5])


def was_there_already_is_not_written_again(rigs: list[DaemonRig], sessions: list[Session]) -> None:
    """Whoever comes second finds the file, looks at its header, and announces it as its own store."""
    root, new = rigs[0].folder / "disk", loose(20, "once")
    store(sessions[0], new)
    rigs[0].settle()
    files = copies(root, rigs[0].layout.namespace())
    before = {block.key: files[block.key].path.stat().st_ino for block in new}
    for rig, session in zip(rigs[1:], sessions[1:], strict=True):
        store(session, new)
        rig.settle()
        assert all(told_of_disk(rig, block) == ["BlockStored"] for block in new)
    files = copies(root, rigs[0].layout.namespace())
    assert {block.key: files[block.key].path.stat().st_ino for block in new} == before
    for session in sessions:
        session.evict(keys_of(new))


def one_finds_what_another_stored(rigs: list[DaemonRig], sessions: list[Session]) -> None:
    """Unknown keys are looked for in the background, announced once, and served."""
    new = loose(20, "new")
    store(sessions[0], new)
    rigs[0].settle()
    for rig, session in zip(rigs[1:], sessions[1:], strict=True):
        assert session.lookup(keys_of(new)).prefix == 0
        wait_for(lambda s=session: found(s, new), "the blocks of another daemon")  # type: ignore[misc]
        assert load(session, new) in (["disk"] * 20, ["cpu"] * 20)
        rig.settle()
        assert all(told_of_disk(rig, block) == ["BlockStored"] for block in new)


def what_one_removed_is_a_miss_for_the_others(
    rigs: list[DaemonRig], sessions: list[Session], blocks: list[WorkBlock]
) -> None:
    """L75: a miss and a removal as soon as it is noticed."""
    for session in sessions:
        session.evict(keys_of(blocks), ["cpu"])
    assert sessions[0].evict(keys_of(blocks), ["disk"]) == len(blocks)
    rigs[0].settle()
    for rig, session in zip(rigs[1:], sessions[1:], strict=True):
        assert load(session, blocks) == []
        rig.settle()
        assert told_of_disk(rig, blocks[0]) == ["BlockStored", "BlockRemoved"]
        assert session.lookup(keys_of(blocks)).prefix == 0


def test_the_temporary_of_a_neighbour_stays_and_that_of_a_dead_one_goes(make: Make) -> None:
    """L65: fresh or locked, it may be somebody's; a start removes only what is provably nobody's."""
    rig = make()
    tier = fs_tier(rig.folder, shared=True)
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], tier]))
    rig.start()
    store(rig.attach(), loose(1))
    rig.settle()
    (copy,) = rig.copies().values()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    fresh, locked, dead, strange = (
        copy.path.with_name(f".tmp-{kernel}-4242-{number:024x}")
        for number, kernel in enumerate((boot, boot, boot, "0" * 32))
    )
    with ExitStack() as stack:
        for path in (fresh, locked, dead, strange):
            path.write_bytes(b"x" * 100)
            if path is not fresh:
                os.utime(path, (1, 1))
        file = stack.enter_context(locked.open("rb"))
        fcntl.flock(file, fcntl.LOCK_EX)
        rig.restart()
        rig.settle()
        assert [path.exists() for path in (fresh, locked, dead, strange)] == [True, True, False, True]


def test_a_load_alone_finds_what_another_daemon_wrote_meanwhile(rigs: list[DaemonRig]) -> None:
    writer, reader = rigs[:2]
    made = loose(8)
    with writer.attach() as session:
        store(session, made)
        writer.settle()
    with reader.attach() as session:
        assert load(session, made) == ["disk"] * 8
    reader.agree()

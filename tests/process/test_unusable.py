"""A tier whose storage cannot be used at the start: told, left out, tried again, used when it can."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import BIG, LAYOUT, DaemonRig, keys_of, load, loose, store

Make = Callable[..., DaemonRig]


def well(rig: DaemonRig) -> None:
    """Wait until the disk is well and everything was written."""
    wait_for(lambda: rig.tier("disk")["condition"] == "ok", "the disk to be well")
    rig.settle()


@pytest.mark.parametrize("layout", [BIG, LAYOUT], ids=["files", "packed"])
def test_blocks_of_a_root_that_comes_late_are_indexed_and_told(make: Make, layout: Any) -> None:
    """L79: the folder is something else at the start; nothing that was told before is taken back for it."""
    rig = make(layout=layout).start()
    made = loose(5)
    store(rig.attach(), made)
    rig.settle()
    rig.client.close()
    assert rig.daemon.stop() == 0
    disk, away = rig.folder / "disk", rig.folder / "away"
    disk.rename(away)
    disk.write_bytes(b"no folder")
    rig.start()
    session = rig.attach()
    tier = rig.tier("disk")
    assert tier["condition"] == "degraded"
    assert "cannot use" in tier["reason"]
    assert "File exists" in tier["reason"] or "Not a directory" in tier["reason"]
    new = loose(3, "new")
    assert len(store(session, new)) == 3
    assert load(session, new) == ["cpu"] * 3
    assert session.lookup(keys_of(made)).prefix == 0
    assert ("BlockRemoved", "STORAGE", "LOCAL") not in rig.router.told(made[0]), "it may still be there"
    disk.unlink()
    away.rename(disk)
    well(rig)
    assert load(session, made) == ["disk"] * 5
    session.evict(keys_of(new), ["cpu"])
    assert load(session, new) == ["disk"] * 3
    assert [("BlockRemoved", "STORAGE", "LOCAL") in rig.router.told(block) for block in made] == [False] * 5
    rig.agree()


def test_a_root_without_its_journal_is_told_when_it_comes(make: Make) -> None:
    """Nobody knows what was told before: what is found late is announced."""
    rig = make().start()
    made = loose(5)
    store(rig.attach(), made)
    rig.settle()
    rig.client.close()
    rig.daemon.kill()
    rig.router.close()
    rig.router = type(rig.router)()
    shutil.rmtree(rig.folder / "state")
    (rig.folder / "state").mkdir()
    disk, away = rig.folder / "disk", rig.folder / "away"
    disk.rename(away)
    disk.write_bytes(b"no folder")
    rig.start()
    disk.unlink()
    away.rename(disk)
    well(rig)
    assert all(rig.router.told(block)[-1] == ("BlockStored", "STORAGE", "LOCAL") for block in made)
    rig.client.close()
    assert rig.daemon.stop() == 0


def test_a_filesystem_that_is_read_only_at_the_start_is_used_when_it_is_not(
    make: Make, mounted: Callable[..., Any]
) -> None:
    """EROFS: the blocks that it holds are hits again as soon as it can be written."""
    rig = make(layout=BIG)
    root = rig.folder / "disk"
    with mounted(rig.folder / "device", root, "16m") as mount:
        rig.start()
        made = loose(4)
        store(rig.attach(), made)
        rig.settle()
        rig.client.close()
        assert rig.daemon.stop() == 0
        mount.detach()
        mount.attach(writable=False)
        rig.start()
        assert rig.tier("disk")["condition"] == "degraded"
        assert "Read-only" in rig.tier("disk")["reason"]
        assert len(store(rig.attach(), loose(2, "new"))) == 2
        mount.detach()
        mount.attach()
        well(rig)
        assert load(rig.attach(), made) == ["disk"] * 4
        rig.agree()
        rig.client.close()
        assert rig.daemon.stop() == 0


def test_a_root_that_another_daemon_has_ends_the_start_with_its_name(rig: DaemonRig, make: Make) -> None:
    second = make()
    second.edit(lambda body: body["tiers"][1].update(path=str(rig.folder / "disk")))
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd", "serve", "--config", str(second.daemon.config)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 74
    assert "Traceback" not in done.stderr
    assert f"in use by process {rig.daemon.pid}" in done.stderr
    assert "shared: true" in done.stderr
    assert "ready" not in done.stderr

"""Engines of two daemons on one shared folder, as replicas on one volume: what one stored the other loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import LocalDaemon, short_folder

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


def daemon(folder: Path, volume: Path) -> LocalDaemon:
    folder.mkdir()
    shared = {"name": "disk", "type": "fs", "path": str(volume), "shared": True, "max_bytes": "64MiB"}
    tiers = [{"name": "cpu", "type": "cpu"}, shared]
    return LocalDaemon(folder, pool_bytes=8 << 20, disk_bytes=64 << 20, changes={"tiers": tiers})


def test_what_another_daemon_wrote_since_this_one_started_is_found_when_a_request_comes(
    run_script: Any, models: Path
) -> None:
    """Its index knows nothing of it: the request waits for one look at the volume, then for the blocks."""
    with short_folder("share") as folder:
        volume, result = folder / "volume", folder / "result.json"
        volume.mkdir()
        settings = folder / "settings.json"
        with daemon(folder / "a", volume) as ours, daemon(folder / "b", volume) as theirs:
            lives = []
            for one in (theirs, ours):
                settings.write_text(json.dumps({"model": str(models / "llama"), "socket": one.socket}))
                run_script("versions_phases.py", str(settings), str(result))
                lives.append(json.loads(result.read_text()))
                assert lives[-1]["failures"] == {}
                assert lives[-1]["first"][0] == lives[-1]["second"][0] == lives[-1]["plain"]
        writer, reader = lives
        assert reader["found"] == 0, "its scan was before"
        assert writer["alone"] == [0] < reader["alone"]
        assert sum(reader["first"][1]) > sum(writer["first"][1])

"""Engines of different vLLM versions one after another on one daemon, as in an upgrade and its roll-back.

Before 0.29 vLLM did not fix the order of a block's bytes, so each minor version has a namespace of its own
then: nothing of another one is loaded, and nothing of it is lost. From 0.29 on the order has a name, and
versions with the same one share blocks. ``KVTIERD_VLLM_OTHER`` names a folder with such a version beside the
environment's own, which has been tried with 0.30.0 and 0.32.0; the ordinary run has none.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Client
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

from .conftest import find_older

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

Seen = dict[str, Any]
OTHER = "KVTIERD_VLLM_OTHER"


@pytest.fixture(scope="module")
def lives(run_script: Any, models: Path) -> Iterator[Callable[[Path | None], Seen]]:
    """Run an engine of a version (a folder that is laid over, or none) on a daemon that earlier ones used."""
    with (
        short_folder("version") as folder,
        LocalDaemon(folder, pool_bytes=8 << 20, disk_bytes=64 << 20) as daemon,
    ):
        settings, result = folder / "settings.json", folder / "result.json"
        settings.write_text(json.dumps({"model": str(models / "llama"), "socket": daemon.socket}))

        def live(overlay: Path | None) -> Seen:
            run_script("versions_phases.py", str(settings), str(result), overlay=overlay)
            seen: Seen = json.loads(result.read_text())
            assert seen["failures"] == {}
            with Client(str(folder / "run" / "control.sock"), deadline=10.0) as client:
                on_disk = [entry.namespace for page in client.survey("disk") for entry in page.entries]
            seen |= {"on_disk": dict(Counter(on_disk)), "log": daemon.log.read_text().splitlines()}
            assert seen["first"][0] == seen["second"][0] == seen["plain"]
            return seen

        yield live


def test_an_upgrade_from_an_unnamed_order_of_bytes_loads_nothing_and_loses_nothing(
    lives: Callable[[Path | None], Seen],
) -> None:
    """Though hashes, tokens and sizes are equal. The log names what differs."""
    older, newer = lives(find_older()), lives(None)
    assert older["version"] != newer["version"]
    assert older["blocks"] == newer["blocks"], "only the namespace tells them apart"
    assert older["namespace"] != newer["namespace"]
    assert len({*older["layout"].split("/")} ^ {*newer["layout"].split("/")}) == 2, "the order's name alone"
    assert older["found"] == newer["found"] == 0
    assert older["alone"] == newer["alone"] == [0]
    assert newer["on_disk"] == {
        older["namespace"]: len(older["blocks"]),
        newer["namespace"]: len(newer["blocks"]),
    }
    line, *_ = [line for line in newer["log"] if "shares nothing" in line]
    assert f"differ in layout: {newer['layout']!r}, not {older['layout']!r}" in line


@pytest.mark.skipif(OTHER not in os.environ, reason=f"NOT TESTED: no {OTHER} with a vLLM of 0.29 or later")
def test_versions_with_the_same_order_of_bytes_share_blocks(lives: Callable[[Path | None], Seen]) -> None:
    other = lives(Path(os.environ[OTHER]))
    newer = lives(None)
    assert other["version"] != newer["version"]
    assert (other["namespace"], other["blocks"]) == (newer["namespace"], newer["blocks"])
    assert newer["found"] == len(other["blocks"])
    assert other["alone"] == [0] < newer["alone"]
    assert sum(newer["first"][1]) > sum(other["first"][1])
    assert newer["first"][0] == other["first"][0]

"""A client of the past against the daemon of today: the bytes that it sent, and what it must hear.

``tests/golden/session_v1.json`` was recorded from the client of protocol version 1 and is never made anew:
a build that fails here breaks engines in the field. The pool's id, of which the client repeats what it was
told, is put in the place of the recorded one; it has the same length.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.testing.daemon_rig import BIG, DaemonRig, chain, load, store
from kvtierd.wire.framing import Deframer

Make = Callable[..., DaemonRig]

GOLDEN = Path(__file__).parents[1] / "golden" / "session_v1.json"


def replay(path: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Send each recorded frame and wait for its answer; return (name, what was to be said, what was)."""
    recorded = json.loads(GOLDEN.read_text())
    pool_id, heard = recorded["pool_id"], []
    deframer, ready = Deframer(), []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        for exchange in recorded["exchanges"]:
            sent = bytes.fromhex(exchange["sent"]).replace(recorded["pool_id"].encode(), pool_id.encode())
            connection.sendall(sent)
            while not ready:
                data, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
                for descriptor in descriptors:
                    os.close(descriptor)
                assert data, f"closed instead of an answer to {exchange['name']}"
                ready += deframer.feed(data)
            answer = msgspec.msgpack.decode(ready.pop(0))
            pool_id = answer.get("pool_id", pool_id)
            heard.append((exchange["name"], exchange["heard"], answer))
    return heard


def plain(value: Any) -> Any:
    """Return a value as JSON would hold it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def test_a_recorded_client_of_version_1_hears_what_it_heard_then(make: Make) -> None:
    """L37: every verb once; another client beside it is not disturbed."""
    rig = make(tiers=[], slots=1024).start()
    other, made = rig.attach(BIG, engine_id="other"), chain(3, "other")  # jobs of its own would be numbered
    epoch = other.epoch
    for name, expected, answer in replay(rig.daemon.socket):
        said = {field: plain(answer.get(field)) for field in expected}
        assert said == expected, name
    assert len(store(other, made)) == 3
    assert load(other, made) == ["cpu"] * 3
    assert other.epoch == epoch, "the same connection"
    assert rig.status()["engine"]["protocol_errors"] == 0

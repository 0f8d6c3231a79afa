"""``kvtierd events tail`` and ``watch`` on an audience of a real daemon that speaks CURVE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.auth

from kvtierd.client import Client
from kvtierd.testing.daemon_rig import LAYOUT, chain, store
from kvtierd.testing.local_daemon import LocalDaemon, free_port, short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


class Secured:
    """A daemon whose only audience lets one client in, and the commands as people run them."""

    def __init__(self, folder: Path) -> None:
        for name in ("server", "friend", "stranger"):
            zmq.auth.create_certificates(folder, name)
        self.folder = folder
        curve = {
            "secret_key_file": str(folder / "server.key_secret"),
            "allowed_clients": [str(folder / "friend.key")],
        }
        self.ends = {key: f"tcp://127.0.0.1:{free_port()}" for key in ("bind", "replay")}
        audience = {"name": "private", **self.ends, "curve": curve}
        changes = {"events": {"heartbeat": "200ms", "audiences": [audience]}}
        self.daemon = LocalDaemon(folder, pool_bytes=1 << 18, disk_bytes=4 << 20, changes=changes)

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``kvtierd events``."""
        return subprocess.run(
            [sys.executable, "-m", "kvtierd", "events", *words],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def tail(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Print what the ring has, as JSON."""
        where = ["--endpoint", self.ends["bind"], "--replay", self.ends["replay"]]
        return self.run("tail", *where, "--json", "--count", "3", *words, **environ)

    def key(self, name: str) -> str:
        """Return a key file's path."""
        return str(self.folder / name)


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    """A daemon that has stored three blocks."""
    with short_folder("curve") as folder:
        made = Secured(folder)
        with made.daemon, Client(made.daemon.socket, deadline=5.0) as client:
            store(client.attach(LAYOUT, engine_id="e0"), chain(3))
            yield made


def test_tail_hears_with_keys_from_files_or_variables_and_nothing_without(secured: Secured) -> None:
    files = ("--server-key", secured.key("server.key"), "--secret-key", secured.key("friend.key_secret"))
    from_files = secured.tail(*files)
    assert from_files.returncode == 0, from_files.stderr
    stored = [json.loads(line)["event"]["type"] for line in from_files.stdout.splitlines()]
    assert stored == ["BlockStored"] * 3
    server, _ = zmq.auth.load_certificate(secured.key("server.key"))
    _, secret = zmq.auth.load_certificate(secured.key("friend.key_secret"))
    assert secret is not None
    variables = {
        "KVTIERD_CURVE_SERVER_KEY": server.decode(),
        "KVTIERD_CURVE_SECRET_KEY": secret.decode(),
    }
    from_variables = secured.tail(**variables)
    assert from_variables.stdout == from_files.stdout
    for refused in (
        secured.tail("--timeout", "1"),
        secured.tail(*files[:2], "--timeout", "1"),
        secured.tail(*files[:3], secured.key("stranger.key_secret"), "--timeout", "1"),
    ):
        assert refused.returncode == 69
        assert not refused.stdout
    assert secret.decode() not in from_files.stdout + from_files.stderr


def test_tail_takes_the_servers_key_from_the_tier_file(secured: Secured) -> None:
    done = secured.run(
        *("tail", "--config", str(secured.daemon.config), "--since", "0", "--json", "--count", "3"),
        *("--secret-key", secured.key("friend.key_secret")),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_watch_compares_over_curve_or_says_which_key_is_missing(secured: Secured) -> None:
    socket = str(secured.folder / "run" / "control.sock")
    own = ("--secret-key", secured.key("friend.key_secret"))
    for where in (
        ("--socket", socket, "--server-key", secured.key("server.key")),
        ("--config", str(secured.daemon.config)),
    ):
        done = secured.run("watch", *where, *own, "--once", "--json")
        assert done.returncode == 0, done.stderr
        verdict = json.loads(done.stdout)
        assert verdict["equal"]
        assert verdict["residencies"] == 6
    refused = secured.run("watch", "--socket", socket, "--once")
    assert refused.returncode == 78
    assert "--server-key" in refused.stderr


def test_what_is_no_key_is_refused_without_being_shown(secured: Secured) -> None:
    (secured.folder / "wrong").write_text("hunter2")
    for words, environ in (
        (("--server-key", secured.key("wrong")), {}),
        ((), {"KVTIERD_CURVE_SERVER_KEY": "hunter2"}),
        (("--server-key", secured.key("server.key")), {"KVTIERD_CURVE_SECRET_KEY": "hunter2"}),
        (("--server-key", secured.key("server.key"), "--secret-key", secured.key("nowhere")), {}),
    ):
        done = secured.tail(*words, **environ)
        assert done.returncode == 78, done.stderr
        assert "hunter2" not in done.stderr

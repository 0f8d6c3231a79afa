"""A real daemon as a child process on a folder of its own, for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtierd.errors import Unavailable
from kvtierd.testing.clock import wait_for

FOLDER_MAX = 80
"""Bytes: a Unix socket's path has at most 107, and ours are the folder's and some more."""
STOP_SECONDS = 15.0
START_SECONDS = 30.0


_PORTS = range(10_000, 32_768)
"""Below those that Linux gives to outgoing connections, which could take a port before its server does."""
_given: set[int] = set()


def free_port() -> int:
    """Return a loopback port that was free a moment ago, and that nobody got from here before.

    Raises:
        Unavailable: there is none.
    """
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]  # not of tests' seeds: runs beside each other differ
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise Unavailable(f"no free port of 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1} in 100 tries")


def is_idle(status: dict[str, Any]) -> bool:
    """Whether a daemon's status is that of a quiet point: nothing under way, all it has known and told.

    A daemon that was just started takes engines before it has indexed its disk: until then its inventory
    grows.
    """
    below = status["tiers"][1:]
    waiting = any(tier["wanted"] or tier["scanning"] for tier in below)
    waiting = waiting or status["events"]["journal"]["holding"]
    return not (status["operations"] or status["loads_waiting"] or waiting)


@contextlib.contextmanager
def short_folder(purpose: str) -> Iterator[Path]:
    """Give a temporary folder short enough for the path of a Unix socket, and remove it at the end."""
    folder = tempfile.mkdtemp(prefix=f"kvtierd-{purpose}-")
    if len(os.fsencode(folder)) > FOLDER_MAX:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=f"kvtierd-{purpose}-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class LocalDaemon:
    """``kvtierd serve`` on a tier file in the shape of the quickstart: a CPU tier and one on disk.

    Everything that it writes lies under ``folder``, which has to be short (:func:`short_folder`) and is not
    removed. A stopped daemon can be started again on the same folder and ports.
    ``python`` runs it, where the caller's own environment cannot.
    ``changes`` replaces whole top-level sections of the tier file; ``paranoid`` has it check every invariant
    after every turn.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pool_bytes: int,
        disk_bytes: int,
        changes: dict[str, Any] | None = None,
        paranoid: bool = False,
        python: str = sys.executable,
    ) -> None:
        self.folder = folder
        self._python = python
        self._options = ("--paranoid",) if paranoid else ()
        self.socket = str(folder / "run" / "engine.sock")
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay = f"tcp://127.0.0.1:{free_port()}"
        self.config = folder / "kvtierd.yaml"
        self.log = folder / "kvtierd.log"
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("run", "state", "disk"):
            (folder / name).mkdir(exist_ok=True)
        body = self._body(pool_bytes, disk_bytes) | (changes or {})
        # JSON is YAML; no YAML library is needed to write it.
        self.config.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    def _body(self, pool_bytes: int, disk_bytes: int) -> dict[str, Any]:
        disk = {"name": "disk", "type": "fs", "path": str(self.folder / "disk"), "locality": "LOCAL"}
        audience = {
            "name": "default",
            "bind": self.endpoint,
            "replay": self.replay,
            "topic": "",
            "form": "map",
        }
        return {
            "version": 1,
            "runtime_dir": str(self.folder / "run"),
            "state_dir": str(self.folder / "state"),
            "pool": {"bytes": f"{pool_bytes >> 10}KiB", "backing": "memfd"},
            "tiers": [
                {"name": "cpu", "type": "cpu", "policy": "lru"},
                {**disk, "max_bytes": f"{disk_bytes >> 10}KiB", "events": True},
            ],
            "events": {"enabled": True, "heartbeat": "1s", "audiences": [audience]},
            "admin": {"listen": None},
            "log": {"format": "text"},
        }

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it and wait until engines can attach.

        Raises:
            Unavailable: it ended or did not get ready in time; carries the end of its log.
        """
        process = self.launch()
        try:
            wait_for(self._ready_or_ended, "the daemon to be ready", timeout=START_SECONDS)
        except TimeoutError as error:
            self.stop()
            raise Unavailable(f"{error}; its log ends:\n{self.log_tail()}") from None
        except BaseException:  # a Ctrl-C must not leave it behind
            self.stop()
            raise
        if process.poll() is not None:
            code, self._process = process.returncode, None
            raise Unavailable(f"the daemon ended with code {code}; its log ends:\n{self.log_tail()}")

    def take_over(self, *options: str) -> int:
        """Start another one that takes over from it; return the exit code of the one that ran.

        Raises:
            Unavailable: it did not, and ended; the other one runs on.
        """
        before, self._process = self._process, None
        assert before is not None
        after = self.launch("--takeover", *options)
        try:
            wait_for(
                lambda: before.poll() is not None or after.poll() is not None,
                "the takeover",
                timeout=START_SECONDS,
            )
        finally:
            if before.poll() is None:
                self._process = before
        if self._process is before:
            after.kill()
            code = after.wait(STOP_SECONDS)
            raise Unavailable(f"the new daemon ended with code {code}; its log ends:\n{self.log_tail()}")
        return before.returncode

    def launch(self, *options: str) -> subprocess.Popen[bytes]:
        """Start it and wait for nothing."""
        command = [self._python, "-m", "kvtierd", "serve", "--config", str(self.config)]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, *self._options, *options],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,  # a terminal's Ctrl-C is for the caller, who stops us in order
            )
        return self._process

    def _ready_or_ended(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.socket) == 0

    def stop(self) -> int | None:
        """Ask it to stop, kill it after ``STOP_SECONDS``; returns its exit code (None: did not run)."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that it logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> LocalDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

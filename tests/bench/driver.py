"""One subject of the comparison: an adapter in a process and environment of its own, asked in JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ADAPTERS = Path(__file__).with_name("adapters")
DEADLINE = 240.0
"""Seconds for one answer; a rival that takes longer is given up."""
STOP_SECONDS = 30.0

SETTINGS = {
    "OMP_NUM_THREADS": "1",  # torch's threads spin against everything else on a small machine
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class PeerError(Exception):
    """A subject cannot be measured; says why."""


@dataclass(frozen=True)
class Peer:
    """A subject: its adapter, and where that runs.

    ``environment``: a folder below ``.venvs``, or "" for kvtierd's own. A folder without an interpreter is
    laid over that of vLLM.
    """

    name: str
    script: Path
    arguments: tuple[str, ...] = ()
    environment: str = ""

    def command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line and variables; raises :class:`PeerError` without its environment."""
        python, path = sys.executable, str(ROOT)
        if self.environment:
            folder = ROOT / ".venvs" / self.environment
            if not folder.is_dir():
                raise PeerError(f"there is no .venvs/{self.environment}; make bench-peers makes it")
            own = folder / "bin" / "python"
            python = str(own if own.exists() else ROOT / ".venvs" / "vllm" / "bin" / "python")
            path = "" if own.exists() else str(folder)
        variables = {**os.environ, **SETTINGS, "PYTHONPATH": path}
        return [python, str(self.script), *self.arguments], variables


class Running:
    """An adapter that runs."""

    def __init__(self, peer: Peer, log: Path) -> None:
        self.peer = peer
        command, variables = peer.command()
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink
            )
        self._left = b""

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have it do something; return the result.

        Raises:
            PeerError: it failed, ended or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"its adapter ended: {error}") from None
        answer = json.loads(self._line(time.monotonic() + DEADLINE))
        if "error" in answer:
            raise PeerError(f"{what}: {answer['error']}")
        return answer["ok"]

    def _line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._left:
            if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise PeerError(f"no answer in {DEADLINE:g} s")
            more = os.read(fd, 1 << 16)
            if not more:
                raise PeerError("its adapter ended; its log says why")
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return line

    def stop(self) -> None:
        """Hang up and wait for its end."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
        process.stdout.close()


@contextlib.contextmanager
def running(peer: Peer, logs: Path) -> Iterator[Running]:
    """Run an adapter for the body; what it and its libraries print goes to a file in ``logs``."""
    name = "".join(letter if letter.isalnum() else "-" for letter in peer.name.lower())
    adapter = Running(peer, logs / f"{name}.log")
    try:
        yield adapter
    finally:
        adapter.stop()


def resident(pids: list[int]) -> int:
    """Return the private resident memory of processes in bytes; shared memory (a pool) is not in it."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) << 10
    return total

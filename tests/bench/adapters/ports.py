"""Ports for a rival's server, and the wait until it listens."""

from __future__ import annotations

import socket
import subprocess
import time

DEADLINE = 30.0
POLL = 0.02


def free_ports(count: int) -> list[int]:
    """Return ports of this host that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_for_port(process: subprocess.Popen[bytes], port: int, deadline: float = DEADLINE) -> None:
    """Wait until a server listens; one that ended, or does not within ``deadline`` seconds, is killed.

    Raises:
        RuntimeError: it did not start.
    """
    end = time.monotonic() + deadline
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                raise RuntimeError(f"{process.args!r} did not start")
            time.sleep(POLL)

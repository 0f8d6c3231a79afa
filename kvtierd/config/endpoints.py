"""ZeroMQ endpoints and listen addresses: their form, and which of them collide. No I/O."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

UNIX_PATH_MAX = 107
"""Longest path of a Unix socket: ``sockaddr_un.sun_path`` less its terminating zero (unix(7))."""

_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a socket binds: ``host`` and ``port`` for TCP, ``path`` for IPC."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this pod (its network namespace, its mounts) can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        """Whether it takes the port on every address."""
        return self.host in ("*", "0.0.0.0", "[::]")  # noqa: S104  # recognised, not bound

    def collides(self, other: Endpoint) -> bool:
        """Whether both cannot be bound at once. Port 0 (any free port) never collides."""
        if self.path or other.path:
            return self.path == other.path
        if not self.port or self.port != other.port:
            return False
        return self.host == other.host or self.is_wildcard or other.is_wildcard


def parse_listen(value: str) -> Endpoint:
    """Parse ``host:port``.

    Raises:
        ValueError: it is not of that form.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not _HOST.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", port, re.ASCII):
        raise ValueError("write host:port, for instance 127.0.0.1:9557 (IPv6 hosts in brackets)")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ValueError(f"{host} is not an IPv6 address") from None
    if int(port) > 65535:
        raise ValueError("a port is at most 65535")
    return Endpoint(host=host, port=int(port))


def parse_endpoint(value: str) -> Endpoint:
    """Parse ``tcp://host:port`` or ``ipc:///absolute/path``.

    Raises:
        ValueError: it is neither, or the path is too long for a Unix socket.
    """
    scheme, separator, rest = value.partition("://")
    if separator and scheme == "tcp":
        return parse_listen(rest)
    if not separator or scheme != "ipc":
        raise ValueError("write tcp://host:port or ipc:///absolute/path")
    if not rest.startswith("/") or rest.endswith("/") or "\0" in rest:
        raise ValueError("an ipc endpoint needs an absolute path: ipc:///run/kvtierd/events.sock")
    if len(rest.encode()) > UNIX_PATH_MAX:
        raise ValueError(f"the path of a Unix socket has at most {UNIX_PATH_MAX} bytes")
    return Endpoint(path=rest)


def offset(value: str, rank: int) -> str:
    """Return the endpoint of a dp rank, as vLLM counts them: the port + ``rank``."""
    if not rank:
        return value
    address, _, port = value.rpartition(":")
    return f"{address}:{int(port) + rank}"

"""What every test of a real daemon stands on."""

from __future__ import annotations

from pathlib import Path

from kvtierd.testing.local_daemon import free_port


def test_ports_are_not_those_that_outgoing_connections_get() -> None:
    """One that connected in between had taken the port of a server that was to start."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    outgoing = range(int(first), int(last) + 1)
    assert all(1024 <= port < 32_768 for port in ports)
    if outgoing.start >= 32_768:  # Linux's own setting
        assert not any(port in outgoing for port in ports)

"""What every test of a real daemon stands on."""

from __future__ import annotations

from kvtierd.testing.local_daemon import free_port

OUTGOING = 32_768
"""The first port that Linux gives to a connection of its own accord (``ip_local_port_range``)."""


def test_ports_differ_and_are_none_that_outgoing_connections_get() -> None:
    """One that connected in between had taken the port of a server that was to start."""
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert all(1024 <= port < OUTGOING for port in ports)

"""What the service manager hears of the service's life, at a datagram socket as its own."""

import os
import socket

import pytest

from kvtierd.edges.systemd import Life


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A socket that hears what is notified, without waiting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def heard(sock):
    """Everything that was said so far, a list of lines for each message."""
    said = []
    while True:
        try:
            said.append(sock.recv(4096).decode().splitlines())
        except BlockingIOError:
            return said


def test_a_start_a_reload_and_a_stop_are_told_as_the_protocol_wants_them(manager):
    life = Life({}, clock=lambda: 12.5)
    life.ready("serving")
    life.reloading()
    life.ready("reload applied")
    life.stopping()
    assert heard(manager) == [
        ["READY=1", "STATUS=serving"],
        ["RELOADING=1", "MONOTONIC_USEC=12500000"],
        ["READY=1", "STATUS=reload applied"],
        ["STOPPING=1", "STATUS=stopping"],
    ]


def test_the_watchdog_is_fed_twice_in_its_time_and_only_by_turns(manager):
    now = [100.0]
    life = Life({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, clock=lambda: now[0])
    assert heard(manager) == []
    for seconds in (0, 1, 13.9, 15.1, 16):
        now[0] = 100.0 + seconds
        life.turned()
    assert heard(manager) == [["WATCHDOG=1"]] * 2


@pytest.mark.parametrize("environ", [{}, {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "x"}])
def test_a_watchdog_that_is_not_there_or_another_s_is_not_fed(manager, environ):
    Life(environ).turned()
    assert heard(manager) == []


def test_without_a_manager_or_with_one_that_does_not_listen_nothing_happens_and_nobody_waits(
    manager, monkeypatch
):
    life = Life({"WATCHDOG_USEC": "1"}, clock=iter(range(1 << 20)).__next__)
    for _ in range(2000):  # its queue is full long before
        life.turned()
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    life.ready("x")
    monkeypatch.delenv("NOTIFY_SOCKET")
    life.ready("x")

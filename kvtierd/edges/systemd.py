"""The service manager: what it is told of the service's life, and the descriptors that it keeps.

The protocol is sd_notify(3) and sd_listen_fds(3): a datagram with a descriptor to ``$NOTIFY_SOCKET``, and
inherited descriptors from 3 on, named by ``$LISTEN_FDNAMES``. The unit needs ``FileDescriptorStoreMax=``:
without it the manager closes what it is sent, and says nothing. Where there is no manager nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

_FIRST = 3


def stored(name: str, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the descriptor that an earlier run of this service had stored under a name; the caller's."""
    environ = os.environ if environ is None else environ
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    count = int(environ.get("LISTEN_FDS", "0"))
    for number, other in enumerate(names[:count]):
        if other == name:
            descriptor = _FIRST + number
            os.set_inheritable(descriptor, False)
            return descriptor
    return None


def store(name: str, descriptor: int) -> bool:
    """Have the service manager keep a descriptor under a name; whether it was there to take it."""
    return _notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", descriptor)


def forget(name: str) -> bool:
    """Have it close what it keeps under a name; whether it was there to hear it."""
    return _notify(f"FDSTOREREMOVE=1\nFDNAME={name}")


class Manager(NamedTuple):
    """Where the manager listens (empty: nowhere), and how often its watchdog is fed (seconds, 0: never)."""

    address: str
    period: float


class Life:
    """Tells the manager how the service is; it never waits for that.

    ``clock`` is monotonic, in seconds, and the one that the manager goes by (``CLOCK_MONOTONIC``).
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        environ = os.environ if environ is None else environ
        self._clock = clock
        own = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        wanted = environ.get("WATCHDOG_USEC", "")
        self._period = int(wanted) / 2e6 if own and wanted.isdigit() else 0.0
        self._next = 0.0

    def ready(self, status: str) -> None:
        """Say that it serves, after a start or a reload."""
        _notify(f"READY=1\nSTATUS={status}", wait=0.0)

    def status(self, status: str) -> None:
        """Say how it is in words, for ``systemctl status``."""
        _notify(f"STATUS={status}", wait=0.0)

    def reloading(self) -> None:
        """Say that a reload begins; :meth:`ready` ends it."""
        _notify(f"RELOADING=1\nMONOTONIC_USEC={int(self._clock() * 1e6)}", wait=0.0)

    def stopping(self) -> None:
        """Say that it stops."""
        _notify("STOPPING=1\nSTATUS=stopping", wait=0.0)

    @property
    def manager(self) -> Manager:
        """The manager that is told of this service."""
        return Manager(os.environ.get("NOTIFY_SOCKET", ""), self._period)

    def hand_over(self, pid: int) -> None:
        """Say that another process is the service from now on; it has to be one of this unit's."""
        _notify(f"MAINPID={pid}")

    def take_over(self, manager: Manager) -> None:
        """Go on in the place of a service that handed over, unless this process has a manager of its own."""
        if manager.address and os.environ.get("NOTIFY_SOCKET", manager.address) == manager.address:
            os.environ["NOTIFY_SOCKET"] = manager.address
            self._period = manager.period

    def turned(self) -> None:
        """Feed the watchdog, if there is one and it is time to; to be called by what must not stand still."""
        now = self._clock()
        if self._period and now >= self._next:
            self._next = now + self._period
            _notify("WATCHDOG=1", wait=0.0)


def _notify(message: str, *descriptors: int, wait: float = 1.0) -> bool:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(wait)
        with contextlib.suppress(OSError):
            sock.connect(address)
            socket.send_fds(sock, [message.encode()], list(descriptors))
            return True
    return False

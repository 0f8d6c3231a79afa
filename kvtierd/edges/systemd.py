"""The service manager's file descriptor store: what it keeps for the next start of the service.

The protocol is sd_notify(3) and sd_listen_fds(3): a datagram with a descriptor to ``$NOTIFY_SOCKET``, and
inherited descriptors from 3 on, named by ``$LISTEN_FDNAMES``. The unit needs ``FileDescriptorStoreMax=``:
without it the manager closes what it is sent, and says nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

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


def _notify(message: str, *descriptors: int) -> bool:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(1.0)
        with contextlib.suppress(OSError):
            sock.connect(address)
            socket.send_fds(sock, [message.encode()], list(descriptors))
            return True
    return False

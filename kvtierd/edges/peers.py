"""Who is at the other end of a Unix socket, as the kernel tells it, and whether it may be there."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

_SO_PEERGROUPS = 59
"""Linux 4.13; Python has no name for it."""
_MOST_BYTES = 1024
"""What Python's getsockopt can take: 256 groups; a peer of more is known by its first group only."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the time when it connected. One of another user namespace has the overflow ids (65534)."""

    pid: int
    uid: int
    groups: frozenset[int]

    def __str__(self) -> str:
        return f"uid {self.uid}, groups {', '.join(map(str, sorted(self.groups)))}"


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected.

    Raises:
        OSError: the socket is not connected.
    """
    size = struct.calcsize("iII")
    pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    groups = {gid}
    with contextlib.suppress(OSError):
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
        groups.update(struct.unpack(f"{len(raw) // 4}I", raw))
    return Peer(pid, uid, frozenset(groups))


@dataclass(frozen=True, slots=True)
class Allowed:
    """An allow-list; both parts empty let in whomever the socket's mode lets in.

    The daemon's own user is always let in: it could read the daemon's memory anyway.
    """

    uids: Collection[int] = ()
    gids: Collection[int] = ()
    own_uid: int = -1

    def lets_in(self, peer: Peer) -> bool:
        """Say whether a peer may use the socket."""
        if not self.uids and not self.gids:
            return True
        return peer.uid in (self.own_uid, *self.uids) or not peer.groups.isdisjoint(self.gids)

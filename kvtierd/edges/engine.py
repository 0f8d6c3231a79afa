"""A Unix socket of the daemon: its connections, their limits, and whose turn it is.

Nobody can make the others wait. What a connection sends is served a small portion at a time; whoever has
sent more than that waits in one line with all others who did, and each turn of the loop serves one of them.
A client that asks now and then never meets that line.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtierd.core.effects import Reply
from kvtierd.core.inventory import Survey
from kvtierd.core.stimuli import Asked, Request, SessionClosed
from kvtierd.edges.connection import EngineConnection
from kvtierd.edges.liveness import Liveness
from kvtierd.edges.peers import Allowed
from kvtierd.edges.presence import SharedPresence
from kvtierd.edges.request_figures import RequestFigures
from kvtierd.edges.unix_socket import Permissions, inode_of, listen, remove_own
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
STATUS_SECONDS = 0.1
LOGGED_PER_SWEEP = 20
"""Closed strangers that get a line of their own in a second; the others are only counted."""

COUNTERS = (
    "accepted",
    "protocol_errors",
    "busy",
    "refused",
    "not_allowed",
    "timeouts",
    "shed",
    "unlogged",
)

Orders = Mapping[type[Request], Callable[[int, Any], Reply | None]]
Turn = Callable[[Sequence[Asked | SessionClosed]], None]
Glance = Callable[[int, Request], Reply | None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the connections of one socket may hold; the defaults are those of the tier file."""

    max_frame_bytes: int = 16 << 20
    max_connections: int = 256
    max_requests: int = 4096
    max_buffered: int = 64 << 20
    hello_timeout: float = 5.0
    frame_timeout: float = 30.0


class EngineServer:
    """All connections of one Unix socket.

    ``turn`` runs requests through the daemon; ``glance`` answers those that need no turn (``None``: it does);
    ``status`` makes the body of a status report. ``pool_fd`` is ``None`` on the control socket, where nobody
    can attach; ``presence`` goes to clients that ask for it. ``survey`` begins a survey of the tier named, or
    says why not; only the control socket has it, since it shows every tenant's blocks. ``orders``: what else
    only the control socket answers, by the request's type; each gets the connection's number and the request,
    and returns ``None`` where its answer is delivered later.
    """

    def __init__(
        self,
        path: Path,
        *,
        turn: Turn,
        glance: Glance,
        status: Callable[[], dict[str, Any]],
        survey: Callable[[str | None], Survey | str] | None = None,
        orders: Orders | None = None,
        liveness: Liveness | None = None,
        pool_fd: int | None = None,
        presence: SharedPresence | None = None,
        limits: Limits,
        permissions: Permissions,
        allowed: Allowed,
        daemon: str,
        numbers: Iterable[int] | None = None,
    ) -> None:
        self.path = path
        self.turn = turn
        self.glance = glance
        self.status = status
        self.survey = survey
        self.orders = orders or {}
        self.liveness = liveness
        self.pool_fd = pool_fd
        self.presence = presence
        self.limits = limits
        self.permissions = permissions
        self.allowed = allowed
        self.daemon = daemon
        self.connections: dict[int, EngineConnection] = {}
        self.buffered = 0
        """Bytes that connections hold: half sent requests and unread answers."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.requests = RequestFigures()
        self._numbers = iter(numbers if numbers is not None else itertools.count(1))
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        self._inode: tuple[int, int] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: deque[EngineConnection] = deque()
        self._recent: tuple[float, dict[str, Any]] | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._lines_left = LOGGED_PER_SWEEP

    # -- life ---------------------------------------------------------------------------------------

    async def start(self, listener: int | None = None) -> None:
        """Listen; the socket appears when it answers. ``listener``: one that another daemon handed over.

        Raises:
            CannotCreate: its place is taken, or cannot be used.
        """
        self._listener = (
            listen(self.path, self.permissions) if listener is None else socket.socket(fileno=listener)
        )
        self._inode = inode_of(self.path)
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_unix_server(
            lambda: EngineConnection(self, next(self._numbers)), sock=self._listener
        )
        self._sweep()

    async def stop_listening(self, *, keep: bool = False) -> None:
        """Take no new connections; the socket disappears, unless it is to be kept for another daemon."""
        if self._server is not None:
            self._server.close()
            self._server = None
            if not keep:
                remove_own(self.path, self._inode)

    def freeze(self) -> int:
        """Take no more requests and connections; return a descriptor of the listening socket."""
        assert self._listener is not None
        listener = os.dup(self._listener.fileno())
        for connection in self.connections.values():
            connection.freeze()
        return listener

    def next_number(self) -> int:
        """Return a connection number that was not given out yet."""
        return next(self._numbers)

    def close(self) -> None:
        """Close all connections after what is queued for them."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for connection in list(self.connections.values()):
            connection.close()

    def deliver(self, session: int, replies: Sequence[Reply]) -> None:
        """Send replies to a connection that may be gone by now."""
        connection = self.connections.get(session)
        if connection is not None:
            connection.deliver(replies)

    def statistics(self) -> dict[str, Any]:
        """Return counters and what is held now, by name."""
        return {
            **self.counters,
            "connections": len(self.connections),
            "buffered_bytes": self.buffered,
            "in_line": len(self._line),
            "unanswered": sum(connection.outstanding for connection in self.connections.values()),
            "requests": self.requests.as_dict(),
            "liveness_pipes": 0 if self.liveness is None else self.liveness.pipes,
        }

    def recent_status(self) -> dict[str, Any]:
        """Return a status that may be a moment old, for who asks without a pause: making one is dear."""
        assert self._loop is not None
        now = self._loop.time()
        if self._recent is None or now - self._recent[0] > STATUS_SECONDS:
            self._recent = (now, self.status())
        return self._recent[1]

    # -- whose turn it is ---------------------------------------------------------------------------

    def line_up(self, connection: EngineConnection) -> None:
        """Put a connection that has more to say at the end of the line; it is not in it yet."""
        assert self._loop is not None
        self._line.append(connection)
        if len(self._line) == 1:
            self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        """Serve one portion of the first in line, then let everybody else be heard before the next."""
        assert self._loop is not None
        connection = self._line.popleft()
        try:
            if connection.go_on():
                self._line.append(connection)
        finally:
            if self._line:
                self._loop.call_soon(self._serve_next)

    # -- limits -------------------------------------------------------------------------------------

    def admit(self, connection: EngineConnection) -> bool:
        """Take a new connection in, if need be instead of the oldest that never attached."""
        if len(self.connections) >= self.limits.max_connections:
            idle = next((other for other in self.connections.values() if not other.attached), None)
            self.counters["refused"] += 1
            if idle is None:
                message = "connection %d refused: %d are attached"
                self.complain("connection_refused", message, connection.number, len(self.connections))
                return False
            idle.abort("newer ones need its place")
        self.counters["accepted"] += 1
        self.connections[connection.number] = connection
        return True

    def leave(self, connection: EngineConnection) -> None:
        """Forget a connection."""
        if self.connections.pop(connection.number, None) is not None:
            self.buffered -= connection.held

    def account(self, connection: EngineConnection, held: int) -> None:
        """Note what a connection makes the daemon hold; beyond the limit the largest is closed."""
        if connection.number not in self.connections:
            return
        self.buffered += held - connection.held
        connection.held = held
        if self.buffered > self.limits.max_buffered:
            self._shed()

    def _shed(self) -> None:
        for connection in list(self.connections.values()):  # answers may have been read meanwhile
            now = connection.holds()
            self.buffered += now - connection.held
            connection.held = now
        while self.buffered > self.limits.max_buffered:
            largest = max(self.connections.values(), key=lambda connection: connection.held)
            self.counters["shed"] += 1
            largest.abort(
                f"it holds {largest.held} bytes of half sent or unread messages, all together {self.buffered}"
                f" of {self.limits.max_buffered} (engine.max_buffered)"
            )

    def _sweep(self) -> None:
        """Close connections that are late with their hello or in the middle of a message."""
        assert self._loop is not None
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)
        if self._lines_left < 0:
            log.warning(
                "%s: %d more such lines in a second",
                self.path.name,
                -self._lines_left,
                extra=event(
                    "lines_left_out", of="connection_closed", whose=self.path.name, count=-self._lines_left
                ),
            )
        self._lines_left = LOGGED_PER_SWEEP
        now = self._loop.time()
        for connection in list(self.connections.values()):
            late = connection.late(now)
            if late:
                self.counters["timeouts"] += 1
                connection.abort(late)

    def complain(self, name: str, message: str, *values: object, **fields: object) -> None:
        """Log what a stranger did, unless strangers have filled the log this second already."""
        self._lines_left -= 1
        if self._lines_left >= 0:
            extra = event(name, socket=self.path.name, **fields)
            log.warning(f"%s: {message}", self.path.name, *values, extra=extra)  # noqa: G004 - a constant
        else:
            self.counters["unlogged"] += 1

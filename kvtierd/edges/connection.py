"""One connection of a Unix socket: bytes in, requests through turns, answers and descriptors out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvtierd.core.effects import Attached, ErrorCode, Refused, Reply
from kvtierd.core.stimuli import Asked, Attach, LadderRequest, SessionClosed
from kvtierd.edges.peers import peer_of
from kvtierd.edges.request_figures import Unanswered
from kvtierd.edges.survey_pages import Pages
from kvtierd.errors import RemoteProtocolError
from kvtierd.logs.events import event
from kvtierd.wire.handover import HandedConnection
from kvtierd.wire.messages import (
    PRESENCE,
    Order,
    StatusReport,
    StatusRequest,
    SurveyRequest,
    Unattached,
    verb_of,
)
from kvtierd.wire.session import ServerConnection, State

if TYPE_CHECKING:
    from kvtierd.edges.engine import EngineServer

log = logging.getLogger(__name__)

Asking = Unattached | LadderRequest

WRITE_HIGH_WATER = 1 << 20
READ_AHEAD = 64 << 10
"""No more is read from a connection that waits in line with this much."""
PORTION_FRAMES = 4
PORTION_BYTES = 2 << 10
"""What is served of one connection before others are heard: so many messages, at least one."""


class EngineConnection(asyncio.Protocol):
    """One connection. Until it is attached its answers go straight to the socket, descriptors included."""

    def __init__(self, server: EngineServer, number: int) -> None:
        self._server = server
        self.number = number
        self.attached = False
        self.in_line = False
        """Whether whole requests wait until it is this connection's turn."""
        self.held = 0
        """Bytes that the server counts for this connection."""
        self._wire = ServerConnection(daemon=server.daemon, max_bytes=server.limits.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._raw: socket.socket | None = None
        self._process = b""
        """Of the attach that was asked for last; the wire lets only one wait."""
        self.outstanding = 0
        """Requests that wait for a turn's answer."""
        self._asked = Unanswered(server.requests)
        self._pages = Pages(server.survey, server.path)
        self._loop = asyncio.get_running_loop()
        self._began: float | None = self._loop.time()
        """When it connected, until it said hello; then, since when it owes the rest of a message."""
        self._blocked = False
        self._reading = True

    # -- asyncio.Protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep a second descriptor of the socket: transports cannot pass descriptors."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        try:
            self._raw = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            peer = peer_of(self._raw)
        except OSError as error:
            self._server.complain("connection_closed", "connection %d dropped: %s", self.number, error)
            self._drop_raw()
            transport.abort()
            return
        if not self._server.admit(self):
            self._drop_raw()
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if not self._server.allowed.lets_in(peer):
            self._server.counters["not_allowed"] += 1
            self._server.complain(
                "connection_refused", "connection %d of pid %d may not: %s", self.number, peer.pid, peer
            )
            reason = f"the tier file does not let you in here ({peer}): see its section access"
            self._wire = ServerConnection(daemon=self._server.daemon, unwelcome=reason)

    def data_received(self, data: bytes) -> None:
        """Serve what came, or keep it for when it is this connection's turn."""
        if not self.in_line and self.outstanding < self._server.limits.max_requests:
            request = self._wire.single(data)
            if request is not None:
                self._serve_one(request)
                return
        if self.in_line:
            self._wire.push(data)
            self._account()
            self._choose_reading()
        elif self._serve(data):
            self.in_line = True
            self._choose_reading()
            self._server.line_up(self)

    def pause_writing(self) -> None:
        """Read no more from a client that does not read its answers."""
        self._blocked = True
        self._choose_reading()

    def resume_writing(self) -> None:
        """Go on reading."""
        self._blocked = False
        self._account()
        self._choose_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the ladder; what the session held is quarantined there."""
        self._server.leave(self)
        self._drop_raw()
        self._transport = None
        if self.attached:
            self.attached = False
            self._server.turn([SessionClosed(self.number)])

    # -- in -----------------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Serve the next portion; whether there is still more."""
        self.in_line = self._transport is not None and self._serve(b"")
        self._choose_reading()
        return self.in_line

    def _serve_one(self, request: LadderRequest) -> None:
        """Serve what came alone: at sight, or in a turn of its own."""
        now = time.monotonic()
        found = self._server.glance(self.number, request)
        if found is not None:
            self._write(self._wire.send(found))
            self._server.requests.glanced(type(request), time.monotonic() - now)
            return
        self._asked.asked(request, now)
        self.outstanding += 1
        self._server.turn((Asked(self.number, request),))

    def _serve(self, data: bytes) -> bool:
        """Run a portion of the requests as one turn; whether whole ones are left."""
        owed = self._wire.pending + len(data)
        try:
            requests = self._wire.receive(data, frames=PORTION_FRAMES, size=PORTION_BYTES)
        except RemoteProtocolError as error:
            self._server.counters["protocol_errors"] += 1
            self._server.complain("connection_closed", "connection %d closed: %s", self.number, error)
            self._flush()
            self.close()
            return False
        self._flush()
        asked: list[Asked | SessionClosed] = []
        now = time.monotonic()
        for request in self._answer_at_sight(requests):
            self._asked.asked(request, now)
            left = self._answer(request)
            if left is not None:
                asked.append(Asked(self.number, left))
        if asked:
            self._server.turn(asked)
        if self._wire.closed:
            self.close()
            return False
        self._watch_progress(owed)
        self._account()
        return self._wire.ready

    def _answer_at_sight(self, requests: list[Asking]) -> list[Asking]:
        """Answer those in front that need no turn; return the others, which may change what comes after."""
        frames: list[bytes] = []
        for request in requests:
            began = time.monotonic()
            found = self._server.glance(self.number, request)
            if found is None:
                break
            frames.append(self._wire.send(found))
            self._server.requests.glanced(type(request), time.monotonic() - began)
        self._write(b"".join(frames))
        return requests[len(frames) :]

    def _answer(self, request: Asking) -> LadderRequest | None:
        """Answer what needs no turn; return what does."""
        if isinstance(request, StatusRequest):
            status = self._server.recent_status if self.in_line else self._server.status
            self._send([StatusReport(id=request.id, body=status())])
        elif isinstance(request, SurveyRequest):
            self._send([self._pages.next(request)])
        elif isinstance(request, Order):
            self._order(request)
        elif (refusal := self._refusal(request)) is not None:
            self._send([refusal])
        else:
            if isinstance(request, Attach):
                self._process = request.process
            self.outstanding += 1
            return request
        return None

    def _watch_progress(self, owed: int) -> None:
        """Note since when the rest of a message is owed; ``owed``: what was held before this portion."""
        pending = self._wire.pending
        if self._wire.state is State.NEW:
            return
        if not pending:
            self._began = None
        elif self._began is None or pending < owed:
            self._began = self._loop.time()

    def late(self, now: float) -> str:
        """Return what this connection is late with, or nothing."""
        if self._began is None or self.in_line or self._blocked:
            return ""
        greeted, limits = self._wire.state is not State.NEW, self._server.limits
        patience = limits.frame_timeout if greeted else limits.hello_timeout
        if now - self._began <= patience:
            return ""
        if greeted:
            return f"half a message for {patience:g} s (engine.frame_timeout)"
        return f"no hello within {patience:g} s (engine.hello_timeout)"

    def _choose_reading(self) -> None:
        """Read, unless answers are not read or enough waits in line."""
        reading = not self._blocked and not (self.in_line and self._wire.pending > READ_AHEAD)
        if reading == self._reading or self._transport is None or self._transport.is_closing():
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def holds(self) -> int:
        """Return how many bytes of messages are held for this connection."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._wire.pending + unsent

    def _account(self) -> None:
        held = self.holds()
        if held != self.held:
            self._server.account(self, held)

    def _refusal(self, request: LadderRequest) -> Refused | None:
        server = self._server
        if isinstance(request, Attach):
            if server.pool_fd is None:
                where = server.path.with_name("engine.sock")
                return Refused(
                    id=request.id, code=ErrorCode.NOT_ALLOWED, message=f"engines attach at {where}"
                )
            if server.liveness is not None and server.liveness.pipes >= 4 * server.limits.max_connections:
                server.counters["busy"] += 1
                message = f"{server.liveness.pipes} descriptors of living processes are watched already"
                return Refused(id=request.id, code=ErrorCode.BUSY, message=message)
        if self.outstanding >= server.limits.max_requests:
            server.counters["busy"] += 1
            message = f"{self.outstanding} requests are unanswered (engine.max_requests)"
            return Refused(id=request.id, code=ErrorCode.BUSY, message=message)
        return None

    def _order(self, request: Order) -> None:
        """Carry an order out; its answer may come later, by :meth:`deliver`."""
        order = self._server.orders.get(type(request))
        if order is None:
            where = self._server.path.with_name("control.sock")
            message = f"{verb_of(type(request))} is answered at {where}"
            self._send([Refused(id=request.id, code=ErrorCode.NOT_ALLOWED, message=message)])
            return
        self.outstanding += 1
        if (reply := order(self.number, request)) is not None:
            self.deliver([reply])

    # -- out ----------------------------------------------------------------------------------------

    def deliver(self, replies: Sequence[Reply]) -> None:
        """Send the ladder's replies and notices."""
        self.outstanding -= len([reply for reply in replies if reply.id])
        self._send(replies)
        self._account()
        if self._wire.closed:
            self.close()

    def _send(self, replies: Sequence[Reply]) -> None:
        now = time.monotonic()
        frames: list[bytes] = []
        for reply in replies:
            self._asked.answered(reply, now)
            if isinstance(reply, Refused):  # what the engine logs of it leads to our own lines
                where = f"{reply.message} (session {self.number}, request {reply.id})"
                reply = msgspec.structs.replace(reply, message=where)
            if isinstance(reply, Attached):
                self._write(b"".join(frames))
                frames.clear()
                self._send_attached(reply)
            else:
                frames.append(self._wire.send(reply))
        self._write(b"".join(frames))

    def _flush(self) -> None:
        self._write(b"".join(self._wire.take_output()))

    def _write(self, data: bytes) -> None:
        """Send now what the socket takes, and the rest later."""
        transport, raw = self._transport, self._raw
        if not data or transport is None or raw is None or transport.is_closing():
            return
        if not transport.get_write_buffer_size():
            try:
                sent = raw.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # connection_lost follows
            if sent == len(data):
                if self.held:
                    self._account()
                return
            data = data[sent:]
        transport.write(data)
        self._account()

    def _send_attached(self, reply: Attached) -> None:
        """Send the frame and its descriptors (pool, liveness, perhaps presence) in one message."""
        liveness, presence = self._server.liveness, self._server.presence
        assert liveness is not None
        assert self._server.pool_fd is not None
        more = []
        if presence is not None and PRESENCE in self._wire.features:
            more = [presence.fd]
            reply = msgspec.structs.replace(reply, presence_bytes=len(presence.cells))
        frame = self._wire.send(reply)
        transport, raw = self._transport, self._raw
        self.attached = True
        if transport is None or raw is None or transport.is_closing():
            liveness.not_handed_out(self._process)
            return
        if transport.get_write_buffer_size():
            log.warning(
                "connection %d attached without reading its answers; closed",
                self.number,
                extra=event("connection_closed", connection=self.number),
            )
            liveness.not_handed_out(self._process)
            self.close()
            return
        pipe = -1
        try:
            pipe = liveness.hand_out(self._process, raw)
            sent = socket.send_fds(raw, [frame], [self._server.pool_fd, pipe, *more])
        except OSError as error:
            log.warning(
                "connection %d: the pool could not be handed over: %s",
                self.number,
                error,
                extra=event("pool_not_handed_over", connection=self.number),
            )
            self.close()
            return
        finally:
            if pipe >= 0:
                os.close(pipe)
        if sent < len(frame):
            transport.write(frame[sent:])

    # -- a takeover ---------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Take no more requests."""
        self._blocked = True
        self._choose_reading()

    def hand_over(self) -> tuple[HandedConnection, int] | None:
        """Return a frozen connection's state and a descriptor of it; nothing if it has to connect again."""
        if not self.attached or self._wire.state is not State.ATTACHED or self._raw is None:
            return None
        if self.outstanding or self._transport is None or self._transport.get_write_buffer_size():
            return None
        wire = self._wire
        handed = HandedConnection(
            self.number, wire.version, wire.features, wire.client, self._process, wire.rest()
        )
        return handed, os.dup(self._raw.fileno())

    @classmethod
    async def adopt(cls, server: EngineServer, handed: HandedConnection, descriptor: int) -> None:
        """Go on with a connection that another daemon handed over."""
        connection = cls(server, handed.number)
        connection._wire.resume(handed.version, handed.features, handed.client)
        connection._process, connection.attached, connection._began = handed.process, True, None
        sock = socket.socket(fileno=descriptor)
        await connection._loop.connect_accepted_socket(lambda: connection, sock)
        if handed.pending:
            connection.data_received(handed.pending)

    # -- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close after what is queued."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, and say why."""
        self._server.leave(self)
        self._server.complain("connection_closed", "connection %d closed: %s", self.number, reason)
        if self._transport is not None:
            self._transport.abort()

    def _drop_raw(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None

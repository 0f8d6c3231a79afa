"""The engine socket: bytes of many connections in, turns of the daemon, answers and descriptors out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from kvtierd.core.effects import Attached, ErrorCode, Refused, Reply
from kvtierd.core.inventory import Survey
from kvtierd.core.stimuli import Asked, Attach, SessionClosed
from kvtierd.edges.liveness import Liveness
from kvtierd.edges.unix_socket import listen
from kvtierd.errors import RemoteProtocolError
from kvtierd.wire.messages import StatusReport, StatusRequest, SurveyPage, SurveyRequest
from kvtierd.wire.session import ServerConnection

log = logging.getLogger(__name__)

MAX_OUTSTANDING = 4096
WRITE_HIGH_WATER = 8 << 20

Turn = Callable[[Sequence[Asked | SessionClosed]], None]


class EngineServer:
    """All connections of one Unix socket.

    ``turn`` runs requests through the daemon; ``status`` makes the body of a status report. ``pool_fd`` is
    ``None`` on the control socket, where nobody can attach. ``survey`` begins a survey of the tier named, or
    says why not; only the control socket has it, since it shows every tenant's blocks.
    """

    def __init__(
        self,
        path: Path,
        *,
        turn: Turn,
        status: Callable[[], dict[str, Any]],
        survey: Callable[[str | None], Survey | str] | None = None,
        liveness: Liveness | None = None,
        pool_fd: int | None = None,
        max_frame_bytes: int,
        daemon: str,
        numbers: Iterable[int] | None = None,
    ) -> None:
        self.path = path
        self.turn = turn
        self.status = status
        self.survey = survey
        self.liveness = liveness
        self.pool_fd = pool_fd
        self.max_frame_bytes = max_frame_bytes
        self.daemon = daemon
        self.connections: dict[int, EngineConnection] = {}
        self.counters = {"accepted": 0, "protocol_errors": 0, "busy": 0}
        self._numbers = iter(numbers if numbers is not None else itertools.count(1))
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; the socket appears when it answers."""
        listener = listen(self.path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: EngineConnection(self, next(self._numbers)), sock=listener
        )

    def deliver(self, session: int, replies: Sequence[Reply]) -> None:
        """Send replies to a connection that may be gone by now."""
        connection = self.connections.get(session)
        if connection is not None:
            connection.deliver(replies)

    async def stop_listening(self) -> None:
        """Take no new connections; the socket disappears."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def close(self) -> None:
        """Close all connections after what is queued for them."""
        for connection in list(self.connections.values()):
            connection.close()


class EngineConnection(asyncio.Protocol):
    """One connection. Until it is attached its answers go straight to the socket, descriptors included."""

    def __init__(self, server: EngineServer, number: int) -> None:
        self._server = server
        self.number = number
        self._wire = ServerConnection(daemon=server.daemon, max_bytes=server.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._raw: socket.socket | None = None
        self._process = b""
        """Of the attach that was asked for last; the wire lets only one wait."""
        self._attached = False
        self._outstanding = 0
        self._survey: Survey | None = None

    # -- asyncio.Protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep a second descriptor of the socket: transports cannot pass descriptors."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        try:
            self._raw = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as error:
            log.warning("connection %d dropped: %s", self.number, error)
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._server.counters["accepted"] += 1
        self._server.connections[self.number] = self

    def data_received(self, data: bytes) -> None:
        """Run all requests that arrived together as one turn."""
        try:
            requests = self._wire.receive(data)
        except RemoteProtocolError as error:
            self._server.counters["protocol_errors"] += 1
            log.warning("%s: connection %d closed: %s", self._server.path.name, self.number, error)
            self._flush()
            self.close()
            return
        self._flush()
        asked: list[Asked | SessionClosed] = []
        for request in requests:
            if isinstance(request, StatusRequest):
                self._send([StatusReport(id=request.id, body=self._server.status())])
            elif isinstance(request, SurveyRequest):
                self._send([self._next_page(request)])
            elif (refusal := self._refusal(request)) is not None:
                self._send([refusal])
            else:
                if isinstance(request, Attach):
                    self._process = request.process
                self._outstanding += 1
                asked.append(Asked(self.number, request))
        if asked:
            self._server.turn(asked)
        if self._wire.closed:
            self.close()

    def pause_writing(self) -> None:
        """Read no more from a client that does not read its answers."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the ladder; what the session held is quarantined there."""
        self._server.connections.pop(self.number, None)
        if self._raw is not None:
            self._raw.close()
            self._raw = None
        self._transport = None
        if self._attached:
            self._server.turn([SessionClosed(self.number)])

    # -- out ----------------------------------------------------------------------------------------

    def _refusal(self, request: Any) -> Refused | None:
        if isinstance(request, Attach) and self._server.pool_fd is None:
            where = self._server.path.with_name("engine.sock")
            return Refused(id=request.id, code=ErrorCode.NOT_ALLOWED, message=f"engines attach at {where}")
        if self._outstanding >= MAX_OUTSTANDING:
            self._server.counters["busy"] += 1
            return Refused(
                id=request.id, code=ErrorCode.BUSY, message=f"{MAX_OUTSTANDING} requests are unanswered"
            )
        return None

    def _next_page(self, request: SurveyRequest) -> SurveyPage | Refused:
        if self._server.survey is None:
            where = self._server.path.with_name("control.sock")
            return Refused(id=request.id, code=ErrorCode.NOT_ALLOWED, message=f"surveys are made at {where}")
        if request.cursor == 0:
            begun = self._server.survey(request.tier)
            if isinstance(begun, str):
                return Refused(id=request.id, code=ErrorCode.UNKNOWN_TIER, message=begun)
            self._survey = begun
        survey = self._survey
        if survey is None or request.cursor != survey.position:
            message = "no survey stands at this cursor: begin with cursor 0"
            return Refused(id=request.id, code=ErrorCode.BAD_REQUEST, message=message)
        entries = survey.page(request.limit)
        if len(entries) < request.limit:
            self._survey = None
        cursor = survey.position if self._survey is not None else 0
        return SurveyPage(id=request.id, entries=entries, cursor=cursor, models=survey.models(entries))

    def deliver(self, replies: Sequence[Reply]) -> None:
        """Send the ladder's replies and notices."""
        self._outstanding -= sum(reply.id != 0 for reply in replies)
        self._send(replies)
        if self._wire.closed:
            self.close()

    def _send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Attached):
                self._send_attached(reply)
            else:
                self._write(self._wire.send(reply))

    def _flush(self) -> None:
        for frame in self._wire.take_output():
            self._write(frame)

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._attached or self._transport.get_write_buffer_size():
            self._transport.write(data)
            return
        assert self._raw is not None
        try:
            sent = self._raw.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # connection_lost follows
        if sent < len(data):
            self._transport.write(data[sent:])

    def _send_attached(self, reply: Attached) -> None:
        """Send the frame with the pool's descriptor and a liveness descriptor in one message."""
        frame = self._wire.send(reply)
        transport, raw, liveness = self._transport, self._raw, self._server.liveness
        assert liveness is not None
        assert self._server.pool_fd is not None
        self._attached = True
        if transport is None or raw is None or transport.is_closing():
            liveness.not_handed_out(self._process)
            return
        if transport.get_write_buffer_size():
            log.warning("connection %d attached without reading its answers; closed", self.number)
            liveness.not_handed_out(self._process)
            self.close()
            return
        pipe = -1
        try:
            pipe = liveness.hand_out(self._process)
            sent = socket.send_fds(raw, [frame], [self._server.pool_fd, pipe])
        except OSError as error:
            log.warning("connection %d: the pool could not be handed over: %s", self.number, error)
            self.close()
            return
        finally:
            if pipe >= 0:
                os.close(pipe)
        if sent < len(frame):
            transport.write(frame[sent:])

    def close(self) -> None:
        """Close after what is queued."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

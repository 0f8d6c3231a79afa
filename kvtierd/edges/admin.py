"""The read-only HTTP listener: probes and status. GET only; what changes state goes over the Unix sockets.

``/startupz`` and ``/readyz`` answer 200 once engines can attach (``/readyz`` 503 again while stopping);
``/livez`` looks at the age of the last turn only, never at disks; ``/statusz`` is the status as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

import h11

from kvtierd.config.endpoints import parse_listen
from kvtierd.edges.addresses import cannot_bind

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
STALE_TURN_SECONDS = 10.0
MAX_REQUEST_BYTES = 16 << 10


class AdminServer:
    """A few GET paths on one TCP address."""

    def __init__(
        self, address: str, health: Callable[[], dict[str, Any]], status: Callable[[], dict[str, Any]]
    ) -> None:
        self._address = parse_listen(address)
        self._health = health
        self._status = status
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            CannotBind: the address is taken or not this machine's.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, self._address.host, self._address.port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            where = f"{self._address.host}:{self._address.port}"
            raise cannot_bind("admin.listen", where, error) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._exchange(reader, writer)
        except (TimeoutError, ConnectionError, h11.RemoteProtocolError) as error:
            log.debug("admin request dropped: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await reader.read(MAX_REQUEST_BYTES))
        if not isinstance(event, h11.Request):
            return
        code, body = self._answer(event.method, event.target)
        payload = json.dumps(body, default=str).encode() + b"\n"
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(payload))),
            ("connection", "close"),
        ]
        for part in (
            h11.Response(status_code=code, headers=headers),
            h11.Data(data=payload if event.method != b"HEAD" else b""),
            h11.EndOfMessage(),
        ):
            writer.write(connection.send(part) or b"")
        await writer.drain()

    def _answer(self, method: bytes, target: bytes) -> tuple[int, dict[str, Any]]:
        if method != b"GET":
            return 405, {"error": "only GET is answered here"}
        health = self._health()
        match target.split(b"?")[0]:
            case b"/startupz":
                return (200 if health["state"] != "starting" else 503), health
            case b"/readyz":
                return (200 if health["state"] == "ready" else 503), health
            case b"/livez":
                alive = health["state"] == "starting" or health["turn_age_seconds"] < STALE_TURN_SECONDS
                return (200 if alive else 503), health
            case b"/statusz":
                return 200, self._status()
        return 404, {"error": "paths: /startupz /readyz /livez /statusz"}

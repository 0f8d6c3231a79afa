"""The read-only HTTP listener: probes, status and what else is routed. GET only.

Nothing here changes anything: what changes state goes over the Unix sockets.

``/startupz`` and ``/readyz`` answer 200 once engines can attach (``/readyz`` 503 again while stopping; a tier
in trouble is not unreadiness); ``/livez`` looks at the age of the last turn only, never at disks;
``/statusz`` is the status as JSON, ``/metrics`` what Prometheus reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import h11

from kvtierd.config.endpoints import parse_listen
from kvtierd.edges.addresses import cannot_bind
from kvtierd.edges.metrics.family import Figures
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
STALE_TURN_SECONDS = 10.0
MAX_REQUEST_BYTES = 16 << 10
ALWAYS = (
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("connection", "close"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    code: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Route = Callable[[str], Answer]
"""Answers a GET; gets the request's Accept header, empty where there is none."""


def as_json(code: int, body: Any) -> Answer:
    """Return an answer in JSON."""
    return Answer(code, "application/json", json.dumps(body, default=str).encode() + b"\n")


def metrics_route(figures: Callable[[], Figures]) -> Route:
    """Return the route that exports figures to Prometheus."""
    from kvtierd.edges.metrics.exporter import Exporter

    exporter = Exporter(figures)

    def answer(accept: str) -> Answer:
        return Answer(200, *exporter.render(accept))

    return answer


class AdminServer:
    """A few GET paths on one TCP address. ``routes`` come beside the probes and the status."""

    def __init__(
        self,
        address: str,
        health: Callable[[], dict[str, Any]],
        status: Callable[[], dict[str, Any]],
        routes: Mapping[str, Route] | None = None,
    ) -> None:
        self._address = parse_listen(address)
        self._health = health
        self._routes: dict[str, Route] = {
            "/startupz": lambda _: self._probe(lambda health: health["state"] != "starting"),
            "/readyz": lambda _: self._probe(lambda health: bool(health["ready"])),
            "/livez": lambda _: self._alive(),
            "/statusz": lambda _: as_json(200, status()),
            **(routes or {}),
        }
        self._server: asyncio.Server | None = None
        self._failing: set[str] = set()
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

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        assert self._server is not None
        return self._server.sockets[0].fileno()

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
            log.debug("admin request dropped: %s", error, extra=event("admin_request_dropped"))
        except (
            asyncio.CancelledError
        ):  # the daemon ends; passed on, Python 3.11's streams would log it as an error
            pass
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
        answer = self._answer(event)
        headers = [
            ("content-type", answer.content_type),
            ("content-length", str(len(answer.body))),
            *ALWAYS,
            *answer.headers,
        ]
        for part in (
            h11.Response(status_code=answer.code, headers=headers),
            h11.Data(data=answer.body if event.method != b"HEAD" else b""),
            h11.EndOfMessage(),
        ):
            writer.write(connection.send(part) or b"")
        await writer.drain()

    def _answer(self, request: h11.Request) -> Answer:
        if request.method != b"GET":
            return as_json(405, {"error": "only GET is answered here"})
        path = request.target.split(b"?")[0].decode("ascii", "replace")
        route = self._routes.get(path)
        if route is None:
            return as_json(404, {"error": f"paths: {' '.join(sorted(self._routes))}"})
        accept = b", ".join(value for name, value in request.headers if name == b"accept")
        try:
            answer = route(accept.decode("latin-1"))
        except Exception:  # a page that cannot be made must not take the others down
            if path not in self._failing:
                self._failing.add(path)
                log.exception(
                    "admin: %s cannot be made; later failures are not logged",
                    path,
                    extra=event("admin_failed", path=path),
                )
            return as_json(500, {"error": f"{path} cannot be made; the log says why"})
        self._failing.discard(path)
        return answer

    def _probe(self, passes: Callable[[dict[str, Any]], bool]) -> Answer:
        health = self._health()
        return as_json(200 if passes(health) else 503, health)

    def _alive(self) -> Answer:
        health = self._health()
        alive = health["state"] == "starting" or health["turn_age_seconds"] < STALE_TURN_SECONDS
        return as_json(200 if alive else 503, health)

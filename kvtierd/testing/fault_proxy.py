"""An HTTP proxy in front of an object store that breaks what it is told to break; for tests.

Each request is passed on whole and its answer comes back whole, so a fault hits one request and nothing else.
The Host header is kept, so signatures stay right.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG_LIMIT = 30.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Kind(enum.Enum):
    """What happens to a request. The first three never reach the store."""

    REFUSE = enum.auto()
    HANG = enum.auto()
    RESET = enum.auto()
    FLIP = enum.auto()
    TRUNCATE = enum.auto()
    HANG_BODY = enum.auto()
    LOSE = enum.auto()


@dataclass(frozen=True, slots=True)
class Fault:
    """``status`` and ``code`` are of REFUSE; ``at``: the byte that FLIP changes (negative: from the end).

    TRUNCATE and HANG_BODY send half the body; LOSE does what was asked for and resets the connection.
    """

    kind: Kind
    status: int = 503
    code: str = "SlowDown"
    at: int = -1


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: its number from 0, method and path with its query."""

    number: int
    method: str
    path: str


Rule = Callable[[Seen], Fault | None]


class FaultProxy:
    """Listens on a loopback port until closed; a context manager. ``upstream`` is the store's port."""

    def __init__(self, upstream: int, tls: ssl.SSLContext | None = None) -> None:
        self.upstream = upstream
        self._rule: Rule = lambda seen: None
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._active = 0
        self.peak = 0
        self._server = _Server(self, tls)
        self.port = int(self._server.server_address[1])
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def set(self, rule: Rule | Fault | None) -> None:
        """Break what ``rule`` says from now on: a function of the request, one fault for all, or nothing."""
        if rule is None or isinstance(rule, Fault):
            fault = rule
            self._rule = lambda seen: fault
        else:
            self._rule = rule

    @property
    def seen(self) -> Sequence[Seen]:
        """All requests so far."""
        with self._lock:
            return list(self._seen)

    def decide(self, method: str, path: str) -> Fault | None:
        """Called by the server for each request."""
        with self._lock:
            seen = Seen(len(self._seen), method, path)
            self._seen.append(seen)
        return self._rule(seen)

    def hang(self) -> None:
        """Called by the server: wait for the end."""
        self._released.wait(HANG_LIMIT)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Called by the server: count the requests at once."""
        with self._lock:
            self._active += 1
            self.peak = max(self.peak, self._active)
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1

    def release(self) -> None:
        """End what hangs now."""
        self._released.set()
        self._released = threading.Event()

    def close(self) -> None:
        """End everything."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, proxy: FaultProxy, tls: ssl.SSLContext | None) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def shutdown_request(self, request: object) -> None:
        """Close without the FIN that would come before a reset."""
        assert isinstance(request, socket.socket)
        self.close_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that go away are what tests do."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _handle(self) -> None:
        with self.server.proxy.busy():
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = self.server.proxy.decide(self.command, self.path)
            if fault is None or fault.kind.value > Kind.RESET.value:
                self._pass_on(body, fault)
            elif fault.kind is Kind.REFUSE:
                self._refuse(fault)
            elif fault.kind is Kind.HANG:
                self.server.proxy.hang()
                self._reset()
            else:
                self._reset()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _pass_on(self, body: bytes, fault: Fault | None) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream, timeout=HANG_LIMIT)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            content = bytearray(answer.read())
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP]
        finally:
            upstream.close()
        kind = fault.kind if fault is not None else None
        if kind is Kind.LOSE:
            self._reset()
            return
        if fault is not None and kind is Kind.FLIP and content:
            content[fault.at] ^= 0x10
        self._answer(answer.status, kept, bytes(content), kind)

    def _refuse(self, fault: Fault) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>scripted</Message></Error>"
        self._answer(fault.status, [("Content-Type", "application/xml")], text.encode(), None)

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], content: bytes, kind: Kind | None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = kind in (Kind.TRUNCATE, Kind.HANG_BODY)
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
            self.wfile.flush()
        if kind is Kind.HANG_BODY:
            self.server.proxy.hang()
        if half:
            self.close_connection = True

    def _reset(self) -> None:
        """Close so that the client sees a reset, not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""

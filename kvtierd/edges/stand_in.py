"""Answers HTTP requests on the loop's listening socket while the loop does not."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable
from typing import Any

import h11

REQUEST_SECONDS = 0.5
MAX_REQUEST_BYTES = 16 << 10

Answer = Callable[[str], tuple[int, dict[str, Any]]]


class StandIn:
    """Serves one connection after another. ``listener`` is duplicated; ``answer`` gets the path.

    Connections that the loop has accepted already stay with it. It is used by one thread only.
    """

    def __init__(self, listener: int, answer: Answer) -> None:
        self._socket = socket.socket(fileno=os.dup(listener))
        self._answer = answer

    def serve(self, seconds: float) -> bool:
        """Serve the next connection if one comes within so many seconds; whether one did."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        if not readable:
            return False
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return False  # the loop was quicker
        with connection, contextlib.suppress(OSError, h11.ProtocolError):
            connection.settimeout(REQUEST_SECONDS)
            self._exchange(connection)
        return True

    def close(self) -> None:
        """Close the duplicate."""
        self._socket.close()

    def _exchange(self, connection: socket.socket) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(connection.recv(MAX_REQUEST_BYTES))
        if not isinstance(event, h11.Request):
            return
        if event.method == b"GET":
            code, body = self._answer(event.target.split(b"?")[0].decode("ascii", "replace"))
        else:
            code, body = 405, {"error": "only GET is answered here"}
        payload = json.dumps(body).encode() + b"\n"
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(payload))),
            ("connection", "close"),
        ]
        for part in (
            h11.Response(status_code=code, headers=headers),
            h11.Data(data=payload),
            h11.EndOfMessage(),
        ):
            connection.sendall(http.send(part) or b"")

"""ZeroMQ CURVE for an audience: keys from files, and who may connect (ZAP, ZeroMQ RFC 27)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvtierd.errors import ConfigError

_KEY = re.compile(r"^\s*(public|secret)-key\s*=\s*\"([^\"]{40})\"\s*$", re.MULTILINE)
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """kvtierd's key pair for one audience (Z85); ``allowed``: clients' public keys, empty: everybody."""

    domain: str
    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes] = frozenset()

    @classmethod
    def load(cls, domain: str, secret_file: Path, allowed: tuple[Path, ...]) -> CurveKeys:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read or holds no such key; never shows its content.
        """
        where = f"events: audience {domain!r}"
        secret = read_key(where, secret_file, "secret")
        public = public_of(secret, f"{where}: {secret_file}")
        return cls(domain, public, secret, frozenset(read_key(where, path, "public") for path in allowed))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, not yet bound or connected, speak CURVE as the server."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self.domain.encode())


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a subscriber needs: the server's public key, and a pair of its own (Z85)."""

    server: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, not yet connected, speak CURVE as a client."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class Doorkeeper:
    """Answers libzmq's question whether a client may connect, in the loop's thread.

    Once there is one in a context, it is asked about all connections of sockets that have a domain.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        keys: Mapping[str, CurveKeys],
    ) -> None:
        self._loop = loop
        self._keys = {name.encode(): key for name, key in keys.items()}
        self.refused = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._receive)
        self._receive()

    def let_in(self, keys: Mapping[str, CurveKeys]) -> None:
        """Go by other keys for those who connect from now on."""
        self._keys = {name.encode(): key for name, key in keys.items()}

    def close(self) -> None:
        """Stop answering: no new client gets in."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _receive(self) -> None:
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # the descriptor signals edges
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            cut = frames.index(b"") + 1
            version, request, domain, _, _, mechanism, *credentials = frames[cut:]
            good = self._admits(domain, mechanism, credentials)
            self.refused += not good
            status = (b"200", b"OK") if good else (b"400", b"not allowed here")
            self._socket.send_multipart([*frames[:cut], version, request, *status, b"", b""], zmq.NOBLOCK)

    def _admits(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> bool:
        keys = self._keys.get(domain)
        if keys is None or mechanism != b"CURVE" or len(credentials) != 1:
            return False
        return not keys.allowed or z85.encode(credentials[0]) in keys.allowed


def public_of(secret: bytes, where: str) -> bytes:
    """Return the public key that belongs to a secret one.

    Raises:
        ConfigError: it is no key; says ``where`` it came from.
    """
    try:
        return zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"{where} holds no CURVE secret key") from None


def read_key(where: str, path: Path, kind: str) -> bytes:
    """Return one key of a file as ``zmq.auth`` writes it, or of one that holds nothing but the key.

    Raises:
        ConfigError: the file cannot be read or holds no such key; begins with ``where``.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{where}: cannot read {path}: {reason}") from None
    found: dict[str, str] = dict(_KEY.findall(text))
    key = found.get(kind) or text.strip()
    if len(key) != 40:
        raise ConfigError(f"{where}: {path} holds no CURVE {kind} key")
    return key.encode()

"""One audience's sockets: a PUB socket that binds or connects, and a ROUTER for replays."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass

import zmq

from kvtierd.edges.addresses import cannot_bind
from kvtierd.edges.curve import CurveKeys
from kvtierd.edges.replay import ReplayServer, Since
from kvtierd.edges.subscribers import Subscribers
from kvtierd.errors import ConfigError
from kvtierd.logs.events import event

logger = logging.getLogger(__name__)

PUB_MAX_MESSAGE = 4096
"""Bytes; a PUB socket receives nothing but subscriptions."""


_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: pyzmq's own flags take a microsecond for each ``|``, twice a batch."""
HANDSHAKE = 5000
"""Milliseconds that a stranger on a port has for ZeroMQ's greeting; its own default is half a minute."""


@dataclass(frozen=True, slots=True)
class OutletPlan:
    """Where an audience (``label``) is served; exactly one of ``bind`` and ``connect``."""

    label: str
    topic: str
    bind: str | None
    connect: str | None
    replay: str | None
    hwm: int
    curve: CurveKeys | None = None


class Outlet:
    """The open sockets of one plan."""

    def __init__(self, plan: OutletPlan) -> None:
        self.plan = plan
        self.endpoints: dict[str, str] = {}
        """``bind`` or ``connect``, and ``replay``, with the real port where 0 was asked."""
        self.dropped = 0
        self._topic = plan.topic.encode()
        self._pub: zmq.Socket[bytes] | None = None
        self._subscribers: Subscribers | None = None
        self._router: zmq.Socket[bytes] | None = None
        """Bound, and not served yet."""
        self._replay: ReplayServer | None = None

    def open(self, context: zmq.Context[zmq.Socket[bytes]], loop: asyncio.AbstractEventLoop) -> None:
        """Bind or connect; who asks for a replay waits until :meth:`serve`.

        Raises:
            CannotBind: an endpoint cannot be bound; names the audience, the endpoint and the reason.
            ConfigError: it cannot be connected to.
        """
        plan = self.plan
        self._pub = context.socket(zmq.PUB)
        self._subscribers = Subscribers(loop, context, self._pub)
        if plan.bind is not None:
            self._attach(self._pub, "bind", plan.bind)
        elif plan.connect is not None:
            self._attach(self._pub, "connect", plan.connect)
        if plan.replay is not None:
            router = context.socket(zmq.ROUTER)
            try:
                self._attach(router, "replay", plan.replay)
            except BaseException:
                router.close(linger=0)
                raise
            self._router = router

    def serve(self, loop: asyncio.AbstractEventLoop, since: Since) -> None:
        """Answer replays from ``since``."""
        router, self._router = self._router, None
        if router is not None:
            self._replay = ReplayServer(loop, router, self._topic, since)

    def send(self, number: bytes, payload: bytes) -> None:
        """Hand a batch to the socket; never waits."""
        assert self._pub is not None
        try:
            self._pub.send(self._topic, _MORE)
            self._pub.send(number, _MORE)
            self._pub.send(payload, _LAST)
        except zmq.ZMQError as error:  # the number stays taken: readers see a gap and find it in the ring
            self.dropped += 1
            logger.warning(
                "audience %s: a batch was not sent: %s",
                self.plan.label,
                error,
                extra=event("events_not_sent", audience=self.plan.label),
            )

    def statistics(self) -> dict[str, int]:
        """Return counters since the start."""
        return {
            "dropped": self.dropped,
            "subscribers": 0 if self._subscribers is None else len(self._subscribers),
            **(self._replay.statistics() if self._replay is not None else {}),
        }

    async def finish(self, grace: float, linger: float) -> None:
        """Let running replays end within ``grace`` seconds."""
        if self._replay is not None:
            await self._replay.close(grace, linger=linger)

    def abandon(self) -> None:
        """Close at once what is open."""
        if self._replay is not None:
            self._replay.stop(linger=0.0)
        self.close(0.0)

    def close(self, linger: float) -> None:
        """Close the PUB socket; what is queued gets ``linger`` seconds, while the context ends."""
        if self._subscribers is not None:
            self._subscribers.close()
        if self._pub is not None:
            self._pub.close(linger=max(0, int(linger * 1000)))
            self._pub = None
        if self._router is not None:
            self._router.close(linger=0)
            self._router = None

    def _attach(self, socket: zmq.Socket[bytes], key: str, endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, PUB_MAX_MESSAGE)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if key == "replay":
            ReplayServer.configure(socket)
        else:
            socket.setsockopt(zmq.SNDHWM, self.plan.hwm)
        if self.plan.curve is not None:
            self.plan.curve.apply(socket)
        before = os.umask(0o117)  # an ipc file is born 0660
        try:
            (socket.connect if key == "connect" else socket.bind)(endpoint)
        except zmq.ZMQError as error:
            setting = f"events audience {self.plan.label!r}: {key}"
            if key != "connect":
                raise cannot_bind(setting, endpoint, OSError(error.errno, error.strerror)) from error
            raise ConfigError(f"{setting} {endpoint}: cannot connect: {error.strerror}") from error
        finally:
            os.umask(before)
        self.endpoints[key] = socket.getsockopt_string(zmq.LAST_ENDPOINT)

"""The waiting half of the asyncio client: readers, timers and futures around :class:`Channel`.

No task runs in the background: the loop's reader callback takes answers and notices in, a timer reconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from kvtierd.client import _forks
from kvtierd.client._base import CLIENT_NAME
from kvtierd.client._channel import LOST, Channel
from kvtierd.client._link import (
    AWAY,
    LATE,
    OVERDUE_WAIT,
    RECONNECT_WAIT,
    STALE,
    Backoff,
    Link,
    Miss,
    Phase,
    Verb,
    outcome,
)
from kvtierd.core.effects import ErrorCode, Reply
from kvtierd.core.stimuli import Request
from kvtierd.errors import RemoteProtocolError

R = TypeVar("R", bound=Reply)

# More requests than this without an answer are not sent: the daemon is busy then.
MAX_IN_FLIGHT = 4096


class AsyncLine:
    """One connection after another, multiplexed by request id. Belongs to one event loop at a time."""

    def __init__(
        self, path: str, deadline: float, attach: Callable[..., Request] | None, backoff: Backoff
    ) -> None:
        self.deadline = deadline
        self.link = Link(attach, CLIENT_NAME)
        self.channel = Channel(path, self.link)
        self.closed = False
        self._backoff = backoff
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = _forks.count
        self._futures: dict[int, asyncio.Future[Reply | None]] = {}
        self._settled: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False

    async def connect(self, wait: float) -> bool:
        """Come as far as possible within ``wait`` seconds; True when connected."""
        self._bind()
        if self.link.ready:
            return True
        if self.link.phase is Phase.IDLE and not self._open():
            return False
        assert self._settled is not None
        await asyncio.wait([self._settled], timeout=wait)
        return self.link.ready

    async def ask(self, verb: Verb[R]) -> R | Miss:
        """Send a request and wait for its answer, at most the deadline and the verb's patience.

        Raises:
            RequestRefused: the request was a mistake.
        """
        if not await self.connect(RECONNECT_WAIT):
            return Miss(AWAY)
        if verb.epoch is not None and verb.epoch != self.link.epoch:
            return Miss(STALE)
        if self.link.overdue:
            await asyncio.sleep(OVERDUE_WAIT)
            if self.link.overdue or not self.link.ready:
                return self._leave(verb)
        if len(self._futures) >= MAX_IN_FLIGHT:
            return Miss(ErrorCode.BUSY)
        return await self._exchange(verb)

    def tell(self, verb: Verb[Any]) -> None:
        """Send a request whose answer nobody needs; it is dropped when it comes."""
        self._bind()
        if self.link.ready and verb.epoch in (None, self.link.epoch):
            self.link.abandon(self.link.ask(verb.build))
            self._writable()

    def poll(self) -> None:
        """Take in what has arrived; never waits."""
        self._bind()
        if self.link.phase is Phase.IDLE:
            self._open()
        else:
            self._readable()

    def close(self) -> None:
        """Close the socket; no verb connects again."""
        self.closed = True
        if self._forks == _forks.count:
            self._unhook()
        self.channel.drop()
        self._release_waiters()

    def _bind(self) -> None:
        """Start anew in a forked child or on another loop: the old connection is of no use there."""
        loop = asyncio.get_running_loop()
        forked = self._forks != _forks.count
        if loop is self._loop and not forked:
            return
        if self._loop is not None:
            if not forked:  # a child must not touch the loop's epoll set, which it shares with its parent
                self._unhook()
            self._futures.clear()
            self._settled = self._timer = None
            self._writing = False
            self.channel.drop()
            self._backoff.succeeded()
            if forked:
                self.link.forget()
        self._loop, self._forks = loop, _forks.count

    def _open(self) -> bool:
        """Begin a connection if the backoff allows it; True while one is on its way."""
        if self.closed:
            return False
        if self._backoff.remaining():
            self._arm()
            return False
        assert self._loop is not None
        try:
            self.channel.open()
            assert self.channel.sock is not None
            self._loop.add_reader(self.channel.sock.fileno(), self._readable)
            self._settled = self._loop.create_future()
            self._set_timer(self.deadline, self._handshake_late)
            self._flush()
        except LOST:
            self._lost()
            return False
        return True

    def _readable(self) -> None:
        if self.channel.sock is None:
            return
        shaking = not self.link.ready
        try:
            for reply in self.channel.receive():
                future = self._futures.pop(reply.id, None)
                if future is not None and not future.done():
                    future.set_result(reply)
            self._flush()
        except LOST:
            self._lost()
            return
        if shaking and self.link.ready:
            self._backoff.succeeded()
            self._set_timer(None)
            self._release_settled()

    def _flush(self) -> None:
        """Write what the socket takes now, the rest when it takes more."""
        assert self._loop is not None
        assert self.channel.sock is not None
        done = self.channel.flush()
        if done and self._writing:
            self._loop.remove_writer(self.channel.sock.fileno())
        elif not done and not self._writing:
            self._loop.add_writer(self.channel.sock.fileno(), self._writable)
        self._writing = not done

    def _writable(self) -> None:
        try:
            self._flush()
        except LOST:
            self._lost()

    def _leave(self, verb: Verb[R]) -> Miss:
        """The daemon is late: hand it what gives something back, and wait for nothing."""
        if verb.ends:
            self.tell(verb)
        return Miss(LATE)

    async def _exchange(self, verb: Verb[R]) -> R | Miss:
        assert self._loop is not None
        request = self.link.ask(verb.build)
        future: asyncio.Future[Reply | None] = self._loop.create_future()
        self._futures[request] = future
        epoch = self.link.epoch
        self._writable()
        try:
            async with asyncio.timeout(self.deadline + verb.patience):
                reply = await future
        except TimeoutError:
            if epoch == self.link.epoch:
                self.link.abandon(request, late=True)
            return Miss(LATE)
        finally:
            self._futures.pop(request, None)
            if epoch == self.link.epoch:
                self.link.abandon(request)
        if reply is None:
            return Miss(AWAY)
        try:
            return outcome(verb, reply)
        except RemoteProtocolError:
            self._lost()
            return Miss(AWAY)

    def _handshake_late(self) -> None:
        if not self.link.ready:
            self._lost()

    def _lost(self) -> None:
        self._unhook()
        self.channel.drop()
        self._backoff.failed()
        self._release_waiters()
        if not self.closed:
            self._arm()

    def _arm(self) -> None:
        """See to it that the connection comes back without anybody asking."""
        if self._timer is None:
            self._set_timer(max(self._backoff.remaining(), self._backoff.FIRST), self._again)

    def _again(self) -> None:
        self._timer = None
        if self.link.phase is Phase.IDLE:
            self._open()

    def _set_timer(self, delay: float | None, callback: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay is not None and callback is not None:
            assert self._loop is not None
            self._timer = self._loop.call_later(delay, callback)

    def _unhook(self) -> None:
        """Take the socket and the timer off the loop, which may be closed already."""
        self._set_timer(None)
        if self.channel.sock is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.channel.sock.fileno())
            self._loop.remove_writer(self.channel.sock.fileno())
        self._writing = False

    def _release_waiters(self) -> None:
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)
        self._release_settled()

    def _release_settled(self) -> None:
        settled, self._settled = self._settled, None
        if settled is not None and not settled.done() and not settled.get_loop().is_closed():
            settled.set_result(None)

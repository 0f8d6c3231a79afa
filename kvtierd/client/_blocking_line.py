"""The waiting half of the blocking client: a lock, a socket and a clock around :class:`Channel`."""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
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
from kvtierd.core.effects import Reply
from kvtierd.core.stimuli import Request

R = TypeVar("R", bound=Reply)

# Seconds that a connection may take to be made; nobody waits for it that long.
HANDSHAKE_TIME = 1.0

# Reads that one poll() may make, so that a daemon that never stops talking cannot hold the caller.
_POLL_READS = 64

# Seconds; shorter waits are polled for, since the kernel's read timeout is coarse.
_LEAST_WAIT = 0.01


class Line:
    """One connection after another, and the waiting on it. All of it happens under one lock."""

    def __init__(
        self, path: str, deadline: float, attach: Callable[..., Request] | None, backoff: Backoff
    ) -> None:
        self.deadline = deadline
        self.link = Link(attach, CLIENT_NAME)
        self.channel = Channel(path, self.link)
        self._backoff = backoff
        self._answers: dict[int, Reply] = {}
        self._shake_until = 0.0
        self._poller = select.poll()
        self._polled: tuple[socket.socket, int] | None = None
        self._lock = threading.Lock()
        self._forks = _forks.count
        self.closed = False

    def connect(self, wait: float) -> bool:
        """Come as far as possible within ``wait`` seconds; True when connected."""
        self._after_fork()
        with self._lock:
            return self._ready(wait)

    def ask(self, verb: Verb[R]) -> R | Miss:
        """Send a request and wait for its answer, at most the deadline and the verb's patience.

        Raises:
            RequestRefused: the request was a mistake.
        """
        if self._forks != _forks.count:
            self._after_fork()
        link, patience = self.link, self.deadline + verb.patience
        until = time.monotonic() + patience
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=patience):
            return Miss(LATE)
        try:
            if link.phase is not Phase.READY and not self._ready(min(RECONNECT_WAIT, self.deadline)):
                return Miss(AWAY)
            if verb.epoch is not None and verb.epoch != link.epoch:
                return Miss(STALE)
            if link.overdue and self._overdue():
                return self._leave(verb)
            return self._exchange(verb, until)
        except LOST:
            self._lost()
            return Miss(AWAY)
        finally:
            self._lock.release()

    def tell(self, verb: Verb[Any]) -> None:
        """Send a request whose answer nobody needs; it is dropped when it comes."""
        number = self.begin(verb)
        if isinstance(number, Miss):
            return
        with self._lock:
            try:
                self.link.abandon(number)
                self.channel.flush()  # what the socket does not take now goes with the next request
            except LOST:
                self._lost()

    def poll(self) -> None:
        """Take in what has arrived; never waits, not even for another thread (which then does the same)."""
        self._after_fork()
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._ready(0.0):
                self._drain()
        except LOST:
            self._lost()
        finally:
            self._lock.release()

    # -- without waiting, for a pipeline ---------------------------------------------------------------

    def begin(self, verb: Verb[R]) -> int | Miss:
        """Queue a request and return its number; never waits, not even for a connection or a late daemon."""
        self._after_fork()
        with self._lock:
            try:
                if not self._ready(0.0):
                    return Miss(AWAY)
                if verb.epoch is not None and verb.epoch != self.link.epoch:
                    return Miss(STALE)
                if self.link.overdue:
                    self._drain()
                    if self.link.overdue:
                        return self._leave(verb)
                return self.link.ask(verb.build)
            except LOST:
                self._lost()
                return Miss(AWAY)

    def gather(self, requests: Iterable[int], until: float) -> None:
        """Write what is queued and take answers in, until all those are there or the time has come."""
        with self._lock:
            try:
                while self.link.ready:
                    flushed = self.channel.flush()
                    if all(request in self._answers for request in requests):
                        return
                    if not self._wait(select.POLLIN | (0 if flushed else select.POLLOUT), until):
                        return
                    self._take()
            except LOST:
                self._lost()

    def take(self, requests: Collection[int]) -> list[Reply]:
        """Return the answers to these requests that are there."""
        if not self._answers:
            return []
        with self._lock:
            return [self._answers.pop(number) for number in list(self._answers) if number in requests]

    def abandon(self, request: int, *, late: bool = False) -> None:
        """Nobody waits for this answer any more."""
        with self._lock:
            self.link.abandon(request, late=late)

    def lose(self) -> None:
        """The daemon does not keep to the protocol: start anew."""
        with self._lock:
            self._lost()

    def close(self) -> None:
        """Close the socket; no verb connects again."""
        self._after_fork()
        with self._lock:
            self.closed = True
            self.channel.drop()

    def _after_fork(self) -> None:
        """In a forked child: leave the parent's connection alone and start anew."""
        if self._forks == _forks.count:
            return
        self._forks = _forks.count
        self._lock = threading.Lock()  # the parent's may be held by a thread that does not exist here
        self._answers.clear()
        self.channel.drop()
        self.link.forget()
        self._backoff.succeeded()

    def _ready(self, wait: float) -> bool:
        """Whether the connection stands; otherwise go on with the handshake, as the backoff allows."""
        if self.link.ready:
            return True
        if self.closed:
            return False
        try:
            if self.link.phase is Phase.IDLE:
                if self._backoff.remaining():
                    return False
                self.channel.open()
                self._shake_until = time.monotonic() + max(self.deadline, HANDSHAKE_TIME)
            until = min(self._shake_until, time.monotonic() + wait)
            while not self.link.ready:
                self.channel.flush()
                if not self._pump(until) or time.monotonic() > until:
                    break
        except LOST:
            self._lost()
            return False
        if self.link.ready:
            self._backoff.succeeded()
            return True
        if time.monotonic() >= self._shake_until:
            self._lost()
        return False

    def _overdue(self) -> bool:
        """Whether the daemon, which owes an answer past its deadline, still says no word."""
        self._pump(time.monotonic() + OVERDUE_WAIT)
        return self.link.overdue

    def _leave(self, verb: Verb[R]) -> Miss:
        """The daemon is late: hand it what gives something back, and wait for nothing."""
        if verb.ends:
            self.link.abandon(self.link.ask(verb.build))
            if not self.channel.flush():
                raise ConnectionAbortedError("the daemon does not read")
        return Miss(LATE)

    def _exchange(self, verb: Verb[R], until: float) -> R | Miss:
        link, channel = self.link, self.channel
        request = link.ask(verb.build)
        try:
            if channel.flush() and (left := until - time.monotonic()) > _LEAST_WAIT:
                data = channel.read(left)  # nearly always the answer, all of it and nothing else
                if data is not None:
                    if (reply := link.single(request, data)) is not None:
                        return outcome(verb, reply)
                    self._keep(channel.take(data))
            while request not in self._answers:
                if not channel.flush():
                    if not self._wait(select.POLLIN | select.POLLOUT, until):
                        raise ConnectionAbortedError("the daemon does not read")
                    self._take()
                elif not self._pump(until) or (time.monotonic() > until and request not in self._answers):
                    link.abandon(request, late=True)
                    return Miss(LATE)
            return outcome(verb, self._answers.pop(request))
        except BaseException:
            link.abandon(request)
            raise

    def _pump(self, until: float) -> bool:
        """Read once, as soon as there is something; False when ``until`` comes first."""
        while (left := until - time.monotonic()) > _LEAST_WAIT and self.link.ready:
            data = self.channel.read(left)
            if data is not None:
                self._keep(self.channel.take(data))
                return True
        if not self._wait(select.POLLIN, until):
            return False
        self._take()
        return True

    def _take(self) -> None:
        self._keep(self.channel.receive())

    def _keep(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self._answers[reply.id] = reply
        self.channel.flush()  # what a late answer handed out goes back

    def _wait(self, events: int, until: float) -> bool:
        assert self.channel.sock is not None
        if self._polled != (self.channel.sock, events):
            self._polled, self._poller = (self.channel.sock, events), select.poll()
            self._poller.register(self.channel.sock, events)
        return bool(self._poller.poll(math.ceil(max(0.0, until - time.monotonic()) * 1000)))

    def _drain(self) -> None:
        for _ in range(_POLL_READS):
            self.channel.flush()
            if not self._pump(0.0):
                return

    def _lost(self) -> None:
        self._answers.clear()
        self.channel.drop()
        self._backoff.failed()

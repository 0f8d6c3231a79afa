"""The reference consumer: what a router has to do to know which block is where, in one small file.

It keeps a set of residencies. The rules, all of them:

1. Numbers rise by one. A message below the expected number is a repeat: skip it.
2. Whoever joins late (the first number is not 0) asks for a replay from 0; whoever sees a gap asks from the
   number expected. Live messages wait until the replay's end marker.
3. A replay that begins later than asked means that removals may be lost: forget everything and ask from 0.
4. Where the audience lets numbers begin anew (``renumber_after``), a live number below the last live one
   means that: forget everything and ask from 0. Elsewhere such a message is a repeat.
5. A store adds its hashes under (hash, group, medium, locality, dp rank), a removal takes them away, and one
   never says anything about another medium. An absent group is group 0. Unknown removals are ignored.

:meth:`ReferenceConsumer.feed` and the ``replay_*`` methods are pure; :meth:`~ReferenceConsumer.connect` adds
sockets (``pyzmq``) and :meth:`~ReferenceConsumer.poll` does the dialogue.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from kvtierd.core.effects import InventoryEntry
from kvtierd.core.model import EventHash, group_of
from kvtierd.wire.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UnknownEvent,
    decode_batch,
)
from kvtierd.wire.stream import END, encode_sequence

if TYPE_CHECKING:
    import zmq

MAX_WAITING = 100_000
"""Live messages kept during a replay; one more starts the replay anew."""
REPLAY_TIMEOUT = 5.0
"""Seconds without a reply after which a replay is asked for again."""


class Residency(NamedTuple):
    """One block on one medium, as a router tells them apart."""

    hash: EventHash
    group: int
    medium: str | None
    locality: str | None
    dp_rank: int


def residencies(entries: Iterable[InventoryEntry], *, hidden: frozenset[str] = frozenset()) -> set[Residency]:
    """Return what a router must know, given the daemon's inventory without the ``hidden`` tiers.

    Two tiers that a router cannot tell apart fold to one residency.
    """
    return {
        Residency(event_hash, group_of(entry.key), entry.medium, entry.locality, entry.dp_rank)
        for entry in entries
        if entry.tier not in hidden
        for event_hash in entry.hashes
    }


class ReferenceConsumer:
    """Follows one stream. ``resident`` is the state, ``counts`` what was met on the way.

    ``renumbers``: whether the audience lets numbers begin anew.
    """

    def __init__(self, *, renumbers: bool = False) -> None:
        self._renumbers = renumbers
        self._live = -1
        self.resident: set[Residency] = set()
        self.expected: int | None = None
        """The number that must come next; ``None`` before the first message."""
        self.wanted: int | None = None
        """Where a replay must begin, while one is needed or runs."""
        self.counts: Counter[str] = Counter()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sub: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._replay_endpoint: str | None = None
        self._secure: Callable[[zmq.Socket[bytes]], object] | None = None
        self._heard_at = 0.0

    # -- the pure part

    def feed(self, number: int, payload: bytes) -> int | None:
        """Take a live message; return where a replay must begin if one is needed now, else ``None``."""
        if self._renumbers and number < self._live:
            self.counts["new_starts"] += 1
            self._waiting.clear()
            self._forget()
        self._live = number
        return self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> int | None:
        if self.wanted is not None:
            self._wait(number, payload)
        elif number == (self.expected or 0):
            self._apply(number, payload)
        elif self.expected is not None and number < self.expected:
            self.counts["repeats"] += 1
        else:
            self.counts["late_joins" if self.expected is None else "gaps"] += 1
            self.wanted = self.expected or 0
            self._wait(number, payload)
        return self.wanted

    def replay(self, number: int, payload: bytes) -> int | None:
        """Take a replayed message; return where to begin anew if it cannot be used, else ``None``."""
        if self.wanted is None or number < self.wanted:
            self.counts["repeats"] += 1
        elif number == self.wanted or self.wanted == 0:  # from 0, a replay may begin where it can
            self._apply(number, payload)
            self.wanted = number + 1
        else:
            self._forget()
            return 0
        return None

    def replay_ended(self) -> int | None:
        """Take the end marker, then the live messages that waited; return as :meth:`feed` does."""
        self.counts["replays"] += 1
        self.wanted = None
        waiting, self._waiting = self._waiting, deque()
        if self.expected is None and waiting:
            self.expected = waiting[0][0]  # nothing to replay: the stream begins here
        for number, payload in waiting:
            self._take(number, payload)
        return self.wanted

    def _wait(self, number: int, payload: bytes) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()  # the replay that follows the gap brings them
            self.counts["overflows"] += 1
        self._waiting.append((number, payload))

    def _forget(self) -> None:
        self.counts["resets"] += 1
        self.resident.clear()
        self.expected, self.wanted = None, 0

    def _apply(self, number: int, payload: bytes) -> None:
        self.expected = number + 1
        self.counts["batches"] += 1
        self.fold(decode_batch(payload))

    def fold(self, batch: EventBatch) -> None:
        """Apply one batch to the state."""
        rank = batch.data_parallel_rank or 0
        for event in batch.events:
            self.counts[type(event).__name__] += 1
            if isinstance(event, UnknownEvent):
                continue
            if isinstance(event, AllBlocksCleared):
                self.resident = {entry for entry in self.resident if entry.dp_rank != rank}
                continue
            for entry in _residencies_of(event, rank):
                if isinstance(event, BlockStored):
                    self.resident.add(entry)
                elif entry in self.resident:
                    self.resident.remove(entry)
                else:
                    self.counts["unknown_removals"] += 1

    # -- the sockets

    def connect(
        self,
        endpoint: str,
        replay: str | None = None,
        *,
        topic: str = "",
        secure: Callable[[zmq.Socket[bytes]], object] | None = None,
    ) -> None:
        """Subscribe, and replay over ``replay`` when needed. Without it a gap is counted and lived with.

        ``secure``: gives each socket its CURVE keys. A SUB socket that lost its publisher subscribes again
        only while somebody polls it: one that is seldom polled misses what is told right after a restart.
        """
        import zmq

        self._secure = secure
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, MAX_WAITING)
        if secure is not None:
            secure(self._sub)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay

    def poll(self, timeout: float = 0.0) -> int:
        """Wait up to ``timeout`` seconds for messages, handle all that are there, return how many."""
        import zmq

        assert self._sub is not None, "connect first"
        sockets = [self._sub] if self._dealer is None else [self._sub, self._dealer]
        zmq.zmq_poll([(socket, zmq.POLLIN) for socket in sockets], int(timeout * 1000))
        handled = 0
        while self._dealer is not None and (frames := _receive(self._dealer)) is not None:
            handled += 1
            self._replied(frames)
        while (frames := _receive(self._sub)) is not None:
            handled += 1
            if len(frames) != 3 or len(frames[1]) != len(END):
                self.counts["malformed"] += 1
                continue
            asked, starts = self.wanted, self.counts["new_starts"]
            start = self.feed(int.from_bytes(frames[1], "big"), frames[2])
            self._ask(start, running=asked is not None and starts == self.counts["new_starts"])
        if self._dealer is not None and time.monotonic() - self._heard_at > REPLAY_TIMEOUT:
            self.counts["replay_timeouts"] += 1
            self._ask(self.wanted)
        return handled

    def wait_for(
        self,
        predicate: Callable[[ReferenceConsumer], bool],
        timeout: float = 10.0,
        what: str = "the consumer",
    ) -> None:
        """Poll until ``predicate(self)`` is true.

        Raises:
            TimeoutError: it was not within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not predicate(self):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"waited {timeout:g} s for {what}; {len(self.resident)} resident, {self.counts}"
                )
            self.poll(min(left, 0.05))

    def close(self) -> None:
        """Close the sockets."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._sub = self._dealer = None

    def __enter__(self) -> ReferenceConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replied(self, frames: list[bytes]) -> None:
        """Handle ``[b"", topic, number, payload]``; vLLM <= 0.24 sends no topic."""
        self._heard_at = time.monotonic()
        if len(frames) < 3 or len(frames[-2]) != len(END):
            self.counts["malformed"] += 1
        elif frames[-2] == END:
            self._hang_up()
            self._ask(self.replay_ended())
        else:
            self._ask(self.replay(int.from_bytes(frames[-2], "big"), frames[-1]))

    def _ask(self, start: int | None, *, running: bool = False) -> None:
        """Ask for a replay from ``start``, on a new socket so that no earlier reply mixes in."""
        import zmq

        if start is None or running:
            return
        self._hang_up()
        if self._replay_endpoint is None or self._context is None:
            while self.wanted is not None:
                self.counts["unrepaired"] += 1
                self.expected = self._waiting[0][0] if self._waiting else None
                self.replay_ended()
            return
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        if self._secure is not None:
            self._secure(self._dealer)
        self._dealer.connect(self._replay_endpoint)
        self._dealer.send_multipart([b"", encode_sequence(start)])
        self._heard_at = time.monotonic()

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None


def _residencies_of(event: BlockStored | BlockRemoved, rank: int) -> list[Residency]:
    return [
        Residency(h, event.group_idx or 0, event.medium, event.locality, rank) for h in event.block_hashes
    ]


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    import zmq

    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None

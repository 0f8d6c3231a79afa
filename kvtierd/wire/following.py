"""Follows one engine's numbered stream through gaps, late joins and restarts; pure.

1. Numbers rise by one from 0. A message that was applied already (same number, same bytes) is a repeat.
2. A gap, a new connection and a long silence are repaired by a replay that begins with the *last* batch
   applied. If that has other bytes now, or is not there at all, this is another incarnation of the engine.
3. A number that goes back is another incarnation too. Then all that the old one announced is taken back,
   and the new one is followed from 0.
4. Where removals may have been missed (a gap without anybody to ask, or a ring that no longer covers it)
   all that the engine announced is taken back as well: a block too few costs a recompute, one too many costs
   a request sent to the wrong place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from kvtierd.wire.relay import EngineCache, Told
from kvtierd.wire.relay_records import Kind, digest

MAX_WAITING = 1 << 12
"""Live batches kept during a replay; one more forgets them, and the replay brings them."""
MAX_REMEMBERED = 2 * MAX_WAITING
"""Batches whose bytes are recognised when they come again."""
MAX_ROUNDS = 8
"""Replays in a row that live batches wait for; then they are left to the next gap or check."""
_NEVER = -1


class EngineStream:
    """One engine's stream. ``can_replay``: whether there is somebody to ask.

    After every call, :attr:`wanted` says where a replay has to begin if one is needed; :attr:`dialogue`
    changes when a running one has to be left for a new one.
    """

    def __init__(self, cache: EngineCache, *, can_replay: bool) -> None:
        self.cache = cache
        self.counts: Counter[str] = Counter()
        self.last: int | None = None
        """The number of the last batch applied; ``None``: nothing of this incarnation yet."""
        self.wanted: int | None = None
        self.dialogue = 0
        self._has_replay = self._can_replay = can_replay
        self.records: list[tuple[Kind, int, bytes]] = []
        """What was heard since the caller last took it away, to be recorded before it is told."""
        self._told: list[Told] = []
        self._applied: OrderedDict[int, bytes] = OrderedDict()  # number -> digest of its bytes
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._confirmed = False  # the running replay showed that this is the same incarnation
        self._tried: int | None = _NEVER  # `last` when a gap was asked for; the same again: it is no use
        self._rounds = 0
        self._holed = _NEVER  # `last` when a replay had a hole

    def resume(self, number: int, payload_digest: bytes) -> None:
        """Go on after a batch that an earlier run took; the cache has what it left."""
        self.last = number
        self._applied[number] = payload_digest

    @property
    def place(self) -> tuple[int, bytes] | None:
        """The last batch's number and digest: what :meth:`resume` wants."""
        return None if self.last is None else (self.last, self._applied[self.last])

    def check(self, *, connected: bool = False) -> None:
        """Have a replay show what was missed: the engine just ``connected``, or nothing came for long."""
        if connected:
            self._can_replay = self._has_replay
        if self._can_replay and self.wanted is None:
            self._ask()

    def live(self, number: int, payload: bytes) -> list[Told]:
        """Take a message of the PUB socket; return what to tell."""
        self._live(number, payload)
        return self._take()

    def replayed(self, number: int, payload: bytes) -> list[Told]:
        """Take a message of the replay; return what to tell."""
        last = self.last
        if last is None:  # from 0, or from where the ring begins
            self.counts["truncated"] += number > 0
            self._begin_at(number, payload)
        elif number == last and not self._is_repeat(number, payload):
            self._start_over()
        elif number <= last:
            self._confirmed = True
        elif number == last + 1 and self._confirmed:
            self._apply(number, payload)
        elif self._confirmed and self._holed != last:
            self._holed = last  # the engine's socket dropped some; once more from here
            self._ask()
        else:
            self._lost()
            self._begin_at(number, payload)
        return self._take()

    def replay_ended(self) -> list[Told]:
        """Take the end of the replay, then the live messages that waited for it; return what to tell."""
        self.counts["replays"] += 1
        if self.last is not None and not self._confirmed:
            self._start_over()
        else:
            self._resume()
        return self._take()

    def replay_failed(self) -> list[Told]:
        """Give the replay up, nobody answered, nor will before it connects anew; return what to tell."""
        self.counts["replay_timeouts"] += 1
        self._can_replay = False
        self._resume()
        return self._take()

    def gone(self) -> list[Told]:
        """Take back all that the engine announced, since it left and its memory with it."""
        self.counts["departures"] += self.last is not None
        self._waiting.clear()
        self.wanted = None
        self._forget()
        return self._take()

    def _live(self, number: int, payload: bytes) -> None:
        last = self.last
        if self.wanted is not None:
            self._wait(number, payload)
        elif number == (0 if last is None else last + 1):
            self._apply(number, payload)
        elif last is None or number > last:
            self.counts["late_joins" if last is None else "gaps"] += 1
            self._bridge(number, payload)
        elif self._is_repeat(number, payload):
            self.counts["repeats"] += 1
        else:
            self._restarted()
            self._live(number, payload)

    def _bridge(self, number: int, payload: bytes) -> None:
        """Ask for what is missing before a message; if that was no use or nobody answers, do without."""
        if self._can_replay and self._tried != self.last:
            self._tried = self.last
            self._ask()
            self._wait(number, payload)
            return
        if self.last is not None:
            self._lost()
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.last = number
        self._confirmed = True
        self._applied[number] = digest(payload)
        if len(self._applied) > MAX_REMEMBERED:
            self._applied.popitem(last=False)
        self.counts["batches"] += 1
        self.records.append((Kind.BATCH, number, payload))
        told = self.cache.take(payload)
        if told is not None and told.events:
            self._told.append(told)

    def _begin_at(self, number: int, payload: bytes) -> None:
        """Go on with what a ring has first; live messages from before that are too late now."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] >= number)
        self._apply(number, payload)

    def _ask(self) -> None:
        self.wanted = self.last or 0
        self.dialogue += 1
        self._confirmed = False

    def _resume(self) -> None:
        self.wanted = None
        waiting, self._waiting = self._waiting, deque()
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            self.counts["overflows"] += 1
            waiting.clear()
        for number, payload in waiting:
            self._live(number, payload)
        if self.wanted is None:
            self._rounds = 0

    def _wait(self, number: int, payload: bytes) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
            self.counts["overflows"] += 1
        self._waiting.append((number, payload))

    def _is_repeat(self, number: int, payload: bytes) -> bool:
        return self._applied.get(number) == digest(payload)

    def _restarted(self) -> None:
        self.counts["restarts"] += 1
        self._forget()

    def _start_over(self) -> None:
        """Ask the new incarnation for all it said; what waits is in that, or of the old one."""
        self._restarted()
        self._waiting.clear()
        self._ask()

    def _lost(self) -> None:
        self.counts["unrepaired"] += 1
        self._forget()

    def _forget(self) -> None:
        self.last = None
        self._applied.clear()
        self._tried = self._holed = _NEVER
        self.records.append((Kind.FORGOTTEN, 0, b""))
        self._told += self.cache.forget()

    def _take(self) -> list[Told]:
        told, self._told = self._told, []
        return told

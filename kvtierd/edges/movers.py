"""Carries a tier's work effects out on a bounded set of threads and returns their outcomes to the loop.

Reads and writes have threads of their own, so a load never waits behind stores; deletes share the writers'.
An effect is cut into chunks, one job each: enough for all threads, at most ``batch`` blocks. The core
guarantees that no two operations on one block of one tier run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvtierd.core.effects import Delete, Read, Write
from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import Finished, Found, FoundBlock, Outcome, Status
from kvtierd.edges.backends.base import Backend, Transfer

log = logging.getLogger(__name__)

SCAN_LOOK_AHEAD = 4
SCAN_POLL = 0.5
QUEUE_BLOCKS = 1 << 16

Work = Write | Read | Delete
Kind = Literal["write", "read", "delete"]
SlotView = Callable[[int, int], memoryview]


def _kind(effect: Work) -> Kind:
    match effect:
        case Write():
            return "write"
        case Read():
            return "read"
        case Delete():
            return "delete"


def _ids(effect: Work) -> list[BlockId]:
    if isinstance(effect, Delete):
        return list(effect.ids)
    return [at.block.id for at in effect.blocks]


def _failed(ids: Sequence[BlockId], reason: str) -> list[Outcome]:
    return [Outcome(block_id, Status.FAILED, reason=reason) for block_id in ids]


@dataclass(slots=True)
class _Operation:
    """One effect in flight; owned by the loop thread, but for ``effect``."""

    effect: Work
    ids: list[BlockId]
    results: list[Outcome | None]
    chunks_left: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks ``start`` to ``stop`` of an operation: one job of one thread."""

    operation: _Operation
    start: int
    stop: int


@dataclass(slots=True)
class _Ended:
    """What a thread hands back: the chunk's outcomes and how long it took in seconds."""

    chunk: _Chunk
    outcomes: list[Outcome]
    seconds: float
    error: BaseException | None = None


@dataclass(slots=True)
class _Figures:
    """Counters of one kind of operation; owned by the loop thread."""

    in_flight: int = 0
    in_flight_blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: int = 0
    errors: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "in_flight": self.in_flight,
            "in_flight_blocks": self.in_flight_blocks,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "refused": self.refused,
            "errors": self.errors,
            "outcomes": {status.value: self.outcomes[status.value] for status in Status},
        }


class _Threads:
    """Threads over one unbounded queue (the mover bounds what goes in).

    Not ``ThreadPoolExecutor``: its threads are joined at the interpreter's exit, which a stalled mount would
    then block for ever. These are daemon threads.
    """

    def __init__(self, name: str, count: int, run: Callable[[_Chunk], None]) -> None:
        self.count = count
        self._run = run
        self._jobs: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, chunk: _Chunk) -> None:
        self._jobs.put(chunk)

    def stop(self) -> None:
        """Let each thread end after the jobs that are queued now."""
        for _ in self._threads:
            self._jobs.put(None)

    def discard(self) -> None:
        """Drop the jobs that no thread has begun."""
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            self.stop()

    def _work(self) -> None:
        while (chunk := self._jobs.get()) is not None:
            self._run(chunk)


class Mover:
    """The threads of one tier.

    ``slot_view(unit, length)`` gives the pool's memory; views are released when the job ends. ``done`` is
    called in the loop's thread, once per submitted effect, never from inside :meth:`submit`. All methods
    are for the loop's thread. ``queue_blocks`` bounds the blocks of reads and of writes that wait or run;
    what exceeds it fails at once. Deletes are not refused: each ends a residency that was written before.
    """

    def __init__(
        self,
        tier: str,
        backend: Backend,
        slot_view: SlotView,
        done: Callable[[Finished], None],
        loop: asyncio.AbstractEventLoop,
        *,
        readers: int,
        writers: int,
        batch: int = 16,
        queue_blocks: int = QUEUE_BLOCKS,
    ) -> None:
        self.tier = tier
        self._backend = backend
        self._slot_view = slot_view
        self._done = done
        self._loop = loop
        self._batch = batch
        self._queue_blocks = queue_blocks
        self._figures: dict[Kind, _Figures] = {kind: _Figures() for kind in ("write", "read", "delete")}
        self._operations: dict[int, _Operation] = {}
        self._ended: deque[_Ended] = deque()
        self._waking = False
        self._closing = False
        self._idle: asyncio.Event | None = None
        self._known_errors: set[tuple[str, str]] = set()
        self._scan: _Scan | None = None
        self._readers = _Threads(f"{tier}-read", readers, self._run)
        self._writers = _Threads(f"{tier}-write", writers, self._run)

    def submit(self, effect: Work) -> None:
        """Start an effect; ``done`` gets its outcomes, in the order of its blocks."""
        ids, figures = _ids(effect), self._figures[_kind(effect)]
        full = figures.in_flight_blocks + len(ids) > self._queue_blocks and not isinstance(effect, Delete)
        if self._closing or full or not ids:
            reason = "closing" if self._closing else "the tier's queue is full"
            figures.refused += len(ids)
            self._loop.call_soon(self._done, Finished(effect.op, _failed(ids, reason)))
            return
        assert effect.op not in self._operations, f"op {effect.op} is in flight already"
        threads = self._readers if isinstance(effect, Read) else self._writers
        size = min(self._batch, -(-len(ids) // threads.count))
        starts = range(0, len(ids), size)
        operation = _Operation(effect, ids, [None] * len(ids), len(starts))
        self._operations[effect.op] = operation
        figures.in_flight += 1
        figures.in_flight_blocks += len(ids)
        for start in starts:
            threads.put(_Chunk(operation, start, min(start + size, len(ids))))

    def start_scan(self, found: Callable[[Found], None], finished: Callable[[], None]) -> None:
        """Read the tier's content in a thread of its own; both are called in the loop's thread.

        ``finished`` is called once, also when the scan broke off; at most ``SCAN_LOOK_AHEAD`` batches wait.
        """
        assert self._scan is None, "one scan per mover"
        self._scan = _Scan(self.tier, self._backend, self._loop, found, finished, self._check_idle)

    def statistics(self) -> dict[str, Any]:
        """Return counters: per kind of operation, and of the scan."""
        figures: dict[str, Any] = {kind: of.as_dict() for kind, of in self._figures.items()}
        return figures | {"scan": None if self._scan is None else self._scan.statistics()}

    async def close(self, deadline: float) -> bool:
        """Refuse new work and wait at most ``deadline`` seconds for what is queued and running.

        Return whether all of it ended. If not, what has not ended is answered as FAILED; a stuck thread may
        still touch its slots and the backend then, so neither may be used or closed while the process lives.
        """
        self._closing = True
        if self._scan is not None:
            self._scan.stop()
        self._idle = asyncio.Event()
        self._check_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), deadline)
        except TimeoutError:
            self._give_up()
            return False
        finally:
            self._readers.stop()
            self._writers.stop()
        return True

    def _give_up(self) -> None:
        self._readers.discard()
        self._writers.discard()
        log.warning("tier %s: %d operations did not end in time", self.tier, len(self._operations))
        for operation in list(self._operations.values()):
            for i, block_id in enumerate(operation.ids):
                if operation.results[i] is None:
                    operation.results[i] = Outcome(block_id, Status.FAILED, reason="did not end in time")
            self._finish(operation)

    def _check_idle(self) -> None:
        scanning = self._scan is not None and self._scan.running
        if self._idle is not None and not self._operations and not scanning:
            self._idle.set()

    def _run(self, chunk: _Chunk) -> None:
        """Do one chunk, in a thread; whatever happens, its blocks get outcomes."""
        begin = time.monotonic()
        ids, error = chunk.operation.ids[chunk.start : chunk.stop], None
        try:
            outcomes = self._call(chunk, ids)
            if [outcome.id for outcome in outcomes] != ids:
                raise RuntimeError("the backend did not answer block by block")
        except BaseException as raised:
            error = raised
            outcomes = _failed(ids, f"{type(raised).__name__}: {raised}")
        self._ended.append(_Ended(chunk, outcomes, time.monotonic() - begin, error))
        if not self._waking:  # two wake-ups are harmless; none is lost, as _drain resets before it looks
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._drain)

    def _call(self, chunk: _Chunk, ids: list[BlockId]) -> list[Outcome]:
        effect = chunk.operation.effect
        if isinstance(effect, Delete):
            return self._backend.delete(ids, corrupt=effect.corrupt)
        views: list[memoryview] = []
        try:
            transfers = []
            for at in effect.blocks[chunk.start : chunk.stop]:
                views.append(self._slot_view(at.slot, at.block.payload_bytes))
                transfers.append(Transfer(at.block, views[-1]))
            if isinstance(effect, Read):
                return self._backend.read(transfers)
            return self._backend.write(transfers)
        finally:
            for view in views:
                view.release()

    def _drain(self) -> None:
        """Take in what threads have ended, in the loop's thread."""
        self._waking = False
        try:
            while self._ended:
                self._take(self._ended.popleft())
        finally:
            if self._ended:  # ``done`` raised: the loop reports it, the others still get their turn
                self._loop.call_soon(self._drain)

    def _take(self, ended: _Ended) -> None:
        chunk, operation = ended.chunk, ended.chunk.operation
        if self._operations.get(operation.effect.op) is not operation:
            return  # answered by a close that gave up
        kind = _kind(operation.effect)
        figures = self._figures[kind]
        figures.seconds += ended.seconds
        if ended.error is not None:
            figures.errors += 1
            self._log_once(kind, ended.error)
        operation.results[chunk.start : chunk.stop] = ended.outcomes
        operation.chunks_left -= 1
        if operation.chunks_left == 0:
            self._finish(operation)

    def _finish(self, operation: _Operation) -> None:
        effect, figures = operation.effect, self._figures[_kind(operation.effect)]
        outcomes = [outcome for outcome in operation.results if outcome is not None]
        del self._operations[effect.op]
        figures.in_flight -= 1
        figures.in_flight_blocks -= len(outcomes)
        figures.outcomes.update(outcome.status.value for outcome in outcomes)
        if not isinstance(effect, Delete):
            figures.bytes += sum(
                at.block.payload_bytes
                for at, outcome in zip(effect.blocks, outcomes, strict=True)
                if outcome.status is Status.OK
            )
        self._check_idle()
        self._done(Finished(effect.op, outcomes))

    def _log_once(self, kind: Kind, error: BaseException) -> None:
        name = type(error).__name__
        if (kind, name) not in self._known_errors:
            self._known_errors.add((kind, name))
            log.error("tier %s: %s raised; later ones are only counted", self.tier, kind, exc_info=error)


class _Scan:
    """One scan in a thread; everything but :meth:`_work` and :meth:`_hand_over` is the loop thread's."""

    def __init__(
        self,
        tier: str,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        found: Callable[[Found], None],
        finished: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.running = True
        self._tier, self._backend, self._loop = tier, backend, loop
        self._found, self._finished, self._ended = found, finished, ended
        self._blocks = 0
        self._error = ""
        self._stopped = threading.Event()
        self._room = threading.Semaphore(SCAN_LOOK_AHEAD)
        threading.Thread(target=self._work, name=f"{tier}-scan", daemon=True).start()

    def stop(self) -> None:
        """Let the scan break off at its next batch."""
        self._stopped.set()

    def statistics(self) -> dict[str, Any]:
        """Return plain values; ``error`` is empty when the scan went well so far."""
        return {"running": self.running, "blocks": self._blocks, "error": self._error}

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for batch in self._backend.scan():
                if not self._hand_over(batch):
                    break
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, error)

    def _hand_over(self, batch: list[FoundBlock]) -> bool:
        while not self._room.acquire(timeout=SCAN_POLL):
            if self._stopped.is_set():
                return False
        if self._stopped.is_set():
            return False
        try:
            self._loop.call_soon_threadsafe(self._take, batch)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _take(self, batch: list[FoundBlock]) -> None:
        self._room.release()
        self._blocks += len(batch)
        self._found(Found(self._tier, batch))

    def _end(self, error: BaseException | None) -> None:
        self.running = False
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"
            log.error("tier %s: the scan broke off", self._tier, exc_info=error)
        self._ended()
        self._finished()

"""Carries a tier's work effects out on a bounded set of threads and returns their outcomes to the loop.

Reads and writes have threads of their own, so a load never waits behind stores; deletes share the writers',
probes the readers' when nothing is to be read. An effect is cut into chunks, one job each: enough for all
threads, at most ``batch`` blocks and, but for a single block, ``CHUNK_BYTES``, so that no thread is left with
the last big ones of another. The core guarantees that no two operations on one block of one tier run at
once.

A job that takes longer than the tier's deadline is *stalled*: its thread is stuck and keeps its memory until
the call returns, whenever that is. While all threads of a kind are stuck, new work for them fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

from kvtierd.core.effects import Delete, Probe, Read
from kvtierd.core.model import Layout
from kvtierd.core.stimuli import Finished, Found, Outcome, Probed
from kvtierd.edges.backends.base import Backend, Probing, Transfer
from kvtierd.edges.histogram import Histogram
from kvtierd.edges.mover_describe import Describer
from kvtierd.edges.mover_scan import Scan
from kvtierd.edges.mover_threads import Threads
from kvtierd.edges.mover_work import (
    Chunk,
    Ended,
    Figures,
    Kind,
    Operation,
    Work,
    failed,
    ids_of,
    kind_of,
    most_of,
)
from kvtierd.errors import TierError
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

QUEUE_BLOCKS = 1 << 16
CHUNK_BYTES = 8 << 20
STALLED = "the tier is stalled"

SlotView = Callable[[int, int], memoryview]


class Mover:
    """The threads of one tier.

    ``slot_view(unit, length)`` gives the pool's memory; views are released when the job ends. The callbacks
    are called in the loop's thread, never from inside :meth:`submit`. ``done`` is called once per submitted
    Write, Read and Delete, ``probed`` once per Probe, and ``stalled`` with the number of an operation at most
    once, before its ``done``: its slots may be touched until then. All methods are for the loop's thread.

    ``deadline`` is in seconds of ``clock``: a job that runs longer is stalled, one that waits longer for a
    thread fails. ``queue_blocks`` bounds the blocks of reads, of writes and of probes that wait or run; what
    exceeds it fails at once. Deletes are never refused or dropped: each ends a residency that was written
    before.
    """

    def __init__(
        self,
        tier: str,
        backend: Backend,
        slot_view: SlotView,
        done: Callable[[Finished], None],
        loop: asyncio.AbstractEventLoop,
        *,
        stalled: Callable[[int], None],
        probed: Callable[[Probed], None],
        readers: int,
        writers: int,
        deadline: float,
        batch: int = 16,
        queue_blocks: int = QUEUE_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self._backend = backend
        self._slot_view = slot_view
        self._done, self._stalled, self._probed = done, stalled, probed
        self._loop = loop
        self._deadline = deadline
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._batch = batch
        self._queue_blocks = queue_blocks
        self._figures: dict[Kind, Figures] = {kind: Figures.of(kind) for kind in get_args(Kind)}
        self._operations: dict[int, Operation] = {}
        self._ended: deque[Ended] = deque()
        self._waking = False
        self._closing = False
        self._closed = False
        self._idle: asyncio.Event | None = None
        self._known_errors: set[tuple[str, str]] = set()
        self._stalls = 0
        self._last_stall = ""
        self._scan: Scan | None = None
        self._describer = Describer(tier, backend, loop, self._check_idle)
        self._readers = Threads(f"{tier}-read", readers, self._run, clock)
        self._writers = Threads(f"{tier}-write", writers, self._run, clock)

    @property
    def backend(self) -> Backend:
        """The tier's storage."""
        return self._backend

    def retune(self, deadline: float) -> None:
        """Put another deadline in force, also for what runs already."""
        self._deadline = deadline
        self.check_deadlines()

    def submit(self, effect: Work) -> None:
        """Start an effect; its callback gets the outcomes, in the order of its blocks."""
        ids, figures, threads = ids_of(effect), self._figures[kind_of(effect)], self._threads_of(effect)
        reason = self._refusal(effect, len(ids))
        if reason or not ids:
            figures.refused += len(ids)
            answer = Operation(effect, ids, list(failed(ids, reason)), 0, unknown=bool(reason))
            self._loop.call_soon(self._answer, answer)
            return
        assert effect.op not in self._operations, f"op {effect.op} is in flight already"
        size = min(self._batch, -(-len(ids) // threads.count), most_of(effect, CHUNK_BYTES))
        starts = range(0, len(ids), size)
        operation = Operation(effect, ids, [None] * len(ids), len(starts))
        self._operations[effect.op] = operation
        figures.begin(operation)
        now = self._clock()
        threads.put([Chunk(operation, start, min(start + size, len(ids)), now) for start in starts])
        self._arm(now)

    def _threads_of(self, effect: Work) -> Threads:
        return self._readers if isinstance(effect, (Read, Probe)) else self._writers

    def _refusal(self, effect: Work, blocks: int) -> str:
        """Return why an effect is not begun, or nothing."""
        if self._closed or (self._closing and not isinstance(effect, Delete)):
            return "closing"
        if isinstance(effect, Delete):
            return ""  # also at the end: what was removed must not be found at the next start
        if isinstance(effect, Probe) and not isinstance(self._backend, Probing):
            return "the tier's storage cannot be probed"
        threads = self._threads_of(effect)
        if threads.stalled or (isinstance(effect, Probe) and threads.background_stalled):
            return STALLED
        full = self._figures[kind_of(effect)].in_flight_blocks + blocks > self._queue_blocks
        return "the tier's queue is full" if full else ""

    def start_scan(
        self,
        found: Callable[[Found], None],
        finished: Callable[[], None],
        trouble: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Read the tier's content in a thread of its own; all are called in the loop's thread.

        ``finished`` is called once, also when the scan raised; at most ``SCAN_LOOK_AHEAD`` batches wait.
        ``trouble`` is told why the storage breaks scans off, and an empty string when it does no more.
        """
        assert self._scan is None, "one scan per mover"
        if not self._closing:
            self._scan = Scan(
                self.tier, self._backend, self._loop, found, finished, self._check_idle, trouble
            )

    def describe(self, namespace: str, layout: Layout) -> None:
        """Have a namespace described, best effort, in a thread that cannot keep the process alive."""
        if not self._closing:
            self._describer.describe(namespace, layout)

    @property
    def durations(self) -> dict[Kind, Histogram]:
        """How long operations took, by kind."""
        return {kind: of.durations for kind, of in self._figures.items()}

    def oldest(self) -> float:
        """Return for how many seconds the oldest job has been running; 0 when none is."""
        jobs = (*self._readers.running(), *self._writers.running())
        began = [chunk.began for chunk in jobs if chunk.began is not None]
        return max(0.0, self._clock() - min(began)) if began else 0.0

    def statistics(self) -> dict[str, Any]:
        """Return counters: per kind of operation, of the scan, and of stalls (``now``: stuck threads)."""
        figures: dict[str, Any] = {kind: of.as_dict() for kind, of in self._figures.items()}
        return figures | {
            "oldest_seconds": self.oldest(),
            "scan": None if self._scan is None else self._scan.statistics(),
            "undescribed": self._describer.left_out,
            "stalls": {
                "now": len(self._readers.stuck) + len(self._writers.stuck),
                "readers": len(self._readers.stuck),
                "writers": len(self._writers.stuck),
                "total": self._stalls,
                "reason": self._last_stall,
            },
        }

    # -- the end ------------------------------------------------------------------------------------

    async def close(self, deadline: float) -> bool:
        """Refuse new work and wait at most ``deadline`` seconds for what is queued and running.

        Return whether all of it ended. If not, what has not ended is answered as FAILED; a stuck thread may
        still touch its slots and the backend then, so neither may be used or closed while the process lives.
        """
        self._closing = True
        if self._scan is not None:
            self._scan.stop()
        self._describer.discard()
        self._idle = asyncio.Event()
        self._check_idle()
        try:
            await asyncio.wait_for(self._wait_idle(self._idle), deadline)
        except TimeoutError:
            self._closed = True
            self._give_up()
            return False
        finally:
            self._closed = True
            self._readers.stop()
            self._writers.stop()
            if self._timer is not None:
                self._timer.cancel()
        return True

    async def _wait_idle(self, idle: asyncio.Event) -> None:
        while True:
            await idle.wait()
            if not self._operations:
                return
            idle.clear()  # the last answer brought a deletion

    def _give_up(self) -> None:
        for threads in (self._readers, self._writers):
            threads.withdraw(lambda _: True)
        log.warning(
            "tier %s: %d operations did not end in time",
            self.tier,
            len(self._operations),
            extra=event("tier_unfinished", tier=self.tier, operations=list(self._operations)),
        )
        for operation in list(self._operations.values()):
            operation.unknown = True
            for i, outcome in enumerate(operation.results):
                if outcome is None:
                    operation.results[i] = failed([operation.ids[i]], "did not end in time")[0]
            self._finish(operation)

    def _check_idle(self) -> None:
        scanning = self._scan is not None and self._scan.running
        stuck = self._readers.stuck or self._writers.stuck  # a probe is answered before its thread is free
        busy = self._operations or scanning or stuck or self._describer.busy
        if self._idle is not None and not busy:
            self._idle.set()

    # -- deadlines ----------------------------------------------------------------------------------

    def check_deadlines(self) -> None:
        """Look for jobs past the deadline; called by a timer while anything is in flight."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._drain()
            limit = self._clock() - self._deadline
            for threads in (self._readers, self._writers):
                for chunk in threads.running():
                    if chunk not in threads.stuck and chunk.began is not None and chunk.began <= limit:
                        self._stall(threads, chunk)
                late = threads.withdraw(lambda chunk: chunk.queued <= limit and chunk.may_be_dropped)
                self._drop(late, "waited longer than the tier's deadline")
        finally:
            self._arm(self._clock())

    def _arm(self, now: float) -> None:
        """Look again when the oldest job that is not stuck is due, at the latest after one deadline."""
        if self._timer is not None or not self._operations:
            return
        due = now + self._deadline
        for threads in (self._readers, self._writers):
            for chunk in threads.running():
                if chunk.began is not None and chunk not in threads.stuck:
                    due = min(due, chunk.began + self._deadline)
        self._timer = self._loop.call_later(max(0.0, due - now), self.check_deadlines)

    def _stall(self, threads: Threads, chunk: Chunk) -> None:
        """Give up on a job whose thread is stuck, the rest of its operation, and what has no thread left."""
        operation, kind = chunk.operation, kind_of(chunk.operation.effect)
        if not self._readers.stuck and not self._writers.stuck:
            log.warning(
                "tier %s: a %s takes longer than %g s",
                self.tier,
                kind,
                self._deadline,
                extra=event("tier_stalled", tier=self.tier, kind=kind, op=operation.effect.op),
            )
        threads.stuck.add(chunk)
        self._stalls += 1
        self._last_stall = (
            f"a {kind} of {chunk.stop - chunk.start} blocks took longer than {self._deadline:g} s"
        )
        if self._operations.get(operation.effect.op) is operation and not operation.stalled:
            operation.stalled = True
            rest = threads.withdraw(lambda other: other.operation is operation and other.may_be_dropped)
            if isinstance(operation.effect, Probe):  # no slot is at stake: answer now
                operation.unknown = True
                self._finish(operation)
            else:
                self._stalled(operation.effect.op)
                self._drop(rest, STALLED)
        if threads.stalled:
            self._drop(threads.withdraw(lambda other: other.may_be_dropped), STALLED)
        elif threads.background_stalled:
            self._drop(threads.withdraw(lambda other: other.is_background), STALLED)

    def _drop(self, chunks: list[Chunk], reason: str) -> None:
        """Answer chunks that no thread has begun."""
        for chunk in chunks:
            self._settle(Ended(chunk, failed(chunk.ids, reason)), unknown=True)

    # -- in the threads -----------------------------------------------------------------------------

    def _run(self, chunk: Chunk) -> None:
        """Do one chunk, in a thread; whatever happens, its blocks get outcomes."""
        ended = Ended(chunk)
        try:
            self._call(chunk, ended)
        except BaseException as raised:
            ended.error = raised
            ended.outcomes = failed(chunk.ids, f"{type(raised).__name__}: {raised}")
        chunk.ended = self._clock()
        self._ended.append(ended)
        if not self._waking:  # two wake-ups are harmless; none is lost, as _drain resets before it looks
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._drain)

    def _call(self, chunk: Chunk, ended: Ended) -> None:
        effect, ids = chunk.operation.effect, chunk.ids
        if isinstance(effect, Probe):
            assert isinstance(self._backend, Probing)
            ended.found = self._backend.probe(ids)
            found = [found.block.id for found in ended.found]
            if not set(found) <= set(ids) or len(set(found)) < len(found):
                raise RuntimeError("the backend found blocks twice or that nobody asked for")
            return
        if isinstance(effect, Delete):
            ended.outcomes = self._backend.delete(ids, corrupt=effect.corrupt)
        else:
            views: list[memoryview] = []
            try:
                transfers = []
                for at in effect.blocks[chunk.start : chunk.stop]:
                    views.append(self._slot_view(at.slot, at.block.payload_bytes))
                    transfers.append(Transfer(at.block, views[-1]))
                act = self._backend.read if isinstance(effect, Read) else self._backend.write
                ended.outcomes = act(transfers)
            finally:
                for view in views:
                    view.release()
        if [outcome.id for outcome in ended.outcomes] != ids:
            raise RuntimeError("the backend did not answer block by block")
        if any(outcome.stored_bytes < 0 for outcome in ended.outcomes):
            raise RuntimeError("the backend says that a block takes less than no room")

    # -- back in the loop ---------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take in what threads have ended, in the loop's thread."""
        self._waking = False
        try:
            while self._ended:
                self._take(self._ended.popleft())
        finally:
            if self._ended:  # a callback raised: the loop reports it, the others still get their turn
                self._loop.call_soon(self._drain)

    def _take(self, ended: Ended) -> None:
        chunk, operation = ended.chunk, ended.chunk.operation
        threads, kind = self._threads_of(operation.effect), kind_of(operation.effect)
        if chunk in threads.stuck:
            threads.stuck.discard(chunk)
            if not self._readers.stuck and not self._writers.stuck:
                log.info("tier %s: answers again", self.tier, extra=event("tier_answers", tier=self.tier))
            self._check_idle()
        if self._operations.get(operation.effect.op) is not operation:
            return  # a probe that stalled, or answered by a close that gave up
        assert chunk.began is not None
        assert chunk.ended is not None
        operation.began = chunk.began if operation.began is None else min(operation.began, chunk.began)
        operation.ended = max(operation.ended, chunk.ended)
        self._figures[kind].seconds += chunk.ended - chunk.began
        unavailable = kind == "probe" and isinstance(ended.error, TierError)  # the way to say so
        if ended.error is not None and not unavailable:
            self._figures[kind].errors += 1
            self._log_once(kind, ended.error)
        self._settle(ended, unknown=ended.error is not None)

    def _settle(self, ended: Ended, *, unknown: bool) -> None:
        """Put a chunk's results to its operation's; the last one ends it."""
        chunk, operation = ended.chunk, ended.chunk.operation
        if self._operations.get(operation.effect.op) is not operation:
            return
        if ended.outcomes:
            operation.results[chunk.start : chunk.stop] = ended.outcomes
        operation.found += ended.found
        operation.unknown |= unknown
        operation.chunks_left -= 1
        if operation.chunks_left == 0:
            self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        del self._operations[operation.effect.op]
        self._figures[kind_of(operation.effect)].take(operation)
        self._answer(operation)
        self._check_idle()

    def _answer(self, operation: Operation) -> None:
        op = operation.effect.op
        if isinstance(operation.effect, Probe):
            self._probed(Probed(op, () if operation.unknown else operation.found, operation.unknown))
            return
        outcomes: list[Outcome] = [outcome for outcome in operation.results if outcome is not None]
        self._done(Finished(op, outcomes, operation.seconds))

    def _log_once(self, kind: Kind, error: BaseException) -> None:
        name = type(error).__name__
        if (kind, name) not in self._known_errors:
            self._known_errors.add((kind, name))
            log.error(
                "tier %s: %s raised; later ones are only counted",
                self.tier,
                kind,
                exc_info=error,
                extra=event("tier_exception", tier=self.tier, kind=kind),
            )

"""A mover on a bench: a small pool, a backend that can be held and broken, and a clock that stands still."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvtierd.core.effects import BlockAt
from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import Finished, FoundBlock, Outcome, Probed, Status
from kvtierd.edges.backends.base import Backend
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.edges.movers import Mover
from kvtierd.testing.backend_kit import block, payload
from kvtierd.testing.clock import ManualClock
from kvtierd.testing.faults import FaultyBackend, Hold

SIZE = 64
SLOT = 4096
SLOTS = 64
WAIT = 20.0
TEST_LIMIT = 50.0


class FaultyProbing(FaultyBackend):
    """Can be probed as well: finds what a scan of the inner backend does; held and broken as ``"probe"``."""

    def probe(self, ids: Sequence[BlockId]) -> list[FoundBlock]:
        """Return what is stored of the blocks."""
        self._enter("probe", tuple(ids))  # type: ignore[arg-type]
        wanted = set(ids)
        return [found for batch in self.inner.scan() for found in batch if found.block.id in wanted]

    def hold_probes(self) -> Hold:
        """Stop all further probes until the hold is released."""
        return self.hold("probe")  # type: ignore[arg-type]

    def break_probes(self, error: Exception, *, times: int | None = None) -> None:
        """Make the next ``times`` probes (None: all) raise."""
        self.raises("probe", error, times=times)  # type: ignore[arg-type]


class MoverBench:
    """Records what comes back and in which thread; time passes by :meth:`pass_deadline` only."""

    def __init__(
        self,
        *,
        inner: Backend | None = None,
        backend: type[FaultyBackend] = FaultyBackend,
        readers: int = 2,
        writers: int = 2,
        batch: int = 4,
        **options: Any,
    ) -> None:
        self.pool = bytearray(SLOT * SLOTS)
        self.backend = backend(inner if inner is not None else MemoryBackend("ram"))
        self.clock = ManualClock(100.0)
        self.finished: dict[int, list[Outcome]] = {}
        self.seconds: dict[int, float] = {}
        self.stalled: list[int] = []
        self.probed: dict[int, Probed] = {}
        self.order: list[int] = []
        self.threads: set[int] = set()
        self.changed = asyncio.Event()
        self.mover = Mover(
            "ram",
            self.backend,
            self.view,
            self.done,
            asyncio.get_running_loop(),
            stalled=self.note_stalled,
            probed=self.note_probed,
            readers=readers,
            writers=writers,
            batch=batch,
            **{"deadline": 30.0, "clock": self.clock, **options},
        )

    def view(self, slot: int, length: int) -> memoryview:
        """Return a slot's memory."""
        return memoryview(self.pool)[slot * SLOT : slot * SLOT + length]

    def done(self, finished: Finished) -> None:
        """Record an end, which must be the only one of its operation."""
        assert finished.op not in self.finished, "answered twice"
        self.finished[finished.op] = list(finished.outcomes)
        self.seconds[finished.op] = finished.seconds
        self.order.append(finished.op)
        self.threads.add(threading.get_ident())
        self.changed.set()

    def note_stalled(self, op: int) -> None:
        """Record a stall, which must come once and before the end."""
        assert op not in self.stalled, "stalled twice"
        assert op not in self.finished, "stalled after its end"
        self.stalled.append(op)
        self.threads.add(threading.get_ident())
        self.changed.set()

    def note_probed(self, probed: Probed) -> None:
        """Record a probe's answer, which must be the only one."""
        assert probed.op not in self.probed, "answered twice"
        self.probed[probed.op] = probed
        self.changed.set()

    def pass_deadline(self, seconds: float = 31.0) -> None:
        """Let time pass and the mover look, as its timer would."""
        self.clock.advance(seconds)
        self.mover.check_deadlines()

    def stalls(self) -> dict[str, Any]:
        """Return the mover's figures about stalls."""
        figures: dict[str, Any] = self.mover.statistics()["stalls"]
        return figures

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something that was recorded makes the condition true."""
        async with asyncio.timeout(WAIT):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def outcomes(self, op: int) -> list[Outcome]:
        """Wait for an operation's end."""
        await self.wait_for(lambda: op in self.finished)
        return self.finished[op]

    async def answer(self, op: int) -> Probed:
        """Wait for a probe's answer."""
        await self.wait_for(lambda: op in self.probed)
        return self.probed[op]

    def fill(self, numbers: Sequence[int]) -> None:
        """Put the bytes of blocks into the slots of their numbers."""
        for number in numbers:
            self.view(number, SIZE)[:] = payload(number, SIZE)

    async def __aenter__(self) -> MoverBench:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.backend.heal()
        await self.mover.close(WAIT)


def at(*numbers: int, slots: Sequence[int] | None = None) -> tuple[BlockAt, ...]:
    """Return blocks in the slots of their numbers, or in ``slots``."""
    return tuple(
        BlockAt(block(number, size=SIZE), slot)
        for number, slot in zip(numbers, slots or numbers, strict=True)
    )


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    """Return the outcomes' statuses."""
    return [outcome.status for outcome in outcomes]


async def entered(hold: Hold, count: int = 1) -> None:
    """Wait until calls have come to a hold."""
    await asyncio.to_thread(hold.wait_entered, count)


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asyncio test with a limit of its own."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(TEST_LIMIT):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return wrapper

"""Between the core's turns and the hub: what readers are told is recorded first, and a restart's difference.

A reader that was connected when the daemon ended comes back a moment after the sockets are open again (ZeroMQ
tries every 100 to 200 ms). A PUB socket does not wait for it, so what is to be told is held for
:data:`REJOIN` seconds, but for the first run of all; requests are answered meanwhile, and already while the
journal is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvtierd.core.model import Block, BlockId, TierEvent
from kvtierd.core.stimuli import Found
from kvtierd.edges.journal import Journal
from kvtierd.wire.announced import Announced, History, TierLabel, Told

REJOIN = 0.5
"""Seconds for readers to connect again before they are told the difference."""
SLICE = 512
"""Events told in a row, where there are many (a pool that is gone): requests are answered between slices."""


Known = Callable[[str, BlockId], Block | None]
"""A tier's description of a block, if it has that block."""


class Hub(Protocol):
    """Where events go."""

    def seed(self, events: Sequence[TierEvent]) -> None:
        """Know residencies that readers were told of by an earlier run; nothing is sent."""

    def settle(self) -> None:
        """Take note that all that an earlier run told is seeded."""

    def publish(self, events: Sequence[TierEvent]) -> None:
        """Tell every audience one turn's events."""


class Announcer:
    """Tells the hub what readers do not know yet. :meth:`load`, then :meth:`start` in the loop's thread.

    ``tiers``: those whose events are on, in drain order. ``fresh``: whether there can have been no earlier
    run, should there be no journal. ``pool_survived``: whether the pool's blocks of before are stored again
    (with :meth:`load`); without it they are taken back. ``early``: whether turns are run, and publish, before
    the start is done; that is kept till then.
    """

    def __init__(
        self,
        hub: Hub,
        journal: Journal,
        tiers: Sequence[TierLabel],
        *,
        fresh: bool = True,
        pool_survived: bool = False,
        early: bool = False,
    ) -> None:
        self._hub = hub
        self._journal = journal
        self._tiers = tiers
        self._fresh = fresh
        self._pool_survived = pool_survived
        self._announced = Announced(tiers, None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holding = True
        self._queue: deque[Told] = deque()
        """What is held, or told in slices, and all that came after it."""
        self._finished = False
        self._early: list[tuple[Sequence[TierEvent], Iterable[str]]] | None = [] if early else None
        self._loaded = False

    def load(
        self,
        restored: Sequence[TierEvent] = (),
        scanned: Iterable[str] = (),
        known: Known = lambda tier, block_id: None,
    ) -> None:
        """Read the journal, and seed the hub with what readers know. May take seconds: any thread.

        ``restored``: the stores of what survived in the tiers ``scanned``, all of it. ``known``: what a tier
        has in memory already.
        """
        history = self._journal.load()
        if history is not None:
            _share(history, known)
        self._announced = Announced(self._tiers, history, pool_survived=self._pool_survived)
        self._journal.follow(self._announced)
        told = self._announced.begin()
        self._hub.seed(told.seeds)
        self._hub.settle()
        self._holding = not self._fresh or self._journal.continued
        self._enqueue(Told([], told.events))
        self._enqueue(self._announced.advance(restored, scanned=scanned))
        self._loaded = True

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let events out, at once or when readers had time to come back; the hub speaks."""
        self._loop = loop
        early, self._early = self._early or (), None
        for events, scanned in early:
            self.publish(events, scanned)
        if self._holding:
            loop.call_later(REJOIN, self.release)

    def publish(self, events: Sequence[TierEvent], scanned: Iterable[str] = ()) -> None:
        """Tell what is new in one turn's events; ``scanned``: tiers whose scan ended with it."""
        if self._finished:
            return
        if self._early is not None:
            self._early.append((events, scanned))
            return
        told = self._announced.advance(events, scanned=scanned)
        if self._queue or self._holding:
            self._enqueue(told)
        elif len(told.events) > SLICE:
            self._enqueue(told)
            self.release()
        else:
            self._tell(told)

    def release(self) -> None:
        """Tell what was held, a slice now and the others soon."""
        self._holding = False
        if self._queue:
            self._tell(self._queue.popleft())
        if self._queue and self._loop is not None:
            self._loop.call_soon(self.release)

    @property
    def settled(self) -> bool:
        """Whether readers were told all that is known."""
        return not (self._holding or self._queue) and self._early is None

    def stores(self) -> list[TierEvent]:
        """Return the stores that tell all that readers know of."""
        return self._announced.stores()

    def known(self, found: Found) -> Found:
        """Return a part of a scan with the descriptions that are in memory already."""
        known = self.known_block
        return replace(
            found, blocks=[replace(item, block=known(found.tier, item.block)) for item in found.blocks]
        )

    def known_block(self, tier: str, block: Block) -> Block:
        """Return an equal description that is in memory already, if there is one."""
        return self._announced.known(tier, block)

    def tick(self) -> None:
        """Do the journal's upkeep."""
        if not self._holding:
            self._journal.tick()

    def finish(self) -> None:
        """Tell what is held, then nothing any more: what changes from now on is found at the next start."""
        while self._queue and self._early is None:
            self._tell(self._queue.popleft())
        self._holding = False
        self._finished = True

    def close(self, flushed: bool) -> None:
        """End the journal. ``flushed``: all that was told has left the process. Waits for the disk."""
        if self._loaded:  # else a thread may still be at it, and nothing was told
            self._journal.close(flushed=flushed)

    def statistics(self) -> dict[str, Any]:
        """Return plain values by name."""
        return {
            **self._journal.statistics(),
            "announced": len(self._announced),
            "unconfirmed": self._announced.unconfirmed,
            "confirmed": self._announced.confirmed,
            "repeated": self._announced.repeated,
            "unmatched": self._announced.unmatched,
            "holding": not self.settled,
        }

    def _enqueue(self, told: Told) -> None:
        seeds = told.seeds
        for at in range(0, max(len(told.events), bool(seeds)), SLICE):
            self._queue.append(Told(seeds, told.events[at : at + SLICE]))
            seeds = []

    def _tell(self, told: Told) -> None:
        if told.seeds:
            self._hub.seed(told.seeds)
        if told.events:
            self._journal.append(told.events)
            self._hub.publish(told.events)


def _share(history: History, known: Known) -> None:
    """Have one description of each block that the journal and a tier's index say the same of.

    A doubt is about the very entry: where that one changes, so does the doubt.
    """
    recent = {id(block) for _, block in history.doubts}  # they live on with the list
    changed: dict[int, Block] = {}
    for label, blocks in history.entries.items():
        for block_id, block in blocks.items():
            other = known(label.name, block_id)
            if other is not None and other == block:
                blocks[block_id] = other
                if id(block) in recent:
                    changed[id(block)] = other
    history.doubts = [(label, changed.get(id(block), block)) for label, block in history.doubts]

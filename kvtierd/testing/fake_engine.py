"""An engine without a GPU: walks requests through a session as a real one does and checks every byte.

It has no cache of its own, so each request asks for its whole prompt, copies what the daemon has out of the
pool, "computes" the rest (:func:`kvtierd.testing.workload.payload`) and stores it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtierd.client import Session
from kvtierd.core.model import BlockKey
from kvtierd.testing.workload import WorkBlock, WorkRequest, payload


@dataclass(slots=True)
class Tally:
    """What an engine saw so far, in blocks and bytes. ``hits`` counts loaded blocks by their source tier.

    ``missed_promises``: blocks that a lookup reported and the load right after it did not give (a slow or
    contended secondary tier). ``not_stored``: computed blocks for which the daemon had no slot.
    """

    requests: int = 0
    asked: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    missed_promises: int = 0
    computed: int = 0
    stored: int = 0
    not_stored: int = 0
    verified_bytes: int = 0
    written_bytes: int = 0
    mismatches: list[BlockKey] = field(default_factory=list)

    @property
    def loaded(self) -> int:
        """Blocks that did not have to be computed."""
        return sum(self.hits.values())


class FakeEngine:
    """Replays requests on a scheduler session. ``lease`` and ``load_deadline`` in seconds."""

    def __init__(self, session: Session, *, lease: float = 5.0, load_deadline: float = 1.0) -> None:
        self._session = session
        self._lease = lease
        self._load_deadline = load_deadline
        self.tally = Tally()

    def replay(self, request: WorkRequest) -> int:
        """Serve one request; returns how many of its blocks were loaded instead of computed."""
        self._session.touch([block.key for block in request.blocks])
        loaded = self.load([block.key for block in request.prompt])
        self.store(request.blocks[loaded:])
        self.tally.requests += 1
        return loaded

    def load(self, keys: Sequence[BlockKey]) -> int:
        """Copy out and verify the longest prefix of ``keys`` that is to be had; returns its length."""
        self.tally.asked += len(keys)
        found = self._session.lookup(keys, promote=True, lease=self._lease)
        try:
            prefix = keys[: found.prefix]
            loaded = self._copy_out(prefix) if prefix else 0
        finally:
            found.release()
        self.tally.missed_promises += len(prefix) - loaded
        return loaded

    def store(self, blocks: Sequence[WorkBlock]) -> int:
        """Compute and store blocks; returns how many the daemon took."""
        if not blocks:
            return 0
        self.tally.computed += len(blocks)
        job = self._session.prepare_store(
            [block.key for block in blocks], meta=[block.meta for block in blocks]
        )
        for key, view in zip(job.keys, job.views(), strict=True):
            view[:] = payload(key, len(view))
            self.tally.written_bytes += len(view)
        stored = len(job.commit())
        self.tally.stored += stored
        self.tally.not_stored += len(blocks) - stored
        return stored

    def _copy_out(self, keys: Sequence[BlockKey]) -> int:
        got = self._session.load(keys, deadline=self._load_deadline)
        try:
            for key, view, source in zip(got.keys, got.views(), got.sources, strict=True):
                self._verify(key, view)
                self.tally.hits[source] += 1
        finally:
            got.release()
        return len(got.keys)

    def _verify(self, key: BlockKey, view: memoryview) -> None:
        if bytes(view) != payload(key, len(view)):
            self.tally.mismatches.append(key)
        self.tally.verified_bytes += len(view)

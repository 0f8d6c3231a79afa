"""Resets that wait for storage: answered when a restart could not find the removed blocks any more.

A reset follows a change of weights, so a block that came back after a crash would be wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvtierd.core.effects import LadderReply
from kvtierd.core.model import BlockId
from kvtierd.core.stack import Removals, Stack
from kvtierd.core.tier import SecondaryTier


@dataclass(slots=True)
class _Waiting:
    session: int
    answer: LadderReply
    left: dict[str, set[BlockId]]
    """By tier: blocks whose deletion is under way, or due when their write ends."""
    namespaces: Collection[str] | None
    """``None``: all."""
    scans: set[str]
    """Tiers whose scan has to end before it is known what is to be deleted."""


class Resets:
    """The resets that are not answered yet."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(
        self,
        session: int,
        namespaces: Collection[str] | None,
        tiers: Sequence[str],
        answer: Callable[[Removals], LadderReply],
    ) -> None:
        """Remove namespaces (``None``: all) from tiers; ``answer`` goes out now or when storage is gone."""
        reply = answer(self._stack.reset(namespaces, tiers))
        waiting = _Waiting(session, reply, {}, namespaces, set())
        for tier in self._stack.secondaries:
            if tier.name in tiers:
                if tier.scanning:
                    waiting.scans.add(tier.name)
                self._note(waiting, tier)
        if waiting.left or waiting.scans:
            self._waiting.append(waiting)
        else:
            self._answer(waiting)

    @staticmethod
    def _note(waiting: _Waiting, tier: SecondaryTier) -> None:
        """Note what of a tier a reset has to wait for."""
        under_way = (*tier.deletes, *tier.doomed)
        of = waiting.namespaces
        if ids := {block_id for block_id in under_way if of is None or block_id.namespace in of}:
            waiting.left[tier.name] = ids

    def scanned(self, tier: SecondaryTier) -> None:
        """Take note that a tier's content is known now."""
        for waiting in self._waiting:
            if tier.name in waiting.scans:
                waiting.scans.discard(tier.name)
                self._note(waiting, tier)
        self._answer_complete()

    def finished(self, tier: SecondaryTier, ids: Iterable[BlockId]) -> None:
        """Take note that an operation on these blocks ended."""
        if not self._waiting:
            return
        gone = [block_id for block_id in ids if block_id not in tier.deletes and block_id not in tier.doomed]
        for waiting in self._waiting:
            if (left := waiting.left.get(tier.name)) is not None:
                left.difference_update(gone)
                if not left:
                    del waiting.left[tier.name]
        self._answer_complete()

    def _answer_complete(self) -> None:
        for waiting in [waiting for waiting in self._waiting if not (waiting.left or waiting.scans)]:
            self._waiting.remove(waiting)
            self._answer(waiting)

    def forget_session(self, number: int) -> None:
        """Drop what a closed session waited for."""
        self._waiting = [waiting for waiting in self._waiting if waiting.session != number]

    def _answer(self, waiting: _Waiting) -> None:
        self._stack.answer(waiting.session, waiting.answer)

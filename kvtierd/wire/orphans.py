"""Blocks whose parent a reader does not know, for routers that misplace them: told again when it comes.

Such a router forgets the store of a child at once, and that of the child's children (vllm-router, llm-d), or
takes it for a root (AIBrix).
When the parent is stored at last, all of them are taken back and stored again, root first: to readers that
knew them this says nothing, also where they count stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtierd.core.model import EventHash
from kvtierd.wire.places import EVERY_RANK, ReaderKey
from kvtierd.wire.projection import Change, parent_key

Anywhere = tuple[int, EventHash, int]
"""A block wherever it is: dp rank, event hash, group."""


class Orphans:
    """Keeps the orphans among ``announced``, all residencies as the projection has them.

    ``removals``: whether readers hear that they are taken back; those that never hear of a removal only get
    the second store.
    """

    def __init__(self, announced: Mapping[ReaderKey, Change], *, removals: bool = True) -> None:
        self._announced = announced
        self._removals = removals
        self._lost: set[ReaderKey] = set()
        self._waiting: dict[Anywhere, dict[ReaderKey, None]] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._lost)

    def stored(self, change: Change) -> Iterator[Change]:
        """Note a store that is in ``announced`` by now; yield what must be told again after it."""
        if change.parent is not None:
            parent = parent_key(self._announced, change)
            if parent is None or parent in self._lost:
                self._lose(change)
                return
        found = [change.key]
        while found:
            key = found.pop()
            event_hash, place = key
            for child in self._waiting.pop((place.rank, event_hash, place.group), ()):
                self._lost.discard(child)
                again = self._announced[child]
                yield again.undone(told=self._removals)
                yield again
                found.append(child)

    def removed(self, change: Change) -> None:
        """Note that a store has been taken back."""
        if change.key in self._lost:
            self._lost.discard(change.key)
            parent = self._parent(change)
            siblings = self._waiting[parent]
            del siblings[change.key]
            if not siblings:
                del self._waiting[parent]

    def missing(self, change: Change) -> None:
        """Note that a reader which just joined was told of a store and not of its parent."""
        known = self._announced.get(change.key) or self._announced.get(change.of_rank(EVERY_RANK).key)
        if known is not None and known.key not in self._lost and known.parent is not None:
            parent = parent_key(self._announced, known)
            if parent is None or parent in self._lost:
                self._lose(known)

    def _lose(self, change: Change) -> None:
        self._lost.add(change.key)
        self._waiting.setdefault(self._parent(change), {})[change.key] = None

    @staticmethod
    def _parent(change: Change) -> Anywhere:
        parent = change.parent
        assert parent is not None
        return change.place.rank, parent, change.place.group

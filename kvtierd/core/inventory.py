"""What is resident, page by page from one snapshot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from kvtierd.core.effects import InventoryEntry, InventoryPage, SurveyEntry
from kvtierd.core.model import BlockKey, State, event_hash
from kvtierd.core.residency import N, Node, ResidentSet, size_of
from kvtierd.core.sessions import Session
from kvtierd.core.stack import Stack
from kvtierd.core.stimuli import Inventory
from kvtierd.core.tier import TierSpec


class Survey:
    """All residencies of all namespaces, or of one tier, page by page; turns may happen in between.

    What a tier holds is noted when its first entry is asked for; what left since then is left out.
    """

    def __init__(self, stack: Stack, only: str | None = None) -> None:
        self._stack = stack
        self._entries = self._walk(only)
        self.position = 0

    def page(self, limit: int) -> tuple[SurveyEntry, ...]:
        """Return the next entries, fewer than ``limit`` only at the end."""
        entries = tuple(itertools.islice(self._entries, limit))
        self.position += len(entries)
        return entries

    def models(self, entries: tuple[SurveyEntry, ...]) -> dict[str, str]:
        """Return the models of the entries' namespaces, as far as engines told them."""
        spaces = self._stack.primary.spaces
        return {name: spaces[name].layout.model for name in {e.namespace for e in entries} if name in spaces}

    def _walk(self, only: str | None) -> Iterator[SurveyEntry]:
        primary = self._stack.primary
        if only in (None, primary.name):
            for space in list(primary.spaces.values()):
                yield from _residencies(primary.name, space.blocks, space.geometry.slot_bytes)
        for tier in self._stack.secondaries:
            if only in (None, tier.name):
                yield from _residencies(tier.name, tier.blocks)


class Pages:
    """Inventory snapshots, at most one for each session, dropped with its last page.

    A snapshot notes the blocks only; entries, which take ten times as long, are made page by page.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._snapshots: dict[int, list[tuple[TierSpec, list[Node]]]] = {}

    def page(self, session: Session, request: Inventory) -> None:
        """Answer one page; cursor 0 takes a new snapshot."""
        if request.cursor == 0 or session.number not in self._snapshots:
            self._snapshots[session.number] = list(self._noted(session.namespace, request.tier))
        noted = self._snapshots[session.number]
        total = sum(len(nodes) for _, nodes in noted)
        end = request.cursor + request.limit
        if end >= total:
            self.forget(session.number)
        entries: list[InventoryEntry] = []
        start = request.cursor
        for spec, nodes in noted:
            entries += [_entry(spec, node) for node in nodes[start : start + request.limit - len(entries)]]
            start = max(0, start - len(nodes))
        self._stack.answer(
            session.number,
            InventoryPage(
                id=request.id, entries=tuple(entries), cursor=end if end < total else 0, total=total
            ),
        )

    def entries(self, namespace: str, only: str | None = None) -> Iterator[InventoryEntry]:
        """Iterate over a namespace's residencies in drain order."""
        for spec, nodes in self._noted(namespace, only):
            for node in nodes:
                yield _entry(spec, node)

    def _noted(self, namespace: str, only: str | None) -> Iterator[tuple[TierSpec, list[Node]]]:
        """Yield each tier's blocks of a namespace, as they are now."""
        resident = State.RESIDENT
        specs = [self._stack.primary.spec, *(tier.spec for tier in self._stack.secondaries)]
        space = self._stack.primary.spaces.get(namespace)
        indexes: list[Mapping[BlockKey, Node]] = [{} if space is None else space.index]
        indexes += [tier.blocks.of(namespace) for tier in self._stack.secondaries]
        for spec, index in zip(specs, indexes, strict=True):
            if only is None or spec.name == only:
                yield spec, [node for node in index.values() if node.state is resident]

    def forget(self, session: int) -> None:
        """Drop a session's snapshot."""
        self._snapshots.pop(session, None)


def _entry(spec: TierSpec, node: Node) -> InventoryEntry:
    block = node.block
    locality = spec.locality.value if spec.locality is not None else None
    return InventoryEntry(spec.name, spec.medium.value, locality, block.key, block.hashes, block.dp_rank)


def _residencies(tier: str, blocks: ResidentSet[N], slot_bytes: int = 0) -> Iterator[SurveyEntry]:
    for node in list(blocks):
        if node.state is State.RESIDENT:
            block = node.block
            namespace, key = block.namespace, block.key
            hashes = block.hashes if block.hashes != (event_hash(key),) else ()
            yield SurveyEntry(tier, namespace, key, size_of(node, slot_bytes), block.dp_rank, hashes)

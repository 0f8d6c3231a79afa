"""Blocks by identity, without an object for each identity: a million of them would be 64 MB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from kvtierd.core.model import Block, BlockId, BlockKey


class BlockMap:
    """A set of blocks, found by their identity; those of one namespace stay in the order of insertion."""

    __slots__ = ("_spaces",)

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._spaces: dict[str, dict[BlockKey, Block]] = {}
        for block in blocks:
            self.of(block.namespace)[block.key] = block

    def of(self, namespace: str) -> dict[BlockKey, Block]:
        """Return a namespace's blocks by key; they may be changed there."""
        found = self._spaces.get(namespace)
        if found is None:
            found = self._spaces[namespace] = {}
        return found

    def get(self, block_id: BlockId) -> Block | None:
        """Return the block of this identity."""
        found = self._spaces.get(block_id.namespace)
        return None if found is None else found.get(block_id.key)

    def pop(self, block: Block) -> Block | None:
        """Take out the one that has this block's identity."""
        found = self._spaces.get(block.common.namespace)
        return None if found is None else found.pop(block.key, None)

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def __iter__(self) -> Iterator[Block]:
        return chain.from_iterable(blocks.values() for blocks in self._spaces.values())

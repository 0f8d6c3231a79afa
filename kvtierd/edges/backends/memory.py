"""Blocks in this process's own memory, with the header and the checks of a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import FormatError

SCAN_BATCH = 512


class MemoryBackend:
    """A store that lives as long as ``store`` does (block id -> header region and payload, oldest first).

    For ``memory://`` tiers and tests; hand the same ``store`` to a second backend to play a restart.
    """

    def __init__(self, name: str, store: dict[BlockId, bytes] | None = None) -> None:
        self.name = name
        self.store: dict[BlockId, bytes] = {} if store is None else store
        self._lock = threading.Lock()

    def open(self) -> None:
        """Nothing to do: memory is always there."""

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Yield what proves itself, least recently used first; what does not is dropped."""
        with self._lock:
            ids = list(self.store)
        for start in range(0, len(ids), SCAN_BATCH):
            found = [self._found(block_id) for block_id in ids[start : start + SCAN_BATCH]]
            yield [block for block in found if block is not None]

    def _found(self, block_id: BlockId) -> FoundBlock | None:
        with self._lock:
            stored = self.store.get(block_id)
        if stored is None:
            return None
        try:
            header = fs_format.decode(stored)
            if header.block.id != block_id:
                raise FormatError(fs_format.Flaw.OTHER_BLOCK)
            header.check_size(len(stored))
        except FormatError:
            self.delete([block_id], corrupt=True)
            return None
        return FoundBlock(header.block, fs_format.stored_bytes(header.block))

    def describe(self, namespace: str, layout: Layout) -> None:
        """Nothing to remember: nobody can read it afterwards."""

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store copies of the blocks."""
        return [self._write(transfer.block, transfer.data) for transfer in transfers]

    def _write(self, block: Block, data: memoryview) -> Outcome:
        if len(data) != block.payload_bytes:
            return Outcome(block.id, Status.FAILED, reason="payload length differs")
        payload = bytes(data)
        try:
            stored = fs_format.encode(block, fs_format.digest(payload)) + payload
        except FormatError as error:
            return Outcome(block.id, Status.FAILED, reason=str(error))
        with self._lock:
            self.store.pop(block.id, None)
            self.store[block.id] = stored
        return Outcome(block.id, Status.OK, fs_format.stored_bytes(block))

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks out and verify them; a read makes a block the most recent one."""
        return [self._read(transfer.block, transfer.data) for transfer in transfers]

    def _read(self, block: Block, data: memoryview) -> Outcome:
        with self._lock:
            stored = self.store.pop(block.id, None)
            if stored is None:
                return Outcome(block.id, Status.GONE)
            self.store[block.id] = stored
        try:
            offset, expected = fs_format.prove(stored, block, len(stored))
            payload = memoryview(stored)[offset:]
            fs_format.check_digest(fs_format.digest(payload), expected)
        except FormatError as error:
            return Outcome(block.id, Status.CORRUPT, reason=str(error))
        data[:] = payload
        return Outcome(block.id, Status.OK)

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Drop blocks."""
        with self._lock:
            for block_id in ids:
                self.store.pop(block_id, None)
        return [Outcome(block_id, Status.OK) for block_id in ids]

    def estimate(self, block: Block) -> int:
        """Return what a file of the block would occupy, in bytes."""
        return fs_format.stored_bytes(block)

    def close(self) -> None:
        """Keep the store for whoever else holds it."""

"""A whole tier type in one file: blocks in one flat folder, each with the header that proves what it is."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtierd.core.model import Block, BlockId, Layout, group_of, hash_of
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.base import Backend, Transfer
from kvtierd.errors import TierError


def make(name: str, options: Mapping[str, Any]) -> Backend:
    """Return the backend of a tier; the entry point. Storage is touched by ``open`` only."""
    unknown = set(options) - {"folder"}
    if unknown or not isinstance(options.get("folder"), str):
        raise ValueError("write options: {folder: PATH} and nothing else")
    return FlatBackend(name, Path(options["folder"]))


class FlatBackend:
    """One file per block, named by namespace, hash and group. The modification time is that of last use."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    def open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TierError(self.name, f"cannot use {self.folder}: {error.strerror}") from error

    def path(self, block_id: BlockId) -> Path:
        return self.folder / f"{block_id.namespace}.{hash_of(block_id.key).hex()}.{group_of(block_id.key)}"

    def scan(self) -> Iterator[list[FoundBlock]]:
        paths = [path for path in self.folder.iterdir() if path.name.count(".") == 2]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
            try:
                stored = path.read_bytes()
                header = fs_format.decode(stored)
                header.check_size(len(stored))
            except (OSError, fs_format.FormatError):
                continue
            if self.path(header.block.id) == path:
                yield [FoundBlock(header.block, fs_format.stored_bytes(header.block))]

    def describe(self, namespace: str, layout: Layout) -> None:
        pass

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        return [self._write(transfer.block, transfer.data) for transfer in transfers]

    def _write(self, block: Block, data: memoryview) -> Outcome:
        if len(data) != block.payload_bytes:
            return Outcome(block.id, Status.FAILED, reason="payload length differs")
        temporary = self.folder / f"{secrets.token_hex(8)}.tmp"
        try:
            temporary.write_bytes(fs_format.encode(block, fs_format.digest(data)) + bytes(data))
            self._touch(temporary)
            temporary.rename(self.path(block.id))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            return Outcome(block.id, Status.FAILED, reason=str(error.strerror))
        return Outcome(block.id, Status.OK, fs_format.stored_bytes(block))

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        return [self._read(transfer.block, transfer.data) for transfer in transfers]

    def _read(self, block: Block, data: memoryview) -> Outcome:
        path = self.path(block.id)
        try:
            stored = path.read_bytes()
            header = fs_format.decode(stored)
            header.check(block, len(stored))
            payload = memoryview(stored)[header.data_offset :]
            header.check_payload(payload)
            self._touch(path)
        except FileNotFoundError:
            return Outcome(block.id, Status.GONE)
        except OSError as error:
            return Outcome(block.id, Status.FAILED, reason=str(error.strerror))
        except fs_format.FormatError as error:
            return Outcome(block.id, Status.CORRUPT, reason=str(error))
        data[:] = payload
        return Outcome(block.id, Status.OK)

    def _touch(self, path: Path) -> None:
        now = time.time_ns()  # finer than the kernel's tick
        os.utime(path, ns=(now, now))

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        for block_id in ids:
            self.path(block_id).unlink(missing_ok=True)
        return [Outcome(block_id, Status.OK) for block_id in ids]

    def estimate(self, block: Block) -> int:
        return fs_format.stored_bytes(block)

    def close(self) -> None:
        pass

"""Finds the blocks of a filesystem tier at start: names first, then headers in order of last use."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import FoundBlock
from kvtierd.edges.backends import fs_format, fs_tree
from kvtierd.edges.backends.fs_format import Flaw, FormatError
from kvtierd.edges.backends.fs_tree import Folders, Quarantine

BATCH = 512
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_Candidate = tuple[int, str, str]  # last use in nanoseconds, namespace, file name


class FsScan:
    """One scan. Reads headers only: payloads are proved when they are read.

    Bad entries never stop it. Well-named files that are provably not their block go to the quarantine,
    unreadable ones, newer formats and foreign names stay as they are; ``count`` is told of all.
    """

    def __init__(
        self, root: Path, device: int | None, quarantine: Quarantine, count: Callable[[str], None]
    ) -> None:
        self._root = root
        self._device = device
        self._quarantine = quarantine
        self._count = count

    def run(self) -> Iterator[list[FoundBlock]]:
        """Yield batches of at most ``BATCH`` blocks, least recently used first."""
        try:
            with Folders(self._root, self._device) as folders:
                candidates = sorted(self._candidates(folders))
        except OSError:
            self._count("scan: unreadable")
            return
        for start in range(0, len(candidates), BATCH):
            found = self._prove(candidates[start : start + BATCH])
            if found:
                yield found

    def _candidates(self, folders: Folders) -> Iterator[_Candidate]:
        for namespace in self._subfolders(folders.blocks(), fs_tree.is_namespace):
            try:
                parent = fs_tree.open_folder(namespace, folders.blocks())
            except OSError:
                self._count("scan: unreadable")
                continue
            try:
                for shard in self._subfolders(parent, fs_tree.is_shard):
                    yield from self._files(parent, namespace, shard)
            finally:
                os.close(parent)

    def _subfolders(self, parent: int, wanted: Callable[[str], bool]) -> Iterator[str]:
        for entry in self._entries(parent):
            if entry.is_dir(follow_symlinks=False) and wanted(entry.name):
                yield entry.name
            elif entry.name.startswith(fs_tree.TEMPORARY):
                self._temporary(parent, entry.name)
            elif entry.name != fs_tree.RECORD:
                self._count("scan: foreign")

    def _entries(self, folder: int) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                yield from entries
        except OSError:
            self._count("scan: unreadable")

    def _files(self, parent: int, namespace: str, shard: str) -> Iterator[_Candidate]:
        try:
            folder = fs_tree.open_folder(shard, parent)
        except OSError:
            self._count("scan: unreadable")
            return
        try:
            for entry in self._entries(folder):
                key = fs_tree.parse_name(entry.name)
                if key is not None and fs_tree.shard_of(key) == shard:
                    yield from self._file(entry, namespace)
                elif entry.name.startswith(fs_tree.TEMPORARY):
                    self._temporary(folder, entry.name)
                else:
                    self._count("scan: foreign")
        finally:
            os.close(folder)

    def _file(self, entry: os.DirEntry[str], namespace: str) -> Iterator[_Candidate]:
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            self._count("scan: unreadable")
            return
        if stat.S_ISREG(info.st_mode):
            yield (info.st_mtime_ns, namespace, entry.name)
        else:
            self._count("scan: foreign")

    def _temporary(self, folder: int, name: str) -> None:
        removed = fs_tree.remove_stale_temporary(folder, name)
        self._count("scan: stale temporaries removed" if removed else "scan: temporaries left")

    def _prove(self, candidates: list[_Candidate]) -> list[FoundBlock]:
        found = []
        try:
            with Folders(self._root, self._device) as folders:
                for _, namespace, name in candidates:
                    block = self._prove_one(folders, namespace, name)
                    if block is not None:
                        found.append(block)
        except OSError:
            self._count("scan: unreadable")
        return found

    def _prove_one(self, folders: Folders, namespace: str, name: str) -> FoundBlock | None:
        key = fs_tree.parse_name(name)
        assert key is not None
        block_id = BlockId(namespace, key)
        try:
            with folders.of(block_id) as folder:
                try:
                    return _read_header(folder, name, block_id)
                except FormatError as error:
                    self._count(f"scan: {error}")
                    if error.flaw not in (Flaw.VERSION, Flaw.FOREIGN):
                        self._quarantine.move(folders, folder, block_id)
                        self._count("quarantined")
        except FileNotFoundError:
            pass  # deleted since it was listed
        except OSError:
            self._count("scan: unreadable")
        return None


def _read_header(folder: int, name: str, block_id: BlockId) -> FoundBlock:
    """Prove a file's header, identity and size.

    Raises:
        FormatError: it is not that block.
        OSError: it could not be read.
    """
    fd = os.open(name, _OPEN, dir_fd=folder)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise FormatError(Flaw.FOREIGN)
        start = os.pread(fd, fs_format.ALIGN, 0)
        size = fs_format.data_offset(start)
        if size > len(start):
            start += os.pread(fd, size - len(start), len(start))
        header = fs_format.decode(start)
        if header.block.id != block_id:
            raise FormatError(Flaw.OTHER_BLOCK)
        header.check_size(info.st_size)
        return FoundBlock(header.block, size + fs_format.aligned(header.block.payload_bytes))
    finally:
        os.close(fd)

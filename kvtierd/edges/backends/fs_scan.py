"""Finds the blocks of a filesystem tier at start; hands them over in order of last use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import FoundBlock
from kvtierd.edges.backends import fs_format, fs_tree
from kvtierd.edges.backends.fs_format import Flaw, FormatError
from kvtierd.edges.backends.fs_packed import PackedStore
from kvtierd.edges.backends.fs_quarantine import Quarantine
from kvtierd.edges.backends.fs_scan_pool import Folder, FolderReader
from kvtierd.edges.backends.fs_scan_worker import Proved
from kvtierd.edges.backends.fs_segment_files import SegmentFiles
from kvtierd.edges.backends.fs_segments import Segment
from kvtierd.edges.backends.fs_tree import Folders

BATCH = 512

_File = tuple[int, FoundBlock]
"""A proved file: last use in nanoseconds, and its block."""
_Slot = tuple[int, Segment, int, BlockId | None]
"""A slot: last use in nanoseconds, segment, number, and whose it should be where that is known."""


class FsScan:
    """One scan. Reads headers only: payloads are proved when they are read.

    Bad entries never stop it. Well-named files that are provably not their block go to the quarantine,
    unreadable ones, newer formats and foreign names stay as they are; ``count`` is told of all. ``packed`` is
    None where nobody packs; ``alone``: no other process writes below the root. ``loose`` collects the blocks
    that have a file though they would be packed today. ``names`` false: only packed blocks.
    """

    def __init__(
        self,
        root: Path,
        device: int | None,
        quarantine: Quarantine,
        count: Callable[..., None],
        *,
        packed: PackedStore | None,
        alone: bool,
        loose: set[BlockId],
        pack_below: int,
        names: bool = True,
        processes: int | None = None,
    ) -> None:
        self._root = root
        self._device = device
        self._quarantine = quarantine
        self._count = count
        self._packed = packed
        self._alone = alone
        self._loose = loose
        self._pack_below = pack_below
        self._names = names
        self._processes = processes
        self._started = time.time()
        self._proved: dict[int, set[int]] = {}

    def run(self) -> Iterator[list[FoundBlock]]:
        """Yield batches of at most ``BATCH`` blocks, least recently used first.

        Raises:
            OSError: the root cannot be opened (any more). Another run takes nothing twice.
        """
        with Folders(self._root, self._device) as folders:
            candidates: list[_File | _Slot] = list(self._slots(folders))
            wanted = list(self._folders(folders)) if self._names else []
        for folder, content in FolderReader(self._root, self._device, self._processes).read(wanted):
            self._note(folder, content.temporaries, content.bad, content.foreign, content.unreadable)
            self._count("scan: headers read", len(content.proved))
            for proved in content.proved:
                block = self._file(folder, proved)
                if block is not None:
                    candidates.append((proved[0], block))
        with Folders(self._root, self._device):
            pass  # what lay below a root that went away meanwhile is not lost
        candidates.sort(key=itemgetter(0), reverse=True)
        while candidates:
            chunk = candidates[-BATCH:]
            del candidates[-BATCH:]
            found = self._prove_all(reversed(chunk))
            if found:
                yield found
        self._settle()

    # -- what there is ------------------------------------------------------------------------------

    def _slots(self, folders: Folders) -> Iterator[_Slot]:
        """List slots: all of segments that no scan has ended with, else those that hold a block."""
        if self._packed is None:
            return
        with SegmentFiles(folders) as files:
            for segment in list(self._packed.unproved.values()):
                uses = self._uses(files, segment)
                if uses is not None:
                    self._proved[segment.number] = set()
                    for slot, used in uses.items():
                        yield used, segment, slot, None
            tables: dict[int, dict[int, int]] = {}
            for block_id, segment, slot in self._packed.slots.entries():
                if segment.number in self._proved or segment.lost:
                    continue
                if segment.number not in tables:
                    tables[segment.number] = self._uses(files, segment) or {}
                yield tables[segment.number].get(slot, 0), segment, slot, block_id

    def _uses(self, files: SegmentFiles, segment: Segment) -> dict[int, int] | None:
        assert self._packed is not None
        try:
            return self._packed.io.uses(files, segment)
        except (OSError, FormatError):
            self._count("scan: unreadable")
            return None

    def _folders(self, folders: Folders) -> Iterator[Folder]:
        try:
            blocks = folders.blocks()
        except FileNotFoundError:
            return
        for namespace in self._subfolders(blocks, fs_tree.is_namespace):
            try:
                parent = folders.namespace(namespace)
            except OSError:
                self._count("scan: unreadable")
                continue
            for shard in self._subfolders(parent, fs_tree.is_shard):
                yield namespace, shard

    def _subfolders(self, parent: int, wanted: Callable[[str], bool]) -> Iterator[str]:
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False) and wanted(entry.name):
                        yield entry.name
                    elif entry.name.startswith(fs_tree.TEMPORARY):
                        self._temporary(parent, entry.name)
                    elif entry.name not in (fs_tree.RECORD, fs_tree.PACKED):
                        self._count("scan: foreign")
        except OSError:
            self._count("scan: unreadable")

    # -- what else lies there -----------------------------------------------------------------------

    def _note(
        self, at: Folder, temporaries: list[str], bad: list[tuple[str, str]], foreign: int, unreadable: int
    ) -> None:
        """Count and clear what is not a block."""
        if foreign:
            self._count("scan: foreign", foreign)
        if unreadable:
            self._count("scan: unreadable", unreadable)
        if not bad and not temporaries:
            return
        try:
            with Folders(self._root, self._device) as folders:
                parent = fs_tree.open_folder(at[1], folders.namespace(at[0]))
                try:
                    for name in temporaries:
                        self._temporary(parent, name)
                    for name, flaw in bad:
                        self._bad(folders, parent, at[0], name, Flaw(flaw))
                finally:
                    os.close(parent)
        except OSError:
            self._count("scan: unreadable")

    def _temporary(self, folder: int, name: str) -> None:
        alone = self._alone and not fs_tree.is_own_temporary(name)
        removed = fs_tree.remove_stale_temporary(folder, name, alone=alone)
        self._count("scan: stale temporaries removed" if removed else "scan: temporaries left")

    def _bad(self, folders: Folders, parent: int, namespace: str, name: str, flaw: Flaw) -> None:
        self._count(f"scan: {flaw}")
        key = fs_tree.parse_name(name)
        if flaw in (Flaw.VERSION, Flaw.FOREIGN) or key is None:
            return
        try:
            if os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime > self._started:
                return  # replaced since it was read
            self._quarantine.move(folders, parent, BlockId(namespace, key))
            self._count("quarantined")
        except OSError:
            self._count("scan: unreadable")

    # -- what it proves to be -----------------------------------------------------------------------

    def _prove_all(self, chunk: Iterator[_File | _Slot]) -> list[FoundBlock]:
        found: list[FoundBlock] = []
        with Folders(self._root, self._device) as folders, SegmentFiles(folders) as files:
            for at in chunk:
                block = at[1] if len(at) == 2 else self._slot(files, at)
                if block is not None:
                    found.append(block)
        return found

    def _file(self, folder: Folder, proved: Proved) -> FoundBlock | None:
        _, name, offset, payload, metadata = proved
        try:
            block = fs_format.block_of(metadata, payload)
            if block.namespace != folder[0] or fs_tree.file_name(block.key) != name:
                raise FormatError(Flaw.OTHER_BLOCK)
        except FormatError as error:
            self._note(folder, [], [(name, error.flaw)], 0, 0)
            return None
        if self._packed is not None and payload < self._pack_below:
            if self._packed.slots.find(block.id) is not None:
                return None
            self._loose.add(block.id)
        return FoundBlock(block, offset + fs_format.aligned(payload))

    def _slot(self, files: SegmentFiles, at: _Slot) -> FoundBlock | None:
        _, segment, slot, expected = at
        assert self._packed is not None
        try:
            header = self._packed.io.header(files, segment, slot)
        except FormatError as error:
            self._count(f"scan: {error}")
            header = None
        except OSError:
            self._count("scan: unreadable")
            if expected is None:  # do not clear what may be right
                self._proved.pop(segment.number, None)
            return None
        if expected is None:
            return None if header is None else self._prove(header.block.id, header, segment, slot)
        if header is None or header.block.id != expected:
            self._packed.drop(files, expected, segment, slot)
            return None
        return FoundBlock(header.block, segment.slot_bytes)

    def _prove(
        self, block_id: BlockId, header: fs_format.Header, segment: Segment, slot: int
    ) -> FoundBlock | None:
        """Take a slot of an earlier run into the index, unless its block is stored elsewhere as well."""
        assert self._packed is not None
        if block_id in self._loose or not self._packed.slots.prove(block_id, segment, slot):
            return None
        if segment.number in self._proved:
            self._proved[segment.number].add(slot)
        return FoundBlock(header.block, segment.slot_bytes)

    def _settle(self) -> None:
        if self._packed is None or not self._proved:
            return
        try:
            with Folders(self._root, self._device) as folders:
                for number, proved in self._proved.items():
                    segment = self._packed.unproved.get(number)
                    if segment is not None:
                        with SegmentFiles(folders) as files:
                            self._packed.settle(files, segment, proved)
        except OSError:
            self._count("scan: unreadable")

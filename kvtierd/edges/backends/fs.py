"""The filesystem backend: big blocks as files, small ones packed, every read proved (``FORMAT.md``)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_faults, fs_format, fs_records, fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_files import FileStore
from kvtierd.edges.backends.fs_format import FormatError
from kvtierd.edges.backends.fs_io import Fsync, Io, Mode
from kvtierd.edges.backends.fs_lock import RootLock
from kvtierd.edges.backends.fs_outcomes import Outcomes, What
from kvtierd.edges.backends.fs_packed import PACK_BELOW, PackedStore
from kvtierd.edges.backends.fs_quarantine import Quarantine
from kvtierd.edges.backends.fs_scan import FsScan
from kvtierd.edges.backends.fs_segment_files import SegmentFiles
from kvtierd.edges.backends.fs_segments import Place
from kvtierd.edges.backends.fs_space import Room
from kvtierd.edges.backends.fs_tree import Folders
from kvtierd.errors import TierError, TierTaken
from kvtierd.logs.events import event

log = logging.getLogger(__name__)


class FsBackend:
    """Storage of a filesystem tier; safe to call from several threads.

    A missing block is GONE; one that is not provably itself is CORRUPT; no space is FULL; every other error
    of the system is FAILED and leaves the block where it is. ``io`` and ``fsync``: :mod:`.fs_io`.
    ``shared``: other daemons use the root as well; then nothing is packed. ``min_free``: bytes that writes
    leave free on the filesystem. ``quarantine``: how many corrupt blocks are kept for a look. ``pack_below``:
    from which payload size on a block has a file of its own. ``lock_wait``: how many seconds to wait for a
    root that somebody else has (None: as long as another start or end takes).
    """

    def __init__(
        self,
        name: str,
        root: str | os.PathLike[str],
        *,
        io: Mode = "auto",
        fsync: Fsync = "none",
        shared: bool = False,
        min_free: int | None = None,
        quarantine: int = 64,
        pack_below: int = PACK_BELOW,
        lock_wait: float | None = None,
    ) -> None:
        self.name = name
        self.root = Path(root)
        self.shared = shared
        self.min_free = min_free
        self._device: int | None = None
        self._inode = 0
        self._lock: RootLock | None = None
        self._lock_wait = lock_wait
        self._packing = False
        self._pack_below = pack_below
        self._io = Io(io, fsync)
        self._outcomes = Outcomes(name)
        self._quarantine = Quarantine(quarantine)
        self._files = FileStore(self._io, self._quarantine, self._outcomes.count)
        self._packed = PackedStore(self._io, self._quarantine, self._outcomes.count)
        self._loose: set[BlockId] = set()
        self._adopting = threading.Lock()
        self._scanning = threading.Lock()

    # -- life ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the root, take it and prove that it can be written.

        Raises:
            TierTaken: another daemon has it.
            TierError: it cannot, now.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with Folders(self.root, None) as folders:
                self._adopt(folders)
        except OSError as error:
            self.close()
            what = f"cannot use {self.root}: {error.strerror}"
            if isinstance(error, BlockingIOError):
                hint = "give each daemon a path of its own, or set shared: true for all of them"
                raise TierTaken(self.name, f"{what}; {hint}") from error
            hint = "make it a folder that this user can write, or change the tier's path"
            raise TierError(self.name, f"{what}; {hint}") from error

    def _adopt(self, folders: Folders) -> None:
        """Take a root that is new to this process and find out what its filesystem can do."""
        self.close()
        self._lock = RootLock(folders.root, shared=self.shared, wait=self._lock_wait)
        folders.quarantine()
        fd, probe = fs_tree.create_temporary(folders.blocks(create=True))
        try:
            self._io.probe(fd)
        finally:
            os.close(fd)
            os.unlink(probe, dir_fd=folders.blocks())
        info = os.fstat(folders.root)
        self._device, self._inode = info.st_dev, info.st_ino
        self._packing = not self.shared and self._lock.alone and self._io.punches
        self._packed.reset()
        self._loose.clear()
        if self._packing:
            self._packed.adopt(folders)
        elif self._lock.alone:  # nobody would count or delete them
            self._packed.remove_all(folders)
        if self.shared:
            self._lock.share()
        self._quarantine.trim(folders)

    def close(self) -> None:
        """Give the root up; nothing else stays open between calls."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- figures ------------------------------------------------------------------------------------

    def estimate(self, block: Block) -> int:
        """Return exactly what the block's file or slot will occupy, in bytes."""
        return fs_format.stored_bytes(block)

    def reserve(self, max_bytes: int) -> int:
        """Return what of ``max_bytes`` is for the quarantine, spare slots, folders and leftovers.

        A quarter each bounds the first two; the rest is for folders, segments' tables and temporaries of
        writers that were killed. Folders take up to a mebibyte a namespace; below 16 MiB they may not fit.
        """
        reserved = max_bytes // 16 + min(max_bytes // 16, 1 << 20)
        self._quarantine.limit(min(reserved // 4, 1 << 30))
        self._packed.slots.spare_limit = min(reserved // 4, 1 << 30)
        return reserved

    def statistics(self) -> dict[str, int]:
        """Return a copy of the counters, among them one per flaw found and what scans met."""
        slots = self._packed.slots
        now = {
            "packed_blocks": len(slots),
            "segments": slots.segment_count,
            "spare_bytes": slots.spare_bytes,
            "direct_io": int(self._io.direct),
        }
        return {**self._outcomes.counts, **now}

    # -- content ------------------------------------------------------------------------------------

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Yield all blocks whose header and size are right, least recently used first.

        Raises:
            TierError: the root cannot be read.
        """
        try:
            with self._scanning:
                yield from self._new_scan().run()
        except OSError as error:
            raise TierError(self.name, fs_faults.describe(error)) from error

    def _new_scan(self, *, names: bool = True) -> FsScan:
        return FsScan(
            self.root,
            self._device,
            self._quarantine,
            self._outcomes.count,
            packed=self._packed if self._packing else None,
            alone=self._lock is not None and self._lock.alone,
            loose=self._loose,
            pack_below=self._pack_below,
            names=names,
        )

    def probe(self, ids: Sequence[BlockId]) -> list[FoundBlock]:
        """Return those of the blocks that have a file with a right header and size.

        Raises:
            TierError: the root cannot be read.
        """
        found = []
        try:
            with Folders(self.root, self._device) as folders:
                for block_id in ids:
                    try:
                        found.append(self._files.probe(folders, block_id))
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    except FormatError as error:
                        self._outcomes.count(f"probe: {error}")
        except OSError as error:
            raise TierError(self.name, fs_faults.describe(error)) from error
        return found

    def describe(self, namespace: str, layout: Layout) -> None:
        """Write the namespace's readable record, best effort."""
        try:
            fs_records.write(self.root, self._device, namespace, layout)
        except OSError:
            self._outcomes.count("describe_failed")

    def tenants(self) -> dict[str, str | None]:
        """Return whose the stored namespaces are, as far as their records say."""
        return fs_records.tenants(self.root)

    # -- blocks -------------------------------------------------------------------------------------

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store blocks; nobody ever sees half a block."""
        ids = [transfer.block.id for transfer in transfers]
        return self._call("write", ids, lambda files: self._write_all(files, transfers))

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read blocks straight into their memory and prove header, identity, length and payload."""
        return self._call(
            "read",
            [transfer.block.id for transfer in transfers],
            lambda files: self._read_all(files, transfers),
        )

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Delete blocks, or move them to the quarantine."""
        guarded = self._outcomes.guarded
        return self._call(
            "delete",
            ids,
            lambda files: [
                guarded(files.folders.root, "delete", one, self._delete, files, one, corrupt) for one in ids
            ],
        )

    def _call(
        self, what: What, ids: Sequence[BlockId], act: Callable[[SegmentFiles], list[Outcome]]
    ) -> list[Outcome]:
        """Open what a call needs and act; what goes wrong before any block is the outcome of each."""
        if not ids:
            return []
        try:
            with (
                Folders(self.root, self._device) as folders,
                SegmentFiles(folders, reading=what == "read") as files,
            ):
                if what == "write" and folders.inode != self._inode:
                    self._adopt_replaced(folders)
                return act(files)
        except OSError as error:
            return [
                self._outcomes.of(what, block_id, Status.FAILED, fs_faults.describe(error))
                for block_id in ids
            ]

    def _adopt_replaced(self, folders: Folders) -> None:
        with self._adopting:
            if folders.inode != self._inode:
                log.warning(
                    "tier %s: %s is another folder than before",
                    self.name,
                    self.root,
                    extra=event("folder_changed", tier=self.name, path=str(self.root)),
                )
                self._adopt(folders)

    def _write_all(self, files: SegmentFiles, transfers: Sequence[Transfer]) -> list[Outcome]:
        guarded, root = self._outcomes.guarded, files.folders.root
        room = Room(files.folders, self.min_free)
        outcomes = [guarded(root, "write", each.block.id, self._admit, each, room) for each in transfers]
        admitted = {i: transfers[i] for i, outcome in enumerate(outcomes) if outcome.status is Status.OK}
        placed = self._packed.put_all(files, {i: t for i, t in admitted.items() if self._packs(t.block)})
        for i, transfer in admitted.items():
            if i not in placed:
                outcomes[i] = guarded(
                    root, "write", transfer.block.id, self._write, files, transfer, placed, i
                )
        try:
            for file in files:
                self._io.sync(file.fd)
            for namespace in {segment.namespace for segment, _ in placed.values()}:
                self._io.sync_folder(files.folders.packed(namespace))
        except OSError as error:
            for i, place in placed.items():
                self._packed.discard(files, place)
                outcomes[i] = self._outcomes.of(
                    "write", outcomes[i].id, fs_faults.status(error, reading=False), fs_faults.describe(error)
                )
            return outcomes
        self._packed.written(files, placed.values())
        for i, place in placed.items():
            outcomes[i] = guarded(root, "write", outcomes[i].id, self._publish, files, outcomes[i], place)
        return outcomes

    def _admit(self, transfer: Transfer, room: Room) -> Outcome:
        """Say whether a block may be written, and what it will occupy."""
        block = transfer.block
        if len(transfer.data) != block.payload_bytes:
            return self._outcomes.of("write", block.id, Status.FAILED, "payload length differs")
        fs_tree.check_id(block.id)
        size = fs_format.stored_bytes(block)
        if not room.take(size):
            return self._outcomes.of("write", block.id, Status.FULL, "less than min_free would stay free")
        return Outcome(block.id, Status.OK, size)

    def _packs(self, block: Block) -> bool:
        return self._packing and block.payload_bytes < self._pack_below

    def _write(self, files: SegmentFiles, transfer: Transfer, placed: dict[int, Place], i: int) -> Outcome:
        """Write one block, alone."""
        block = transfer.block
        if self._packs(block):
            placed[i] = self._packed.put(files, transfer)
            return Outcome(block.id, Status.OK, fs_format.stored_bytes(block))
        size = self._files.write(files.folders, transfer, spare=self.shared)
        self._packed.delete(files, block.id, corrupt=False)  # an earlier run packed blocks of its size
        return Outcome(block.id, Status.OK, size)

    def _publish(self, files: SegmentFiles, outcome: Outcome, place: Place) -> Outcome:
        """Make a packed block visible, in the place of whatever was stored under its id."""
        self._packed.publish(files, outcome.id, place)
        if outcome.id in self._loose:
            self._files.delete(files.folders, outcome.id, corrupt=False)
            self._loose.discard(outcome.id)
        return outcome

    def _read_all(self, files: SegmentFiles, transfers: Sequence[Transfer]) -> list[Outcome]:
        guarded = self._outcomes.guarded
        read = self._packed.read_all(files, transfers)
        return [
            Outcome(each.block.id, Status.OK)
            if i in read
            else guarded(files.folders.root, "read", each.block.id, self._read, files, each)
            for i, each in enumerate(transfers)
        ]

    def _read(self, files: SegmentFiles, transfer: Transfer) -> Outcome:
        if len(transfer.data) != transfer.block.payload_bytes:
            return self._outcomes.of("read", transfer.block.id, Status.FAILED, "payload length differs")
        if not self._packed.read(files, transfer) and not (
            self._index_packed() and self._packed.read(files, transfer)
        ):
            self._files.read(files.folders, transfer)
        return Outcome(transfer.block.id, Status.OK)

    def _delete(self, files: SegmentFiles, block_id: BlockId, corrupt: bool) -> Outcome:
        if not self._packed.delete(files, block_id, corrupt=corrupt) or block_id in self._loose:
            if self._index_packed():
                return self._delete(files, block_id, corrupt)
            self._files.delete(files.folders, block_id, corrupt=corrupt)
            self._loose.discard(block_id)
        return Outcome(block_id, Status.OK)

    def _index_packed(self) -> bool:
        """Index the segments of an earlier run now, unless a scan did or does; say whether it was done."""
        if not self._packed.unproved or not self._scanning.acquire(blocking=False):
            return False
        try:
            for _ in self._new_scan(names=False).run():
                pass
        except OSError:
            return False
        finally:
            self._scanning.release()
        return True

"""Small blocks in slots of segment files: one header page and one payload a slot, no file per block.

A slot's header is written after its payload and wiped before the slot is used again, so a process that is
killed leaves no header that it does not stand behind. Only the daemon that holds the root alone packs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtierd.core.model import BlockId
from kvtierd.edges.backends import fs_format, fs_io, fs_slot_io, fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_behind import WriteBehind
from kvtierd.edges.backends.fs_format import FormatError
from kvtierd.edges.backends.fs_io import Io
from kvtierd.edges.backends.fs_quarantine import Quarantine
from kvtierd.edges.backends.fs_segment_files import SegmentFiles
from kvtierd.edges.backends.fs_segments import Place, Segment, SlotMap, runs
from kvtierd.edges.backends.fs_slot_io import EMPTY, READ_BYTES, WRITE_BYTES, SlotIo, neighbours
from kvtierd.edges.backends.fs_tree import Folders

PACK_BELOW = 32 << 20
"""A full disk stores blocks of 1 to 16 MiB in slots that are used again 1.3 to 6 times as fast as in files of
their own, for which the filesystem gives space back and looks for new (ext4)."""
SPARE_BYTES = 256 << 20
"""What a tier without a limit keeps for the next writes; one with a limit keeps a share of that."""


class PackedStore:
    """The packed blocks of a tier; calls come from several threads."""

    def __init__(self, io: Io, quarantine: Quarantine, count: Callable[[str], None]) -> None:
        self._io = io
        self.io = SlotIo(io)
        self._behind = WriteBehind(io)
        self._quarantine = quarantine
        self._count = count
        self.slots = SlotMap(SPARE_BYTES)
        self.unproved: dict[int, Segment] = {}
        """Segments of an earlier run, by number, that no scan has ended with."""

    def reset(self) -> None:
        """Forget everything: the root is another one."""
        self.slots.clear()
        self.unproved = {}

    def remove_all(self, folders: Folders) -> None:
        """Remove all segments, best effort: this daemon does not pack, so nobody would count them."""
        for namespace in filter(fs_tree.is_namespace, os.listdir(folders.blocks())):
            with contextlib.suppress(OSError):
                folder = folders.packed(namespace)
                for name in os.listdir(folder):
                    if fs_tree.parse_segment(name) is not None:
                        os.unlink(name, dir_fd=folder)
                        self._count("segments removed")

    def adopt(self, folders: Folders) -> None:
        """List the segments that an earlier run left; their content is the scan's to prove."""
        for namespace in sorted(filter(fs_tree.is_namespace, os.listdir(folders.blocks()))):
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(folders.packed(namespace))):
                    slot_bytes = fs_tree.parse_segment(name)
                    if slot_bytes is not None:
                        segment = self.slots.adopt(namespace, slot_bytes, name)
                        self.unproved[segment.number] = segment

    # -- write --------------------------------------------------------------------------------------

    def put_all(self, files: SegmentFiles, transfers: Mapping[int, Transfer]) -> dict[int, Place]:
        """Write blocks into slots side by side, each nobody's until :meth:`publish`; return who has which.

        What is left out was not written, whatever was the matter: :meth:`put` tries it alone, and says.
        """
        sizes: dict[tuple[str, int], list[int]] = {}
        for number, each in transfers.items():
            sizes.setdefault((each.block.namespace, fs_format.stored_bytes(each.block)), []).append(number)
        written: dict[int, Place] = {}
        for (namespace, size), numbers in sizes.items():
            taken = self.slots.take(namespace, size, len(numbers))
            items = zip(numbers, taken, map(transfers.__getitem__, numbers), strict=True)
            try:
                for run in neighbours(items, WRITE_BYTES):
                    if self._fill(files, [at for _, at, _ in run], [each for *_, each in run]) is None:
                        written.update((number, at) for number, at, _ in run)
            finally:
                self.slots.wrote(taken)
        return written

    def put(self, files: SegmentFiles, transfer: Transfer) -> Place:
        """Write a block into a slot of its own; it is nobody's until :meth:`publish`.

        Raises:
            OSError, FormatError: it was not written; its slot is free again.
        """
        size = fs_format.stored_bytes(transfer.block)
        for last in (False, True):
            taken = self.slots.take(transfer.block.namespace, size)
            try:
                error = self._fill(files, taken, [transfer])
            finally:
                self.slots.wrote(taken)
            if error is None:
                return taken[0]
            if last or not isinstance(error, FileNotFoundError):  # a segment that went: go on in another one
                raise error
        raise AssertionError("unreachable")

    def _fill(
        self, files: SegmentFiles, places: Sequence[Place], transfers: Sequence[Transfer]
    ) -> Exception | None:
        """Write blocks into neighbouring slots; return what went wrong, the slots are free again then."""
        try:
            self.io.fill(files, places[0], transfers)
        except FileNotFoundError as error:  # somebody removed the segment
            segment = places[0][0]
            self.slots.lose(segment)
            for _, slot in places:
                self.slots.free(segment, slot, spare=False)
            return error
        except BaseException as error:
            for at in places:
                self._give_up(files, *at)
            if not isinstance(error, (OSError, FormatError)):
                raise
            return error
        return None

    def _give_up(self, files: SegmentFiles, segment: Segment, slot: int) -> None:
        """Free the slot of a write that failed; what cannot be cleared stays taken until the next start."""
        try:
            self._vacate(files, segment, slot, keep_space=False)
        except OSError:
            self._count("slots given up")

    def publish(self, files: SegmentFiles, block_id: BlockId, place: Place) -> None:
        """Make a written block the one that is read, and free the slot that held it before."""
        before = self.slots.publish(block_id, *place)
        if before is not None:
            self._give_up(files, *before)

    def discard(self, files: SegmentFiles, place: Place) -> None:
        """Free the slot of a block that was written but shall not be published."""
        self._give_up(files, *place)

    def written(self, files: SegmentFiles, places: Iterable[Place]) -> None:
        """Let go of what a call wrote, and of what earlier ones wrote if it is on the disk."""
        slots: dict[Segment, list[int]] = {}
        for segment, slot in places:
            slots.setdefault(segment, []).append(slot)
        self._behind.begin(
            files,
            [
                (segment, segment.offset(run.start), len(run) * segment.slot_bytes)
                for segment, numbers in slots.items()
                for run in runs(sorted(numbers))
            ],
        )

    # -- read ---------------------------------------------------------------------------------------

    def read_all(self, files: SegmentFiles, transfers: Sequence[Transfer]) -> set[int]:
        """Read what lies side by side together; return the numbers of the blocks that are read and proved.

        The others are left to :meth:`read`, whatever is the matter with them.
        """
        places = self.slots.find_all(transfer.block.id for transfer in transfers)
        items = (
            (number, at, transfer)
            for number, (at, transfer) in enumerate(zip(places, transfers, strict=True))
            if at is not None and len(transfer.data) == transfer.block.payload_bytes
        )
        read: dict[int, Place] = {}
        for run in neighbours(items, READ_BYTES):
            with contextlib.suppress(OSError, FormatError):
                self.io.load(files, run[0][1], [transfer for *_, transfer in run])
                read.update((number, at) for number, at, _ in run)
        self.io.note_uses(files, read.values())
        return set(read)

    def read(self, files: SegmentFiles, transfer: Transfer) -> bool:
        """Read a block; false when it is not packed.

        Raises:
            FileNotFoundError: its slot or segment was emptied by somebody else.
            FormatError: the slot does not prove to be the block.
        """
        at = self.slots.find(transfer.block.id)
        while at is not None:
            try:
                self.io.load(files, at, [transfer])
            except (FormatError, FileNotFoundError):
                # Another write of the block may have come between: then its old slot proves nothing.
                if (now := self.slots.find(transfer.block.id)) == at:
                    raise
                at = now
            else:
                self.io.note_uses(files, [at])
                return True
        return False

    # -- delete -------------------------------------------------------------------------------------

    def delete(self, files: SegmentFiles, block_id: BlockId, *, corrupt: bool) -> bool:
        """Wipe a block's header and free its slot; false when it is not packed.

        Raises:
            OSError: it is still there.
        """
        place = self.slots.remove(block_id)
        if place is None:
            return False
        try:
            if corrupt:
                self._set_aside(files, block_id, place)
            self._vacate(files, *place)
        except BaseException:
            self.slots.restore(block_id, *place)
            raise
        return True

    def _set_aside(self, files: SegmentFiles, block_id: BlockId, place: Place) -> None:
        segment, slot = place
        with contextlib.suppress(FileNotFoundError):
            content = os.pread(files.open(segment).fd, segment.slot_bytes, segment.offset(slot))
            self._quarantine.keep(files.folders, block_id, content)
            self._count("quarantined")

    def _vacate(self, files: SegmentFiles, segment: Segment, slot: int, *, keep_space: bool = True) -> None:
        """Take the header away and free the slot, keeping its space as spare if there is room for that."""
        if segment.lost:
            self.slots.free(segment, slot, spare=False)
            return
        spare = keep_space and self.slots.wants_spare(segment.slot_bytes)
        try:
            file, offset = files.open(segment), segment.offset(slot)
            if spare:
                file.set_direct(False)
                fs_slot_io.write(file.fd, EMPTY, offset)
            else:
                fs_io.punch(file.fd, offset, segment.slot_bytes)
        except FileNotFoundError:
            self.slots.lose(segment)
        except BaseException:
            if spare:
                self.slots.not_spare(segment.slot_bytes)
            raise
        if self.slots.free(segment, slot, spare=spare):
            os.unlink(segment.name, dir_fd=files.folders.packed(segment.namespace))

    # -- scan ---------------------------------------------------------------------------------------

    def drop(self, files: SegmentFiles, block_id: BlockId, segment: Segment, slot: int) -> None:
        """Forget a block that its slot does not hold any more, unless it was written anew meanwhile."""
        if self.slots.find(block_id) == (segment, slot):
            with contextlib.suppress(OSError):
                self.delete(files, block_id, corrupt=True)

    def settle(self, files: SegmentFiles, segment: Segment, proved: set[int]) -> None:
        """End the scan of a segment: what was not proved is cleared and given back to the filesystem."""
        self.unproved.pop(segment.number, None)
        for run in reversed(runs(self.slots.settle(segment, proved))):
            offset = segment.offset(run.start)
            try:
                fs_io.punch(files.open(segment).fd, offset, len(run) * segment.slot_bytes)
            except OSError:
                self._count("slots given up")
                continue
            for slot in reversed(run):
                if self.slots.free(segment, slot, spare=False):
                    with contextlib.suppress(OSError):
                        os.unlink(segment.name, dir_fd=files.folders.packed(segment.namespace))

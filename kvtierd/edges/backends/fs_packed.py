"""Small blocks in slots of segment files: one header page and one payload a slot, no file per block.

A slot's header is written after its payload and wiped before the slot is used again, so a process that is
killed leaves no header that it does not stand behind. Only the daemon that holds the root alone packs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from kvtierd.core.model import Block, BlockId
from kvtierd.edges.backends import fs_format, fs_io, fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.fs_io import File, Io
from kvtierd.edges.backends.fs_quarantine import Quarantine
from kvtierd.edges.backends.fs_segments import Segment, SlotMap
from kvtierd.edges.backends.fs_tree import Folders

PACK_BELOW = 512 << 10
SPARE_BYTES = 64 << 20

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_USE = struct.Struct("<Q")
_EMPTY = bytes(fs_format.ALIGN)

Place = tuple[Segment, int]


class SegmentFiles:
    """The segments that one call has open; closed at its end, like :class:`Folders`.

    ``reading``: the call can do without writing, so that a filesystem that turned read-only still serves.
    """

    def __init__(self, folders: Folders, *, reading: bool = False) -> None:
        self.folders = folders
        self._reading = reading
        self._open: dict[int, File] = {}

    def __enter__(self) -> SegmentFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):
                os.close(file.fd)

    def __iter__(self) -> Iterator[File]:
        return iter(self._open.values())

    def open(self, segment: Segment) -> File:
        """Return the open segment; a new one is made.

        Raises:
            FileNotFoundError: somebody removed it.
            OSError, FormatError: it cannot be opened, or is no file.
        """
        file = self._open.get(segment.number)
        if file is None:
            new = not segment.exists
            folder = self.folders.packed(segment.namespace, create=new)
            fd = self._descriptor(segment.name, folder, new)
            file = self._open[segment.number] = File(fd)
            if not stat.S_ISREG((info := os.fstat(fd)).st_mode):
                raise FormatError(Flaw.FOREIGN)
            if new and info.st_size == 0:  # XFS would allocate in advance behind the end of a file that grows
                os.ftruncate(fd, segment.offset(segment.slots))
            segment.exists = True
        return file

    def _descriptor(self, name: str, folder: int, new: bool) -> int:
        try:
            return os.open(name, _FLAGS | (os.O_CREAT if new else 0), 0o660, dir_fd=folder)
        except OSError as error:
            if not self._reading or error.errno != errno.EROFS:
                raise
        return os.open(name, fs_tree.READ, dir_fd=folder)


class PackedStore:
    """The packed blocks of a tier; calls come from several threads."""

    def __init__(self, io: Io, quarantine: Quarantine, count: Callable[[str], None]) -> None:
        self._io = io
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

    def put(self, files: SegmentFiles, transfer: Transfer) -> Place:
        """Write a block into a slot of its own; it is nobody's until :meth:`publish`.

        Raises:
            OSError, FormatError: it was not written; its slot is free again.
        """
        header = fs_format.encode(transfer.block, fs_format.digest(transfer.data))
        size = len(header) + fs_format.aligned(len(transfer.data))
        for last in (False, True):
            segment, slot = self.slots.take(transfer.block.namespace, size)
            try:
                self._fill(files.open(segment), segment, slot, header, transfer.data)
            except FileNotFoundError:  # somebody removed the segment: go on in another one
                self.slots.lose(segment)
                self.slots.free(segment, slot, spare=False)
                if last:
                    raise
            except BaseException:
                self._give_up(files, segment, slot)
                raise
            else:
                return segment, slot
        raise AssertionError("unreachable")

    def _fill(self, file: File, segment: Segment, slot: int, header: bytes, data: memoryview) -> None:
        """Write payload, time of use and header, in this order: the header vouches for the rest."""
        offset = segment.offset(slot)
        self._io.write(file, offset + len(header), b"", data, whole_pages=True)
        file.set_direct(False)
        _write(file.fd, _USE.pack(time.time_ns()), 8 * slot)
        _write(file.fd, header, offset)

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
        """Let go of what a call wrote: start its write-back, and drop what was started a call before."""
        slots: dict[Segment, list[int]] = {}
        for segment, slot in places:
            slots.setdefault(segment, []).append(slot)
        for segment, numbers in slots.items():
            size = segment.slot_bytes
            now = [(segment.offset(run.start), len(run) * size) for run in _runs(sorted(numbers))]
            before, segment.written = segment.written, now
            with contextlib.suppress(OSError, FormatError):
                self._io.behind(files.open(segment).fd, [*before, *now])

    # -- read ---------------------------------------------------------------------------------------

    def read(self, files: SegmentFiles, transfer: Transfer) -> bool:
        """Read a block; false when it is not packed.

        Raises:
            FileNotFoundError: its slot or segment was emptied by somebody else.
            FormatError: the slot does not prove to be the block.
        """
        at = self.slots.find(transfer.block.id)
        while at is not None:
            try:
                self._load(files, at, transfer.block, transfer.data)
            except (FormatError, FileNotFoundError):
                # Another write of the block may have come between: then its old slot proves nothing.
                if (now := self.slots.find(transfer.block.id)) == at:
                    raise
                at = now
            else:
                self._mark_used(files, *at)
                return True
        return False

    def _load(self, files: SegmentFiles, at: Place, block: Block, data: memoryview) -> None:
        segment, slot = at
        if segment.lost:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if len(data) != block.payload_bytes:
            raise FormatError(Flaw.OTHER_BLOCK)
        file, size = files.open(segment), segment.slot_bytes - fs_format.aligned(len(data))
        if size <= 0:
            raise FormatError(Flaw.OTHER_BLOCK)
        region = self._io.region(size)
        got = self._io.read(file, segment.offset(slot), region, data)
        if got == 0 or (region[0] == 0 and bytes(region[: fs_format.ALIGN]) == _EMPTY):
            raise FileNotFoundError(errno.ENOENT, "the slot is empty")
        header = fs_format.decode(region[: min(got, size)])
        header.check(block, size + block.payload_bytes)
        if got < size + len(data):
            raise FormatError(Flaw.SHORT)
        header.check_payload(data)

    def _mark_used(self, files: SegmentFiles, segment: Segment, slot: int) -> None:
        """Note the time of use, best effort."""
        with contextlib.suppress(OSError):
            file = files.open(segment)
            file.set_direct(False)
            _write(file.fd, _USE.pack(time.time_ns()), 8 * slot)

    def header(self, files: SegmentFiles, segment: Segment, slot: int) -> Header | None:
        """Read and prove a slot's header, None for an empty slot.

        Raises:
            FormatError: it is neither.
        """
        file, offset = files.open(segment), segment.offset(slot)
        start = os.pread(file.fd, fs_format.ALIGN, offset)
        if start in (b"", _EMPTY):
            return None
        size = fs_format.data_offset(start)
        if size > len(start):
            start += os.pread(file.fd, size - len(start), offset + len(start))
        header = fs_format.decode(start)
        if header.block.namespace != segment.namespace:
            raise FormatError(Flaw.OTHER_BLOCK)
        if size + fs_format.aligned(header.block.payload_bytes) != segment.slot_bytes:
            raise FormatError(Flaw.LENGTHS)
        return header

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
                _write(file.fd, _EMPTY, offset)
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

    def uses(self, files: SegmentFiles, segment: Segment) -> dict[int, int]:
        """Return the time of last use, in nanoseconds, of each slot that is no hole in its file."""
        fd = files.open(segment).fd
        table = os.pread(fd, 8 * segment.slots, 0).ljust(8 * segment.slots, b"\0")
        times = [when for (when,) in _USE.iter_unpack(table)]
        return {slot: times[slot] for slot in written_slots(fd, segment)}

    def drop(self, files: SegmentFiles, block_id: BlockId, segment: Segment, slot: int) -> None:
        """Forget a block that its slot does not hold any more, unless it was written anew meanwhile."""
        if self.slots.find(block_id) == (segment, slot):
            with contextlib.suppress(OSError):
                self.delete(files, block_id, corrupt=True)

    def settle(self, files: SegmentFiles, segment: Segment, proved: set[int]) -> None:
        """End the scan of a segment: what was not proved is cleared and given back to the filesystem."""
        self.unproved.pop(segment.number, None)
        for run in _runs(self.slots.settle(segment, proved)):
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


def written_slots(fd: int, segment: Segment) -> Iterator[int]:
    """Yield the slots that have data, ascending; without support for holes, those before the file's end."""
    slot, position = 0, segment.first
    while slot < segment.slots:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes from here on
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        slot = max(slot, (start - segment.first) // segment.slot_bytes)
        stop = min(segment.slots, -(-(position - segment.first) // segment.slot_bytes))
        yield from range(slot, stop)
        slot = max(slot, stop)


def _runs(slots: list[int]) -> Iterator[range]:
    """Join ascending numbers to ranges, the last range first."""
    runs: list[range] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return reversed(runs)


def _write(fd: int, data: bytes, offset: int) -> None:
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(errno.EIO, "short write")

"""Moves blocks to and from slots of segments; neighbours move together.

Each call of the system lets the interpreter's lock go and waits for it afterwards; with some threads and
small blocks that costs more than the bytes. So what lies side by side is one read or write, and
one note of use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.fs_io import ZEROES, Io
from kvtierd.edges.backends.fs_segment_files import SegmentFiles
from kvtierd.edges.backends.fs_segments import Place, Segment, runs

READ_BYTES = 4 << 20
"""Of payloads in a run: each read waits for the GIL once, and a processor's last cache still holds this much
when the checksums are made. From the page cache by four threads 256 KiB blocks came with 5.9 GB/s in runs of
2 MiB, with 6.9 in runs of 4, and with no more in longer ones."""
WRITE_BYTES = 1 << 20
"""With 2 or 4 MiB stores of 256 KiB blocks often took twice the time, in the copy into the page cache."""
RUN_BLOCKS = 128
"""Each has a page of headers in a thread's scratch memory, and two parts of a read's vector."""

EMPTY = bytes(fs_format.ALIGN)
"""How an empty slot begins."""

Item = tuple[int, Place, Transfer]
"""A block's number in a call, its slot, and its memory."""


def neighbours(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    """Cut a call's blocks into runs whose slots lie side by side, with at most so many bytes of payload."""
    run: list[Item] = []
    for item in items:
        if run and not _joins(run, item, most):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _joins(run: Sequence[Item], item: Item, most: int) -> bool:
    _, (segment, slot), before = run[-1]
    _, at, transfer = item
    return (
        at == (segment, slot + 1)
        and len(transfer.data) == len(before.data) == segment.slot_bytes - len(EMPTY)
        and len(run) < min(RUN_BLOCKS, most // len(before.data))
    )


class SlotIo:
    """Reads and writes slots; safe to call from several threads."""

    def __init__(self, io: Io) -> None:
        self._io = io

    def fill(self, files: SegmentFiles, at: Place, transfers: Sequence[Transfer]) -> None:
        """Write blocks into neighbouring slots, the first of them ``at``.

        First payloads (and empty headers between them), then times of use, then headers: these vouch for the
        rest.

        Raises:
            OSError, FormatError: at least one was not written.
        """
        segment, slot = at
        headers = [fs_format.encode(each.block, fs_format.digest(each.data)) for each in transfers]
        parts = [part for each in transfers for part in (ZEROES, each.data)][1:]
        file = files.open(segment)
        self._io.write(file, segment.offset(slot) + len(headers[0]), parts, whole_pages=True)
        file.set_direct(False)
        now = time.time_ns()
        _note(file.fd, {slot + i: now + i for i in range(len(transfers))})
        for i, header in enumerate(headers):
            write(file.fd, header, segment.offset(slot + i))

    def load(self, files: SegmentFiles, at: Place, transfers: Sequence[Transfer]) -> None:
        """Read blocks from neighbouring slots, the first of them ``at``, and prove each.

        Raises:
            FileNotFoundError: a slot is empty, or the segment is not there.
            FormatError: a slot does not prove to be its block.
        """
        segment, slot = at
        if segment.lost:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        size = segment.slot_bytes - fs_format.aligned(len(transfers[0].data))
        if size <= 0:
            raise FormatError(Flaw.OTHER_BLOCK)
        region = self._io.region(size * len(transfers))
        headers = [region[i * size : (i + 1) * size] for i in range(len(transfers))]
        parts = [part for pair in zip(headers, transfers, strict=True) for part in (pair[0], pair[1].data)]
        file, offset = files.open(segment), segment.offset(slot)
        if len(transfers) == 1:
            payload = fs_format.Digest()  # made as the bytes come: they may be more than a cache holds
            got = self._io.read(file, offset, parts, payload.update)
            expected = _prove(headers[0], transfers[0], got)
            fs_format.check_digest(payload.digest(), expected)
            return
        got = self._io.read(file, offset, parts)
        for header, transfer in zip(headers, transfers, strict=True):
            expected = _prove(header, transfer, got)
            fs_format.check_digest(fs_format.digest(transfer.data), expected)
            got -= segment.slot_bytes

    def note_uses(self, files: SegmentFiles, places: Iterable[Place]) -> None:
        """Note that slots were used now, in this order; best effort."""
        times: dict[Segment, dict[int, int]] = {}
        for when, (segment, slot) in enumerate(places, time.time_ns()):
            times.setdefault(segment, {})[slot] = when
        for segment, used in times.items():
            with contextlib.suppress(OSError, FormatError):
                file = files.open(segment)
                file.set_direct(False)
                _note(file.fd, used)

    def header(self, files: SegmentFiles, segment: Segment, slot: int) -> Header | None:
        """Read and prove a slot's header, None for an empty slot.

        Raises:
            FormatError: it is neither.
        """
        file, offset = files.open(segment), segment.offset(slot)
        start = os.pread(file.fd, fs_format.ALIGN, offset)
        if start in (b"", EMPTY):
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

    def uses(self, files: SegmentFiles, segment: Segment) -> dict[int, int]:
        """Return the time of last use, in nanoseconds, of each slot that is no hole in its file."""
        fd = files.open(segment).fd
        table = os.pread(fd, 8 * segment.slots, 0).ljust(8 * segment.slots, b"\0")
        times = struct.unpack(f"<{segment.slots}Q", table)
        return {slot: times[slot] for slot in written_slots(fd, segment)}


def _prove(header: memoryview, transfer: Transfer, got: int) -> bytes:
    """Prove a slot of which ``got`` bytes, and maybe those behind it, were read; return its digest."""
    size, data = len(header), transfer.data
    if got <= 0 or (header[0] == 0 and header[: len(EMPTY)] == EMPTY):
        raise FileNotFoundError(errno.ENOENT, "the slot is empty")
    _, expected = fs_format.prove(header[: min(got, size)], transfer.block, size + len(data))
    if got < size + len(data):
        raise FormatError(Flaw.SHORT)
    return expected


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


def _note(fd: int, times: Mapping[int, int]) -> None:
    """Write times of use, by slot."""
    for run in runs(sorted(times)):
        write(fd, struct.pack(f"<{len(run)}Q", *(times[slot] for slot in run)), 8 * run.start)


def write(fd: int, data: bytes, offset: int) -> None:
    """Write all of a few bytes.

    Raises:
        OSError: it was not.
    """
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(errno.EIO, "short write")

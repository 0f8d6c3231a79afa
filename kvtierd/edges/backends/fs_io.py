"""How bytes of the filesystem tier move: through the page cache, around it, or as each case asks.

``buffered``: plain calls. ``direct``: ``O_DIRECT`` for whatever is aligned. ``auto``: a read takes the page
cache where half of the range or more is in it, without adding to it, and goes direct otherwise; a write goes
through the page cache, which drops it as soon as it is on the disk (``RWF_DONTCACHE``, Linux 6.14; before,
and for what is packed, an advice: ``fs_behind``). What the filesystem refuses is found out once, by
:meth:`Io.probe`; whatever is not aligned is moved through the page cache.

Why half: a range that was written a moment ago leaves the cache page by page, and a direct read would have to
wait until the rest of it is on the disk.

Why not ``RWF_NOWAIT`` to look into the cache: on a miss it starts to read the whole range ahead, so that the
direct read that follows reads everything a second time. ``cachestat`` (Linux 6.5) only looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Literal

Mode = Literal["auto", "direct", "buffered"]
Fsync = Literal["none", "data"]
Call = Callable[[int, Sequence[memoryview], int], int]
"""``preadv`` or ``pwritev``: a descriptor, memory, an offset; the bytes moved."""

ALIGN = 4096
_SCRATCH = 1 << 20
RWF_DONTCACHE = 0x80
_SYS_CACHESTAT = 451  # the same on all architectures
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
ZEROES = memoryview(mmap.mmap(-1, ALIGN, prot=mmap.PROT_READ))
"""A page, aligned as direct I/O needs it."""
_BEHIND = 256 << 10
"""From how many bytes on a write is worth a write-back of its own."""
_PIECE = 2 << 20
"""Bytes that the next step of some threads still finds in the processor's cache; each waits for the GIL."""
_SHORT = 1 << 20
"""Up to so many bytes a look into the page cache takes microseconds: less than to wait for the GIL."""


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cached(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writing", "evicted", "recent"))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syscall.restype = ctypes.c_long
_held = ctypes.PyDLL(None)  # keeps the GIL
_held.syscall.restype = ctypes.c_long


def punch(fd: int, offset: int, length: int) -> None:
    """Give the blocks of a range back to the filesystem; the range reads as zeroes from then on."""
    if _libc.fallocate(fd, _PUNCH_HOLE, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Return how many pages of a range are in the page cache, None where the kernel does not tell."""
    told = _cachestat(fd, offset, length)
    return None if told is None else int(told.cached)


def _cachestat(fd: int, offset: int, length: int) -> _Cached | None:
    asked, told = _Range(offset, length), _Cached()
    call = _held.syscall if length <= _SHORT else _libc.syscall
    result = call(_SYS_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(told), 0)
    return told if result == 0 else None


class File:
    """An open file that belongs to one call of one thread; ``direct``: whether O_DIRECT is set now."""

    __slots__ = ("direct", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.direct = False

    def set_direct(self, on: bool) -> None:
        """Switch between the page cache and the device; ``OSError`` where that is not possible."""
        if on != self.direct:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK | (os.O_DIRECT if on else 0))
            self.direct = on


class _Scratch(threading.local):
    """A thread's page-aligned memory: a header region, and a page for a payload's unaligned end."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, _SCRATCH + ALIGN))
        self.tail = self.memory[_SCRATCH:]


class Io:
    """Moves headers and payloads; safe to use from several threads, each with :class:`File` of its own."""

    def __init__(self, mode: Mode = "auto", fsync: Fsync = "none") -> None:
        self.mode = mode
        self.direct = False
        self.cachestat = False
        self.dontcache = False
        self.punches = False
        self._sync = fsync == "data"
        self._scratch = _Scratch()

    def probe(self, fd: int) -> None:
        """Find out, with an empty file open for reading and writing, what its filesystem can do."""
        page = self._scratch.tail
        os.pwritev(fd, [page, page], 0)
        self.punches = _works(lambda: punch(fd, 0, ALIGN))
        self.cachestat = self.mode == "auto" and cached_pages(fd, 0, ALIGN) is not None
        self.dontcache = self.mode == "auto" and _works(lambda: os.pwritev(fd, [page], 0, RWF_DONTCACHE))
        if self.mode != "buffered":
            file = File(fd)
            self.direct = _works(lambda: self._probe_direct(file, page))

    def _probe_direct(self, file: File, page: memoryview) -> None:
        file.set_direct(True)
        if os.pwritev(file.fd, [page], ALIGN) != ALIGN or os.preadv(file.fd, [page], ALIGN) != ALIGN:
            raise OSError(errno.EIO, "short direct transfer")

    def region(self, length: int) -> memoryview:
        """Return this thread's memory for a header region, valid until its next call of a method here."""
        return self._scratch.memory[:length]

    def read(
        self,
        file: File,
        offset: int,
        parts: Sequence[memoryview],
        take: Callable[[memoryview], object] | None = None,
    ) -> int:
        """Fill memory from ``offset`` on; return the bytes read. All parts but the last are whole pages.

        Of a header region (from :meth:`region`) and a payload, ``take`` is given the payload piece by piece
        as it comes, so that a checksum finds it in the processor's cache: with 16 MiB from the page cache a
        loop with one at the end made 0.77 of one without any, in pieces of 512 KiB to 4 MiB 0.8 to 0.86.
        """
        missing = self._missing(file.fd, offset, sum(map(len, parts)))
        if missing > 0.5:
            with contextlib.suppress(OSError):
                file.set_direct(True)
                got = self._read_direct(file.fd, offset, parts)
                if take is not None:
                    take(parts[-1])
                return got
        file.set_direct(False)
        call = _read_through if missing and self.dontcache else os.preadv
        if take is None:
            return move(call, file.fd, parts, offset)
        region, data = parts
        total = 0
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            vector = [piece] if start else [region, piece]
            got = move(call, file.fd, vector, offset + total)
            total += got
            take(piece)
            if got < sum(map(len, vector)):
                break
        return total

    def _missing(self, fd: int, offset: int, length: int) -> float:
        """Return which part of a range is to be read around the page cache: what is not in it, or all."""
        if not self.direct or (self.mode == "auto" and not self.cachestat):
            return 0.0
        if self.mode == "direct":
            return 1.0
        pages = -(-length // ALIGN)
        cached = cached_pages(fd, offset, pages * ALIGN)
        return 0.0 if cached is None else 1 - cached / pages

    def _read_direct(self, fd: int, offset: int, parts: Sequence[memoryview]) -> int:
        """Read whole pages; ``OSError`` (EINVAL) when memory is not aligned."""
        last, tail = parts[-1], self._scratch.tail
        rest = len(last) % ALIGN
        if not rest:
            return move(os.preadv, fd, parts, offset, step=ALIGN)
        whole = len(last) - rest
        before = sum(map(len, parts)) - rest
        got = move(os.preadv, fd, [*parts[:-1], last[:whole], tail], offset, step=ALIGN)
        over = min(got - before, rest)
        if over > 0:
            last[whole : whole + over] = tail[:over]
        return min(got, before + rest)

    def write(
        self, file: File, offset: int, parts: Sequence[memoryview], *, whole_pages: bool = False
    ) -> None:
        """Write memory; all parts but the last are whole pages.

        Zeroes may follow up to a whole page; with ``whole_pages`` they do (a page that is only partly
        overwritten would have to be read from the disk first), and the caller calls :meth:`behind`.
        """
        if self.mode == "direct" and self.direct:
            try:
                file.set_direct(True)
                self._write_direct(file.fd, offset, parts)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            file.set_direct(False)
        vector = [*parts]
        if whole_pages:
            vector.append(ZEROES[: -len(parts[-1]) % ALIGN])
        total = sum(map(len, vector))
        through = self.dontcache and not whole_pages and total >= _BEHIND
        _move_all(_write_through if through else os.pwritev, file.fd, vector, offset)
        if not through and not whole_pages and total >= _BEHIND:
            self.behind(file.fd, offset, total)

    def _write_direct(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        last, tail = parts[-1], self._scratch.tail
        rest = len(last) % ALIGN
        if rest:
            tail[:rest] = last[-rest:]
            tail[rest:] = ZEROES[rest:]
            parts = [*parts[:-1], last[:-rest], tail]
        _move_all(os.pwritev, fd, parts, offset)

    def behind(self, fd: int, offset: int, length: int) -> None:
        """Start the write-back of a range, and drop what of it is on the disk already.

        To be called once for many small writes: for each of them it would cost more than the write.
        """
        if self.mode == "auto":
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def unwritten(self, fd: int, offset: int, length: int) -> int:
        """Return how many pages of a range are not on the disk yet; 0 where the kernel does not tell."""
        told = _cachestat(fd, offset, length) if self.cachestat else None
        return 0 if told is None else int(told.dirty + told.writing)

    def sync(self, fd: int) -> None:
        """Bring a file's data to the disk, if ``fsync: data`` asks for it."""
        if self._sync:
            os.fdatasync(fd)

    def sync_folder(self, fd: int) -> None:
        """Bring a folder's names to the disk, if ``fsync: data`` asks for it; best effort, as not all can."""
        if self._sync:
            with contextlib.suppress(OSError):
                os.fsync(fd)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _write_through(fd: int, vector: Sequence[memoryview], offset: int) -> int:
    return os.pwritev(fd, vector, offset, RWF_DONTCACHE)


def _read_through(fd: int, vector: Sequence[memoryview], offset: int) -> int:
    """Read what is cached from the cache, and leave nothing more there."""
    return os.preadv(fd, vector, offset, RWF_DONTCACHE)


def _move_all(call: Call, fd: int, vector: Sequence[memoryview], offset: int) -> None:
    if move(call, fd, vector, offset) != sum(map(len, vector)):
        raise OSError(errno.EIO, "short write")


def move(
    call: Call,
    fd: int,
    vector: Sequence[memoryview],
    offset: int,
    *,
    step: int = 1,
) -> int:
    """Repeat ``preadv`` or ``pwritev`` until all is moved or nothing moves; return the bytes moved.

    ``step``: a sum that is no multiple of it was stopped by the file's end.
    """
    total = 0
    left = [part for part in vector if len(part)]
    while left:
        moved = call(fd, left, offset + total)
        total += moved
        if moved == 0 or total % step:
            break
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
    return total

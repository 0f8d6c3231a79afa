"""Plain loops over files, as a filesystem tier's bare side: same threads, sizes and sync policy, no more."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtierd.cli.bench_copies import Arena
from kvtierd.config.schema import FsTier
from kvtierd.edges.backends import fs_io
from kvtierd.edges.backends.fs_format import aligned
from kvtierd.edges.backends.fs_io import Io

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC


class PlainFiles:
    """The blocks as one ordinary file each: created, written in one call, renamed; read in one call.

    Blocks that the tier packs lie one behind the other in a file for each thread. As many threads as the
    tier has share the blocks out. How bytes pass the page cache is what ``tier.io`` comes to on this
    filesystem, found out by the same probe as the tier's.

    The loop gets what suits it best: a folder for each thread, so that they don't wait for one folder's
    lock, and nothing is deleted before the end: files were made slowly where many had just been deleted.
    """

    def __init__(self, tier: FsTier, folder: Path, arena: Arena) -> None:
        self._tier = tier
        self._arena = arena
        self._folder = folder
        self._io = _probed(tier, folder)
        self._round = 0
        self._packed = arena.block_bytes < tier.pack_below
        self._whole = aligned(arena.block_bytes)

    @property
    def write_policy(self) -> str:
        """How the bytes are written: the name of the flag or advice, or that the page cache keeps them."""
        io = self._io
        if io.direct and io.mode == "direct":
            how = "O_DIRECT"
        elif io.mode == "auto":
            how = "RWF_DONTCACHE" if io.dontcache else "POSIX_FADV_DONTNEED"
        else:
            how = "page cache"
        return f"{how}, fdatasync" if self._tier.fsync == "data" else how

    def read_policy(self, *, cold: bool) -> str:
        """How the bytes are read, from a page cache that holds all of them or (``cold``) none."""
        io = self._io
        around = io.direct and (io.mode == "direct" or (cold and io.cachestat))
        return "O_DIRECT" if around else "page cache"

    def write(self) -> None:
        """Write all blocks into new files."""
        how = self.write_policy.partition(",")[0]
        direct, advise = how == "O_DIRECT", how == "POSIX_FADV_DONTNEED"
        flags = fs_io.RWF_DONTCACHE if how == "RWF_DONTCACHE" else 0
        length = self._whole if direct else self._arena.block_bytes
        views = [self._arena.view(self._arena.source(i), length) for i in range(self._arena.count)]
        self._round += 1
        for thread in range(self._tier.writers):
            self._place(thread)[0].parent.mkdir()

        def write(number: int) -> None:
            path, offset = self._place(number)
            temporary = path if self._packed else path.with_suffix(".tmp")
            fd = os.open(temporary, _CREATE | (os.O_DIRECT if direct else 0), 0o600)
            try:
                _whole(os.pwritev(fd, [views[number]], offset, flags), length)
                if advise:
                    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
                if self._tier.fsync == "data":
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            if not self._packed:
                temporary.rename(path)

        _in_threads(self._tier.writers, self._arena.count, write)

    def _place(self, number: int) -> tuple[Path, int]:
        """Return this round's file of a block, in the folder of the thread that writes it, and the offset."""
        row, thread = divmod(number, self._tier.writers)
        folder = self._folder / f"{self._round}-{thread}"
        return (folder / "packed", row * self._whole) if self._packed else (folder / f"{number:x}", 0)

    def read(self, *, cold: bool) -> None:
        """Read all blocks back."""
        direct = self.read_policy(cold=cold) == "O_DIRECT"
        length = self._whole if direct else self._arena.block_bytes
        views = [self._arena.view(self._arena.target(i), length) for i in range(self._arena.count)]
        flags = _READ | (os.O_DIRECT if direct else 0)

        def read(number: int) -> None:
            path, offset = self._place(number)
            fd = os.open(path, flags)
            try:
                got = os.preadv(fd, [views[number]], offset)
            finally:
                os.close(fd)
            _whole(min(got, self._arena.block_bytes), self._arena.block_bytes)

        _in_threads(self._tier.readers, self._arena.count, read)


def _probed(tier: FsTier, folder: Path) -> Io:
    """Return the tier's way of moving bytes, which knows what the folder's filesystem can do."""
    io = Io(tier.io, tier.fsync)
    probe = folder / "probe"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        io.probe(fd)
    finally:
        os.close(fd)
        probe.unlink()
    return io


def _whole(moved: int, length: int) -> None:
    if moved != length:
        raise OSError(errno.EIO, "short transfer")


def _in_threads(threads: int, count: int, act: Callable[[int], object]) -> None:
    """Call it with each number below ``count``; each thread has every ``threads``-th number."""

    def share(first: int) -> None:
        for number in range(first, count, threads):
            act(number)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(share, range(min(threads, count))):
            pass

"""What a tier is measured against: the same bytes through memcpy, plain files, a checksum, a raw client."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtierd.core.geometry import UNIT
from kvtierd.edges.backends.fs_format import digest

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: wall time and processor time of all threads of this process, in seconds."""

    seconds: float
    cpu_seconds: float


@contextlib.contextmanager
def timed(into: list[Timing]) -> Iterator[None]:
    """Time the body and append it to the list."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    into.append(Timing(time.perf_counter() - wall, time.process_time() - cpu))


class Arena:
    """Shared memory like the pool's, touched: ``count`` blocks to store, and room to load them into.

    ``shared``: a file with both, to be mapped instead of memory of its own.
    """

    def __init__(self, block_bytes: int, count: int, shared: str = "") -> None:
        self.block_bytes = block_bytes
        self.count = count
        self.bytes = block_bytes * count
        self._stride = -(-block_bytes // UNIT)
        size = 2 * count * self._stride * UNIT
        fd = os.open(shared, os.O_RDWR) if shared else os.memfd_create("kvtierd-bench", os.MFD_CLOEXEC)
        try:
            if not shared:
                os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        for number in range(0 if shared else count):  # nothing that a disk or filesystem could compress
            self.view(self.source(number), block_bytes)[:] = os.urandom(block_bytes)
            self.view(self.target(number), block_bytes)[:] = bytes(block_bytes)
        self._digests = [digest(self.view(self.source(number), block_bytes)) for number in range(count)]

    def source(self, number: int) -> int:
        """Return the slot of a block to store."""
        return number * self._stride

    def target(self, number: int) -> int:
        """Return the slot that a block is loaded into."""
        return (self.count + number) * self._stride

    def view(self, slot: int, length: int) -> memoryview:
        """Return a slot's memory, as the pool does."""
        return self._view[slot * UNIT : slot * UNIT + length]

    def sources(self) -> list[memoryview]:
        """Return the blocks to store."""
        return [self.view(self.source(number), self.block_bytes) for number in range(self.count)]

    def targets(self) -> list[memoryview]:
        """Return the memory to load into."""
        return [self.view(self.target(number), self.block_bytes) for number in range(self.count)]

    def wrong(self) -> int:
        """Return how many loaded blocks are not what was stored, and wipe them."""
        count = 0
        for view, right in zip(self.targets(), self._digests, strict=True):
            count += digest(view) != right
            view[:8] = bytes(8)
        return count

    def close(self) -> None:
        """Unmap; no view may be in use."""
        self._view.release()
        self._map.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def memcpy(arena: Arena) -> None:
    """Copy every block once, in one thread."""
    for source, target in zip(arena.sources(), arena.targets(), strict=True):
        _move(target, source, arena.block_bytes)


def _move(target: memoryview, source: memoryview, size: int) -> None:
    at = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (target, source)]
    ctypes.memmove(at[0], at[1], size)


def checksum(arena: Arena) -> None:
    """Compute every block's checksum, as each store and load does, in one thread."""
    for view in arena.sources():
        digest(view)


def drop_caches(folder: Path) -> None:
    """Write the files below a folder out and ask the kernel to forget their pages."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def fill_caches(folder: Path) -> None:
    """Have the kernel hold the files below a folder in the page cache, as far as it has room."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                while file.read(_PIECE):
                    pass


class RawClient:
    """The object store's own client on as many threads as the tier has, without headers and checks."""

    def __init__(self, client: Any, store: Any, prefix: str) -> None:
        self._client = client
        self._store = store
        self._prefix = prefix

    def put(self, arena: Arena, threads: int) -> None:
        """Put every block."""
        sources = arena.sources()
        self._each(threads, arena, lambda i: self._client.put(self._store, self._key(i), sources[i]))

    def get(self, arena: Arena, threads: int) -> None:
        """Get every block into its memory."""
        targets = arena.targets()

        def get(i: int) -> None:
            body = memoryview(self._client.get(self._store, self._key(i)).bytes())
            _copy_in(targets[i], body)

        self._each(threads, arena, get)

    def delete(self, arena: Arena) -> None:
        """Delete what was put."""
        self._client.delete(self._store, [self._key(i) for i in range(arena.count)])

    def _key(self, number: int) -> str:
        return f"{self._prefix}/raw-{number}"

    def _each(self, threads: int, arena: Arena, act: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(act, range(arena.count)):
                pass


def _copy_in(target: memoryview, body: memoryview) -> None:
    if len(body) != len(target):
        raise OSError("the store returned another length")
    target[:] = body

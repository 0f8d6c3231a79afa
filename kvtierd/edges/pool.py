"""The pool: one shared mapping of host memory whose slots are the CPU tier.

Life: :meth:`Pool.allocate` (checks the limits, makes and seals the file, maps it, locks it), then
:meth:`Pool.prefault` (in a thread; seconds for many GiB), then ``pinning.pin``, then engines get
:attr:`Pool.fd`; :meth:`Pool.close` at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtierd.config.schema import BestEffort
from kvtierd.core.geometry import UNIT
from kvtierd.edges import backing as files
from kvtierd.edges.libc import MADV_DONTDUMP, MADV_POPULATE_WRITE, Libc, MemoryCalls
from kvtierd.edges.memory_limits import filesystem_room, huge_page_room, memory_rooms, require_room
from kvtierd.edges.presence import SharedPresence
from kvtierd.errors import PoolError

PREFAULT_CHUNK = 64 << 20
MAX_PREFAULT_THREADS = 16


class PoolSettings(Protocol):
    """What the pool reads of :class:`kvtierd.config.schema.Pool`."""

    @property
    def bytes(self) -> int: ...  # noqa: D102
    @property
    def backing(self) -> str: ...  # noqa: D102
    @property
    def path(self) -> Path | None: ...  # noqa: D102
    @property
    def lock(self) -> BestEffort: ...  # noqa: D102
    @property
    def huge_pages(self) -> bool: ...  # noqa: D102
    @property
    def prefault_threads(self) -> int: ...  # noqa: D102


class Found(NamedTuple):
    """A pool's file that an earlier daemon left: locked, whole, of the wanted size."""

    owner: int
    pool_id: str


def pool_path(settings: PoolSettings, runtime_dir: Path) -> Path | None:
    """Return where the pool's file lies, ``None`` for one that has no name."""
    return (settings.path or runtime_dir / "pool") if settings.backing == "file" else None


class Pool:
    """A mapped pool.

    Attributes:
        pool_id: 32 random hex digits that name this mapping and no other.
        bytes: size of the mapping: ``pool.bytes`` rounded down to whole units (or huge pages).
        fd: descriptor for engine processes; stays this object's.
        address: where the mapping starts in this process.
        achieved: for status: ``{what: {"state": ..., "reason": ...}}`` of backing, huge_pages, lock, prefault
            and pin; ``reason`` only where there is one.
        prefaulted_bytes: how far :meth:`prefault` is.
        presence: what engines can see of the tiers' content without asking.
    """

    def __init__(
        self,
        owner: int,
        size: int,
        *,
        calls: MemoryCalls,
        threads: int = 0,
        path: Path | None = None,
        pool_id: str = "",
    ) -> None:
        """Map the file behind ``owner``, which this object closes; ``path`` is removed at the end.

        ``pool_id``: that of a pool which is there already, with all its pages.
        """
        self.pool_id = pool_id or secrets.token_hex(16)
        self.bytes = size
        self.achieved: dict[str, dict[str, str]] = {}
        self.prefaulted_bytes = size if pool_id else 0
        self._owner = owner
        self._path = path
        self._calls = calls
        self._threads = threads or min(len(os.sched_getaffinity(0)), MAX_PREFAULT_THREADS)
        self._map = mmap.mmap(owner, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # A passed descriptor of the owner's own description would keep a dead daemon's file locked.
        self.fd = files.open_again(owner) if path is not None else owner
        self._cancelled = threading.Event()
        self._progress = threading.Lock()
        self._prefaulting = threading.Lock()
        self._at_close: list[Callable[[], None]] = []
        self.presence = SharedPresence(size)
        self._closed = False

    @classmethod
    def allocate(
        cls,
        settings: PoolSettings,
        runtime_dir: Path,
        calls: MemoryCalls | None = None,
        found: Found | None = None,
    ) -> Pool:
        """Make and map the pool, or map the one that was found; nothing new is pre-faulted yet.

        Raises:
            PoolError: it does not fit the limits (checked first), the kernel refuses, or it must be locked
                and cannot be. Nothing is left behind.
        """
        calls = calls or Libc()
        size = settings.bytes - settings.bytes % UNIT
        huge_state = ("off", "")
        pool = None
        if found is not None:
            pool = _again(settings, found, size, runtime_dir, calls)
        elif settings.huge_pages:
            pool, huge_state = _with_huge_pages(settings, calls)
        if pool is None:
            pool = _plain(settings, size, runtime_dir, calls)
        try:
            pool.record("backing", settings.backing)
            pool.record("huge_pages", *huge_state)
            pool.record("prefault", "pending" if found is None else "done")
            pool._lock_memory(settings.lock)
            with contextlib.suppress(OSError):
                calls.madvise(pool.address, pool.bytes, MADV_DONTDUMP)  # prompts stay out of core dumps
        except PoolError:
            pool.close(keep=found is not None)
            raise
        return pool

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` writable bytes from ``offset``.

        Raises:
            ValueError: they are not inside the pool.
        """
        if offset < 0 or length < 0 or offset + length > self.bytes:
            raise ValueError(f"bytes {offset} to {offset + length} are outside the pool of {self.bytes}")
        return self._memory[offset : offset + length]

    def slot_view(self, slot_unit: int, length: int) -> memoryview:
        """Return the first ``length`` writable bytes of the slot that starts at unit ``slot_unit``."""
        return self.view(slot_unit * UNIT, length)

    def prefault(self) -> bool:
        """Back every page with memory, in parallel; blocks, so call it from a thread.

        Returns:
            False if :meth:`cancel` or :meth:`close` ended it early.

        Raises:
            PoolError: the kernel has no memory for it.
        """
        with self._prefaulting:
            if self._closed:
                return False
            if self.prefaulted_bytes == self.bytes:
                return True
            self.record("prefault", "running")
            self.prefaulted_bytes = 0
            chunks = range(0, self.bytes, PREFAULT_CHUNK)
            try:
                with ThreadPoolExecutor(self._threads, thread_name_prefix="kvtierd-prefault") as executor:
                    populated = all(list(executor.map(self._prefault_chunk, chunks)))
            except OSError as error:
                self.record("prefault", "failed", error.strerror or str(error))
                raise PoolError(
                    f"pool.bytes: the kernel gave memory for {self.prefaulted_bytes} of {self.bytes} bytes: "
                    f"{error.strerror}; lower pool.bytes or raise the memory limit"
                ) from None
            if self.prefaulted_bytes < self.bytes:
                self.record("prefault", "cancelled")
                return False
            self.record(
                "prefault", "done", "" if populated else "page by page: the kernel is older than 5.14"
            )
            return True

    def cancel(self) -> None:
        """Make a running :meth:`prefault` end within a chunk."""
        self._cancelled.set()

    def owner(self) -> int:
        """Return another descriptor of the file behind the pool, with its lock; the caller's."""
        return os.dup(self._owner)

    def record(self, what: str, state: str, reason: str = "") -> None:
        """Note in :attr:`achieved` what came of one wish."""
        self.achieved[what] = {"state": state, "reason": reason} if reason else {"state": state}

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` at :meth:`close`, before the memory is unmapped; the last added is called first."""
        self._at_close.append(undo)

    def close(self, *, keep: bool = False) -> bool:
        """Unmap and, unless its file is to be kept, free the pool; safe to call twice and during a pre-fault.

        Returns:
            False if views of it are still out: then the mapping stays until the last one is gone.
        """
        self.cancel()
        with self._prefaulting:
            if self._closed:
                return self._map.closed
            self._closed = True
            while self._at_close:
                self._at_close.pop()()
            if self._path is not None and not keep:
                files.remove_file(self._path, self._owner)
            self.presence.close()
            self._memory.release()
            with contextlib.suppress(BufferError):
                self._map.close()
            for fd in {self._owner, self.fd}:
                os.close(fd)
            return self._map.closed

    def _prefault_chunk(self, offset: int) -> bool:
        """Populate one chunk; return whether the kernel did it at one go."""
        if self._cancelled.is_set():
            return True
        length = min(PREFAULT_CHUNK, self.bytes - offset)
        populated = True
        try:
            self._calls.madvise(self.address + offset, length, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._cancelled.set()
                raise
            populated = False
            pages = self._memory[offset : offset + length : mmap.PAGESIZE]
            pages[:] = pages.tobytes()
        with self._progress:
            self.prefaulted_bytes += length
        return populated

    def _lock_memory(self, mode: BestEffort) -> None:
        if mode == "off":
            self.record("lock", "off")
            return
        try:
            self._calls.lock(self.address, self.bytes)
        except OSError as error:
            reason = f"{error.strerror} (memlock limit {_memlock_limit()}, or no CAP_IPC_LOCK)"
            if mode == "require":
                raise PoolError(f"pool.lock: require: cannot lock {self.bytes} bytes: {reason}") from None
            self.record("lock", "not locked", reason)
        else:
            self.record("lock", "locked")


def _with_huge_pages(settings: PoolSettings, calls: MemoryCalls) -> tuple[Pool | None, tuple[str, str]]:
    """Return a pool of huge pages and its state; or none, and why not."""
    free, page = huge_page_room()
    size = settings.bytes - settings.bytes % page if page else 0
    if not size or free < size:
        return None, ("not used", f"{settings.bytes} bytes needed, {free} in free huge pages")
    fd = -1
    try:
        fd = files.open_memfd(size, huge=True)
        return Pool(fd, size, calls=calls, threads=settings.prefault_threads), ("used", "")
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        return None, ("not used", error.strerror or str(error))


def _again(settings: PoolSettings, found: Found, size: int, runtime_dir: Path, calls: MemoryCalls) -> Pool:
    threads, path = settings.prefault_threads, pool_path(settings, runtime_dir)
    try:
        return Pool(found.owner, size, calls=calls, threads=threads, path=path, pool_id=found.pool_id)
    except OSError as error:
        os.close(found.owner)
        raise PoolError(f"pool.bytes: cannot map {size} bytes: {error.strerror}") from None


def _plain(settings: PoolSettings, size: int, runtime_dir: Path, calls: MemoryCalls) -> Pool:
    path = pool_path(settings, runtime_dir)
    if path is not None:
        files.claim_file(path)  # first: what a dead daemon left counts against the limits
    require_room(size, memory_rooms(), "pool.bytes")
    if path is not None:
        folder = next(parent for parent in path.parents if parent.is_dir())
        require_room(size, iter([filesystem_room(folder)]), "pool.bytes")
        fd = files.create_file(path, size)
    else:
        try:
            fd = files.open_memfd(size)
        except OSError as error:
            raise PoolError(f"pool.bytes: no memfd of {size} bytes: {error.strerror}") from None
    try:
        return Pool(fd, size, calls=calls, threads=settings.prefault_threads, path=path)
    except OSError as error:
        if path is not None:
            files.remove_file(path, fd)
        os.close(fd)
        raise PoolError(f"pool.bytes: cannot map {size} bytes: {error.strerror}") from None


def _memlock_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"

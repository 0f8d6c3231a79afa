"""This process's mappings of pools and the descriptors that tell the daemon that it lives.

A mapping is never unmapped under a view: what is handed out are memoryviews, which hold it; it goes when the
last view of it goes. (``torch.frombuffer`` on the ``mmap`` itself would not hold it.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from kvtierd.core.effects import Attached
from kvtierd.errors import RemoteProtocolError

_lock = threading.Lock()
_mappings: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()
# One liveness descriptor for each pool that this process maps, by process token: a forked child inherits its
# parent's (it inherited the mapping too, so the parent may not count as gone) and needs one of its own.
# It stays open for as long as the mapping is there, also when the daemon is gone: the next one may go on with
# the pool, and has to know who may be copying.
_liveness: dict[tuple[bytes, str], int] = {}
_token: tuple[int, bytes] = (0, b"")


@dataclass(frozen=True, slots=True)
class Region:
    """A mapped pool and the geometry of the session's layout in it. Replaced as a whole, never changed."""

    pool: memoryview
    attached: Attached

    @property
    def pool_id(self) -> str:
        """The mapping's name; another daemon or another start has another."""
        return self.attached.pool_id

    def slot(self, number: int, size: int | None = None) -> memoryview:
        """Return the first ``size`` bytes (default: all) of the slot with this unit number.

        Raises:
            IndexError: the slot is not inside the pool.
        """
        start = number * self.attached.unit_bytes
        end = start + (self.attached.slot_bytes if size is None else size)
        if number < 0 or end > len(self.pool):
            raise IndexError(f"slot {number} is not inside a pool of {len(self.pool)} bytes")
        return self.pool[start:end]


def process_token() -> bytes:
    """Return 16 random bytes that name this process; a forked child has its own."""
    global _token, _lock
    if _token[0] != os.getpid():
        _lock = threading.Lock()  # the parent's may have been held by a thread that does not exist here
        _token = (os.getpid(), secrets.token_bytes(16))
    return _token[1]


def look(attached: Attached, descriptors: list[int]) -> memoryview | None:
    """Map the cells that came with an attach and take their descriptor out of the list.

    ``None`` where they did not come or cannot be mapped: then one has to ask.
    """
    size = attached.presence_bytes
    if not size or len(descriptors) != 3:
        return None
    descriptor = descriptors.pop()
    try:
        whole = size & (size - 1) == 0
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)) if whole else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def adopt(attached: Attached, descriptors: Sequence[int]) -> tuple[Region, bool]:
    """Map the pool that came with an attach; returns it and whether this process had mapped it before.

    Takes ownership of the descriptors. The daemon counts a process as dead when EVERY liveness descriptor
    that it was given hung up, so one for each pool is kept and further ones are closed.

    Raises:
        RemoteProtocolError: there are not two descriptors, or the first is not a pool of the stated size.
    """
    token = process_token()
    spare = list(descriptors)
    try:
        if len(descriptors) != 2:
            raise RemoteProtocolError(f"attached came with {len(descriptors)} descriptors instead of 2")
        with _lock:
            mapping = _map(attached, descriptors[0])
            again = (token, attached.pool_id) in _liveness
            if not again:
                _liveness[token, attached.pool_id] = descriptors[1]
                spare.remove(descriptors[1])
        return Region(memoryview(mapping), attached), again
    finally:
        for descriptor in spare:
            os.close(descriptor)


def _map(attached: Attached, descriptor: int) -> mmap.mmap:
    known = _mappings.get(attached.pool_id)
    if known is not None and len(known) == attached.pool_bytes:
        return known
    try:
        mapping = mmap.mmap(
            descriptor, attached.pool_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
    except (OSError, ValueError) as error:
        raise RemoteProtocolError(
            f"the pool of {attached.pool_bytes} bytes cannot be mapped: {error}"
        ) from error
    _mappings[attached.pool_id] = mapping
    weakref.finalize(mapping, _unmapped, attached.pool_id).atexit = False
    return mapping


def _unmapped(pool_id: str) -> None:
    """Let the daemon know that no copy can run in this process: its mapping is gone."""
    descriptor = _liveness.pop((process_token(), pool_id), None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)

"""The few memory calls of libc that Python lacks or makes while it holds the GIL.

Constants are those of Linux (``asm-generic/mman-common.h``, ``mlock2(2)``).
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MLOCK_ONFAULT = 1


class MemoryCalls(Protocol):
    """What the pool needs of libc. Addresses are absolute, lengths in bytes; failures are ``OSError``."""

    def madvise(self, address: int, length: int, advice: int) -> None:
        """Advise the kernel about a range; releases the GIL while it runs."""

    def lock(self, address: int, length: int) -> None:
        """Keep a range in memory, each page from its first use on."""


class Libc:
    """The real calls."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._madvise = libc.madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # mlock2 on fault is refused at once where locking is not allowed, and leaves the faulting to threads.
        self._mlock2 = getattr(libc, "mlock2", None)
        if self._mlock2 is not None:
            self._mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._mlock = libc.mlock
        self._mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def madvise(self, address: int, length: int, advice: int) -> None:
        """See :class:`MemoryCalls`."""
        _check(self._madvise(address, length, advice))

    def lock(self, address: int, length: int) -> None:
        """See :class:`MemoryCalls`."""
        if self._mlock2 is not None:
            _check(self._mlock2(address, length, MLOCK_ONFAULT))
        else:
            _check(self._mlock(address, length))


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

"""A stream's next number in a page of memory that outlives the process, so that a crash leaves no hole.

A mapped file's page belongs to the kernel: a store into it survives any end of the process and costs
nothing. It does not survive the end of the machine, so it is believed only in the boot that it names.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path

_PAGE = struct.Struct("<Q36s")


def boot_id() -> str:
    """Return a name of the kernel's present run, empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


class NumberPage:
    """One number in ``path``. ``found``: what an earlier process of this boot left there, else ``None``."""

    def __init__(self, path: Path) -> None:
        self.found: int | None = None
        self._page: mmap.mmap | None = None
        boot = boot_id().encode()[:36].ljust(36, b"\0")
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                if os.fstat(descriptor).st_size == _PAGE.size:
                    number, its_boot = _PAGE.unpack(os.pread(descriptor, _PAGE.size, 0))
                    if its_boot == boot and boot.strip(b"\0"):
                        self.found = number
                os.ftruncate(descriptor, _PAGE.size)
                os.posix_fallocate(descriptor, 0, _PAGE.size)  # so that a store cannot meet a full disk
                self._page = mmap.mmap(descriptor, _PAGE.size)
                self._page[8:] = boot
            finally:
                os.close(descriptor)

    def set(self, number: int) -> None:
        """Keep a number; a process that ends in the middle of it leaves the old one or the new one."""
        if self._page is not None:
            self._page[:8] = number.to_bytes(8, "little")

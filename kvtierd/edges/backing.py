"""The file behind the pool: an anonymous memfd, with huge pages where asked, or a named file.

Each function returns a descriptor of exactly the wanted size; none leaves anything behind when it fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from kvtierd.errors import PoolError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 16  # Linux 5.1: who has no writable mapping yet gets none
_MFD_NOEXEC_SEAL = 8  # Linux 6.3; some machines refuse memfds without it (sysctl vm.memfd_noexec)


def open_memfd(size: int, *, huge: bool = False, sealed: bool = True) -> int:
    """Create a memfd whose size can never change again, so that no holder of it can make another one fault.

    Without ``sealed`` it can, until :func:`seal_for_readers`.

    Raises:
        OSError: the kernel refuses (with ``huge``: no huge pages reserved, for instance).
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0)
    try:
        fd = os.memfd_create("kvtierd-pool", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("kvtierd-pool", flags)
    try:
        os.ftruncate(fd, size)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal_for_readers(fd: int) -> bool:
    """Let nobody write to a memfd but by the mappings that there are; whether the kernel can do that."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | _SEAL_FUTURE_WRITE)
    except OSError:
        return False
    return True


def lock_file(path: Path) -> int | None:
    """Open and lock what a dead daemon left at ``path``; ``None`` if there is nothing.

    Raises:
        PoolError: a live daemon owns it, or it is no file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PoolError(f"pool.path: cannot open {path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PoolError(f"pool.path: {path} is not a regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise PoolError(f"pool.path: {path} belongs to another daemon that is running") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def claim_file(path: Path) -> None:
    """Remove what a dead daemon left at ``path``. Its memory stays with the engines that still map it.

    Raises:
        PoolError: a live daemon owns it, or it is no file.
    """
    fd = lock_file(path)
    if fd is not None:
        # Not truncated: an engine that still maps it would die of SIGBUS.
        path.unlink(missing_ok=True)
        os.close(fd)


def create_file(path: Path, size: int) -> int:
    """Create and fully allocate the file at ``path``, locked for as long as the descriptor is open.

    Raises:
        PoolError: it cannot be created, or the filesystem has no room.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o770)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PoolError(f"pool.path: cannot create {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        remove_file(path, fd)
        os.close(fd)
        raise PoolError(f"pool.bytes: cannot allocate {size} bytes at {path}: {error.strerror}") from None
    return fd


def remove_file(path: Path, fd: int) -> None:
    """Remove ``path`` if it still is the file behind ``fd``."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd)):
            path.unlink()


def open_again(fd: int) -> int:
    """Return a new open file description of the same file: one that does not carry the lock of ``fd``."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

"""Unix listening sockets and the folder they lie in: one daemon at a time, right modes, nothing overwritten.

A place where a client may connect belongs to whoever answers there. What is no socket is never touched, and
a socket is replaced only when the kernel itself says that nobody listens (a daemon that is merely slow keeps
its place).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtierd.errors import ExitCode, KvtierdError

BACKLOG = 128
PROBE_SECONDS = 1.0
LOCK_NAME = "lock"


class CannotCreate(KvtierdError):
    """Another daemon answers at the path, or the folder cannot hold a socket."""

    exit_code = ExitCode.CANT_CREATE


@dataclass(frozen=True, slots=True)
class Permissions:
    """Who the filesystem lets in: mode bits, and a group (name or number) besides the process's own."""

    mode: int = 0o660
    group: str | int | None = None

    def gid(self) -> int:
        """Return the group's number, -1 for the process's own (or the folder's, where that is inherited).

        Raises:
            CannotCreate: this machine knows no such group.
        """
        if self.group is None:
            return -1
        if isinstance(self.group, int):
            return self.group
        try:
            return grp.getgrnam(self.group).gr_gid
        except KeyError:
            message = f"access.group: this machine knows no group {self.group!r}: write its number"
            raise CannotCreate(message) from None


def make_folder(setting: str, path: Path) -> None:
    """Create a folder of the daemon with mode 0770 where it is not there yet; ``setting`` names its key."""
    try:
        path.mkdir(mode=0o770, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotCreate(f"{setting} {path}: {error.strerror}: create it or choose another") from error


def lock_folder(folder: Path) -> int:
    """Take the folder for this process; return the descriptor that holds the lock until it is closed.

    Raises:
        CannotCreate: another daemon has it (also one that is just stopping), or no file can be made there.
    """
    path = folder / LOCK_NAME
    while True:
        fd = _open_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd)):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return fd
            os.close(fd)  # its owner was just leaving and took the name away
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
            os.close(fd)
            raise CannotCreate(
                f"runtime_dir {folder}: another daemon has it (pid {owner}): stop it or choose another"
            ) from None
        except OSError as error:
            os.close(fd)
            raise _cannot_lock(path, error) from error


def _cannot_lock(path: Path, error: OSError) -> CannotCreate:
    return CannotCreate(
        f"runtime_dir: {path}: {error.strerror}: make the folder writable for this user or choose another"
    )


def unlock_folder(folder: Path, fd: int) -> None:
    """Give the folder back and leave nothing there."""
    with contextlib.suppress(OSError):
        (folder / LOCK_NAME).unlink()
    os.close(fd)


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _cannot_lock(path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CannotCreate(f"runtime_dir: {path} is no regular file: remove it or choose another folder")
    return fd


def listen(path: Path, permissions: Permissions = Permissions()) -> socket.socket:
    """Return a listening socket at ``path``; it has its mode and group from the first moment.

    It is bound beside its place with no more rights than its owner's, gets what it shall have, and is then
    renamed: a client finds either nothing or a socket that answers. The umask is not touched.

    Raises:
        CannotCreate: somebody answers there, or might; something else lies there; the folder takes no socket.
    """
    _require_free(path)
    gid = permissions.gid()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), permissions.mode & 0o600)  # Linux: what bind() gives the new name
        listener.bind(str(beside))
        listener.listen(BACKLOG)
        if gid != -1:
            os.chown(beside, -1, gid, follow_symlinks=False)
        os.chmod(beside, permissions.mode)
        os.rename(beside, path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            beside.unlink()
        what = f" (access.group: {permissions.group})" if gid != -1 else ""
        raise CannotCreate(f"{path}: {error.strerror}{what}") from error
    return listener


def remove_own(path: Path, inode: tuple[int, int] | None) -> None:
    """Remove a socket that this process made, and not one that has taken its place since."""
    with contextlib.suppress(OSError):
        if inode is None or inode_of(path) == inode:
            path.unlink()


def inode_of(path: Path) -> tuple[int, int]:
    """Return what tells this file from any other of its name."""
    there = path.stat(follow_symlinks=False)
    return there.st_dev, there.st_ino


def _require_free(path: Path) -> None:
    """Check that nothing of anybody is at ``path``; a stale socket may be.

    Raises:
        CannotCreate: something is, or it cannot be known.
    """
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotCreate(f"{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(there.st_mode):
        raise CannotCreate(f"{path}: is no socket and is left alone: remove it or choose another runtime_dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return
            # A full backlog, no permission: somebody may well be there.
            why = error.strerror or "no answer in time"
            raise CannotCreate(
                f"{path}: another daemon may be there ({why}): remove the socket if not"
            ) from None
    raise CannotCreate(f"{path}: another daemon answers there: stop it or choose another runtime_dir")

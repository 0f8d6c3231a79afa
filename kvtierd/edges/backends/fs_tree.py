"""The tree of a filesystem tier: names, folders, temporaries and the quarantine (``FORMAT.md``).

Every name is made from validated or hex-encoded parts, and every folder below the root is opened by
descriptor without following symbolic links, so no call can leave the root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kvtierd.core.model import BlockId, BlockKey

BLOCKS = "v1"
QUARANTINE = "quarantine"
RECORD = "namespace.json"
TEMPORARY = ".tmp-"
STALE_AFTER = 60.0

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE = 0o660
_FOLDER_MODE = 0o770

_NAMESPACE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,64})\.(0|[1-9][0-9]{0,9})", re.ASCII)
_SHARD = re.compile(r"[0-9a-f]{2}", re.ASCII)


def _boot_id() -> str:
    """Return 32 hex digits that name this kernel's run, or "" where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip().replace("-", "")
    except OSError:
        return ""


BOOT_ID = _boot_id()


def is_namespace(name: str) -> bool:
    """Say whether this is a namespace: 32 lower-case hex digits."""
    return _NAMESPACE.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Say whether this is the name of a folder of blocks."""
    return _SHARD.fullmatch(name) is not None


def shard_of(key: BlockKey) -> str:
    """Return the folder of a block: the last byte of its hash, which varies in every kind of hash."""
    return key.hash[-1:].hex()


def file_name(key: BlockKey) -> str:
    """Return a block's file name: at most 139 characters of hex, a dot and decimal digits."""
    return f"{key.hash.hex()}.{key.group:d}"


def parse_name(name: str) -> BlockKey | None:
    """Return the key that a file name stands for, None for a foreign name."""
    match = _BLOCK.fullmatch(name)
    return BlockKey(bytes.fromhex(match[1]), int(match[2])) if match else None


def check_id(block_id: BlockId) -> None:
    """Refuse an id that has no file name.

    Raises:
        OSError: EINVAL.
    """
    namespace, key = block_id
    if not is_namespace(namespace) or not 1 <= len(key.hash) <= 64 or not 0 <= key.group < 10**10:
        raise OSError(errno.EINVAL, "namespace or key out of bounds")


def create_temporary(folder: int) -> tuple[int, str]:
    """Create a locked temporary of a unique name in a folder; return its descriptor and name."""
    name = f"{TEMPORARY}{BOOT_ID}-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(name, _CREATE, _FILE_MODE, dir_fd=folder)
    with contextlib.suppress(OSError):  # no locks here: a scan cannot prove anything and leaves it alone
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd, name


def remove_stale_temporary(folder: int, name: str) -> bool:
    """Remove a temporary if its writer is provably dead; say whether it was.

    Proof: written under this kernel, untouched for a minute (a writer locks right after creating and renames
    right after unlocking) and no process holds its lock.
    """
    if not BOOT_ID or not name.startswith(f"{TEMPORARY}{BOOT_ID}-"):
        return False
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if time.time() - os.fstat(fd).st_mtime < STALE_AFTER:
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def open_folder(name: str, parent: int, *, create: bool = False) -> int:
    """Open a folder of the tree, never through a symbolic link; return its descriptor."""
    try:
        return os.open(name, DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, _FOLDER_MODE, dir_fd=parent)
    return os.open(name, DIRECTORY, dir_fd=parent)


class Folders:
    """The folders that one call works in; opened once per call, closed at its end.

    Nothing is kept open between calls, so that a root that was removed, replaced or remounted is noticed.
    ``device`` is the filesystem that the root must be on, None for any.
    """

    def __init__(self, root: Path, device: int | None) -> None:
        try:
            self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:  # not "the block is gone": the whole tier is
            raise OSError(errno.ESTALE, "the root folder is missing") from error
        self._open: dict[str, int] = {}
        if device not in (None, os.fstat(self.root).st_dev):
            os.close(self.root)
            raise OSError(errno.ESTALE, "another filesystem is mounted at the root")

    def __enter__(self) -> Folders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in (*self._open.values(), self.root):
            os.close(fd)

    def _kept(self, name: str, parent: int, create: bool) -> int:
        fd = self._open.get(name)
        if fd is None:
            fd = self._open[name] = open_folder(name, parent, create=create)
        return fd

    def blocks(self, *, create: bool = False) -> int:
        """Return the descriptor of the folder of all namespaces."""
        return self._kept(BLOCKS, self.root, create)

    def quarantine(self) -> int:
        """Return the descriptor of the quarantine, made when absent."""
        return self._kept(QUARANTINE, self.root, True)

    def namespace(self, namespace: str, *, create: bool = False) -> int:
        """Return the descriptor of a namespace's folder."""
        return self._kept(namespace, self.blocks(create=create), create)

    @contextlib.contextmanager
    def of(self, block_id: BlockId, *, create: bool = False) -> Iterator[int]:
        """Open the folder that a block's file lies in, for the body only.

        Raises:
            OSError: the id has no name (EINVAL), the folder is missing, or a link stands in its place.
        """
        check_id(block_id)
        parent = self.namespace(block_id.namespace, create=create)
        fd = open_folder(shard_of(block_id.key), parent, create=create)
        try:
            yield fd
        finally:
            os.close(fd)


class Quarantine:
    """Keeps the newest ``keep`` corrupt blocks of a tier for a person to look at."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()

    def move(self, folders: Folders, folder: int, block_id: BlockId) -> None:
        """Move a block's file aside and drop the oldest; without room to move it, unlink it.

        Raises:
            OSError: neither could be done; FileNotFoundError when there is no such file.
        """
        name = file_name(block_id.key)
        with self._lock:
            try:
                aside = folders.quarantine()
                target = f"{time.time_ns():020d}.{block_id.namespace}.{name}"
                os.rename(name, target, src_dir_fd=folder, dst_dir_fd=aside)
            except FileNotFoundError:
                raise
            except OSError:
                os.unlink(name, dir_fd=folder)
                return
            self._trim(aside)

    def _trim(self, aside: int) -> None:
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(aside) if is_namespace(name[21:53]))
            for name in names[: max(0, len(names) - self._keep)]:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=aside)

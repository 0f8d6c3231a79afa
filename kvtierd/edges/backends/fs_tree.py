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
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kvtierd.core.model import BlockId, BlockKey, block_key, group_of, hash_of

BLOCKS = "v1"
QUARANTINE = "quarantine"
PACKED = "packed"
LOCK = "lock"
RECORD = "namespace.json"
TEMPORARY = ".tmp-"
STALE_AFTER = 60.0
PAGE = 4096

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that somebody left under a block's name must not block; files do not care.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE = 0o660
_FOLDER_MODE = 0o770

_NAMESPACE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,64})\.(0|[1-9][0-9]{0,8}|[1-3][0-9]{9})", re.ASCII)
_SEGMENT = re.compile(r"([1-9][0-9]{3,7})-[0-9a-f]{16}", re.ASCII)
_SHARD = re.compile(r"[0-9a-f]{2}", re.ASCII)


def _boot_id() -> str:
    """Return 32 hex digits that name this kernel's run, or "" where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip().replace("-", "")
    except OSError:
        return ""


BOOT_ID = _boot_id()
_RUN = secrets.token_hex(4)
"""Tells this process from an earlier one with its pid: in containers that is often 1."""


def is_namespace(name: str) -> bool:
    """Say whether this is a namespace: 32 lower-case hex digits."""
    return _NAMESPACE.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Say whether this is the name of a folder of blocks."""
    return _SHARD.fullmatch(name) is not None


def shard_of(key: BlockKey) -> str:
    """Return the folder of a block: the last byte of its hash, which varies in every kind of hash."""
    return hash_of(key)[-1:].hex()


def file_name(key: BlockKey) -> str:
    """Return a block's file name: at most 139 characters of hex, a dot and decimal digits."""
    return f"{hash_of(key).hex()}.{group_of(key):d}"


def parse_name(name: str) -> BlockKey | None:
    """Return the key that a file name stands for, None for a foreign name."""
    match = _BLOCK.fullmatch(name)
    return block_key(bytes.fromhex(match[1]), int(match[2])) if match else None


def is_block(name: str, shard: str) -> bool:
    """Say whether this is the name of a block that belongs into the folder ``shard``."""
    dot = name.find(".")
    return name[dot - 2 : dot] == shard and _BLOCK.fullmatch(name) is not None


def segment_name(slot_bytes: int) -> str:
    """Return a new name for a segment with slots of this size."""
    return f"{slot_bytes:d}-{secrets.token_hex(8)}"


def parse_segment(name: str) -> int | None:
    """Return the slot size of the segment of this name, None for a foreign name."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and int(match[1]) % 4096 == 0 else None


def is_no_file(error: OSError) -> bool:
    """Say whether opening failed as something else than a file is there: a link, socket or device."""
    return error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV)


def check_id(block_id: BlockId) -> None:
    """Refuse an id that has no file name.

    Raises:
        OSError: EINVAL.
    """
    namespace, key = block_id.namespace, block_id.key
    if not is_namespace(namespace) or not 1 <= len(hash_of(key)) <= 64 or group_of(key) >= 4 * 10**9:
        raise OSError(errno.EINVAL, "namespace or key out of bounds")


def create_file(folder: int, name: str) -> int:
    """Create a file of this name, which must not exist; return a descriptor to read and write it."""
    return os.open(name, _CREATE, _FILE_MODE, dir_fd=folder)


def create_temporary(folder: int) -> tuple[int, str]:
    """Create a locked temporary of a unique name in a folder; return its descriptor and name."""
    name = f"{TEMPORARY}{BOOT_ID}-{os.getpid()}-{_RUN}{secrets.token_hex(8)}"
    fd = create_file(folder, name)
    with contextlib.suppress(OSError):  # no locks here: a scan cannot prove anything and leaves it alone
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd, name


def is_own_temporary(name: str) -> bool:
    """Say whether this process made the temporary of this name."""
    return name.startswith(f"{TEMPORARY}{BOOT_ID}-{os.getpid()}-{_RUN}")


def remove_stale_temporary(folder: int, name: str, *, alone: bool = False, dry: bool = False) -> bool:
    """Remove a temporary if its writer is provably dead; say whether it was (``dry``: would be).

    Proof: the caller holds the root ``alone`` and writes nothing there; or it was written under this kernel,
    is untouched for a minute (a writer locks right after creating and renames right after unlocking) and no
    process holds its lock.
    """
    if alone:
        with contextlib.suppress(OSError):
            if not dry:
                os.unlink(name, dir_fd=folder)
            return True
        return False
    if not BOOT_ID or not name.startswith(f"{TEMPORARY}{BOOT_ID}-"):
        return False
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if time.time() - os.fstat(fd).st_mtime < STALE_AFTER:
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not dry:
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
        self.root = _open_root(root)
        self._open: dict[tuple[str, str], int] = {}
        info = os.fstat(self.root)
        self.inode = info.st_ino
        if device not in (None, info.st_dev):
            os.close(self.root)
            raise OSError(errno.ESTALE, "another filesystem is mounted at the root, or none any more")

    def __enter__(self) -> Folders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in (*self._open.values(), self.root):
            os.close(fd)

    def _kept(self, name: str, parent: int, create: bool, of: str = "") -> int:
        fd = self._open.get((of, name))
        if fd is None:
            fd = self._open[of, name] = open_folder(name, parent, create=create)
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

    def packed(self, namespace: str, *, create: bool = False) -> int:
        """Return the descriptor of the folder of a namespace's segments."""
        return self._kept(PACKED, self.namespace(namespace, create=create), create, namespace)

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


def _open_root(root: Path) -> int:
    """Open the root; a missing one is an error of the tier (ESTALE), not of a block (ENOENT).

    It is not made again: it may have been moved, or lie on a filesystem that is not mounted at the moment.
    """
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, "the root folder is missing") from error

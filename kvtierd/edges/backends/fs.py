"""One file per block in a folder: unique temporaries, rename, and every read proved (``FORMAT.md``)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_format, fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.fs_scan import FsScan
from kvtierd.edges.backends.fs_tree import Folders, Quarantine
from kvtierd.errors import TierError

# O_NONBLOCK: opening a FIFO that somebody left under a block's name must not block; files do not care.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Vector = Sequence[bytes | bytearray | memoryview]


class FsBackend:
    """Storage of a filesystem tier; safe to call from several threads and to share by several daemons.

    A missing file is GONE; one that is not provably the block is CORRUPT; no space is FULL; every other
    error of the system is FAILED and leaves the file where it is.
    """

    def __init__(self, name: str, root: str | os.PathLike[str], *, quarantine: int = 64) -> None:
        self.name = name
        self.root = Path(root)
        self._device: int | None = None
        self._quarantine = Quarantine(quarantine)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the root and prove that it can be written.

        Raises:
            TierError: it cannot.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with Folders(self.root, None) as folders:
                folders.quarantine()
                blocks = folders.blocks(create=True)
                fd, probe = fs_tree.create_temporary(blocks)
                os.close(fd)
                os.unlink(probe, dir_fd=blocks)
                self._device = os.fstat(folders.root).st_dev
        except OSError as error:
            hint = "make it a folder that this user can write, or change the tier's path"
            raise TierError(self.name, f"cannot use {self.root}: {error.strerror}; {hint}") from error

    def close(self) -> None:
        """Nothing stays open between calls."""

    def estimate(self, block: Block) -> int:
        """Return exactly what the block's file will occupy, in bytes."""
        return fs_format.stored_bytes(block)

    def statistics(self) -> dict[str, int]:
        """Return a copy of the counters, among them one per flaw found and what scans met."""
        with self._lock:
            return dict(self._counts)

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Yield all blocks whose header and size are right, least recently used first."""
        return FsScan(self.root, self._device, self._quarantine, self._count).run()

    def describe(self, namespace: str, layout: Layout) -> None:
        """Write the namespace's readable record, best effort."""
        geometry = Geometry.of(layout)
        record = {
            "format": fs_format.VERSION,
            "namespace": namespace,
            "layout": msgspec.to_builtins(layout),
            "slot_bytes": geometry.slot_bytes,
            "payload_bytes": geometry.payload_bytes,
        }
        text = json.dumps(record, indent=2, ensure_ascii=True).encode("ascii") + b"\n"
        try:
            if not fs_tree.is_namespace(namespace):
                raise OSError(errno.EINVAL, "not a namespace")
            with Folders(self.root, self._device) as folders:
                folder = folders.namespace(namespace, create=True)
                _publish(folder, fs_tree.RECORD, [text])
        except OSError:
            self._count("describe_failed")

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store blocks under their names; nobody ever sees half a file."""
        return self._each(
            [transfer.block.id for transfer in transfers],
            lambda folders, i: self._write(folders, transfers[i]),
            reading=False,
        )

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read blocks straight into their memory and prove header, identity, length and payload."""
        return self._each(
            [transfer.block.id for transfer in transfers],
            lambda folders, i: self._read(folders, transfers[i]),
            reading=True,
        )

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Unlink blocks, or move them to the quarantine."""
        return self._each(ids, lambda folders, i: self._delete(folders, ids[i], corrupt), reading=False)

    def _each(
        self, ids: Sequence[BlockId], act: Callable[[Folders, int], Outcome], *, reading: bool
    ) -> list[Outcome]:
        """Run ``act`` per block; errors of the system become outcomes."""
        if not ids:
            return []
        try:
            with Folders(self.root, self._device) as folders:
                return [self._guarded(folders, i, block_id, act, reading) for i, block_id in enumerate(ids)]
        except OSError as error:
            return [self._outcome(block_id, Status.FAILED, _describe(error)) for block_id in ids]

    def _guarded(
        self,
        folders: Folders,
        i: int,
        block_id: BlockId,
        act: Callable[[Folders, int], Outcome],
        reading: bool,
    ) -> Outcome:
        try:
            return act(folders, i)
        except FormatError as error:
            return self._outcome(block_id, Status.CORRUPT if reading else Status.FAILED, str(error))
        except OSError as error:
            return self._outcome(block_id, _status(error, reading), _describe(error))

    def _outcome(self, block_id: BlockId, status: Status, reason: str) -> Outcome:
        self._count(f"{status.value}: {reason}")
        return Outcome(block_id, status, reason=reason)

    def _write(self, folders: Folders, transfer: Transfer) -> Outcome:
        block, data = transfer.block, transfer.data
        if len(data) != block.payload_bytes:
            return self._outcome(block.id, Status.FAILED, "payload length differs")
        header = fs_format.encode(block, fs_format.digest(data))
        with folders.of(block.id, create=True) as folder:
            _publish(folder, fs_tree.file_name(block.id.key), [header, data])
        return Outcome(block.id, Status.OK, len(header) + fs_format.aligned(len(data)))

    def _read(self, folders: Folders, transfer: Transfer) -> Outcome:
        block = transfer.block
        with folders.of(block.id) as folder:
            fd = os.open(fs_tree.file_name(block.id.key), _READ, dir_fd=folder)
        try:
            _load(fd, block, transfer.data).check_payload(transfer.data)
            _touch(fd)
        finally:
            with contextlib.suppress(OSError):  # an error of close after a full read is harmless
                os.close(fd)
        return Outcome(block.id, Status.OK)

    def _delete(self, folders: Folders, block_id: BlockId, corrupt: bool) -> Outcome:
        try:
            with folders.of(block_id) as folder:
                if corrupt:
                    self._quarantine.move(folders, folder, block_id)
                    self._count("quarantined")
                else:
                    os.unlink(fs_tree.file_name(block_id.key), dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            pass  # gone already, or a link or file stands in the folder's place: the block is not there
        return Outcome(block_id, Status.OK)


def _describe(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "OSError")
    return f"{code}: {error.strerror}"


def _status(error: OSError, reading: bool) -> Status:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Status.FULL
    if reading and error.errno == errno.ENOENT:
        return Status.GONE
    if reading and error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link or file in the way: not ours
        return Status.CORRUPT
    return Status.FAILED


def _touch(fd: int) -> None:
    """Record the use of a file, best effort; with our own clock, which is finer than the kernel's tick."""
    with contextlib.suppress(OSError):
        now = time.time_ns()
        os.utime(fd, ns=(now, now))


def _publish(folder: int, name: str, content: Vector) -> None:
    """Write a temporary and rename it; on any error nothing of it stays.

    Raises:
        OSError: it was not written; an older file of the name is untouched.
    """
    fd, temporary = fs_tree.create_temporary(folder)
    try:
        try:
            size = sum(len(part) for part in content)
            if _move(os.pwritev, fd, content, 0) != size:
                raise OSError(errno.EIO, "short write")
            _touch(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _move(call: Callable[[int, Vector, int], int], fd: int, vector: Vector, offset: int) -> int:
    """Repeat ``preadv`` or ``pwritev`` until all is moved or nothing moves; return the bytes moved."""
    total = 0
    left: list[bytes | bytearray | memoryview] = list(vector)
    while left:
        moved = call(fd, left, offset + total)
        if moved == 0:
            break
        total += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = memoryview(left[0])[moved:]
    return total


def _load(fd: int, block: Block, data: memoryview) -> Header:
    """Read a block's file; the payload's checksum is still to be checked.

    One system call when the header is as long as this daemon would have written it; one more when not
    (another daemon may have stored the block with other event metadata).

    Raises:
        FormatError: the file is not that block.
    """
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise FormatError(Flaw.FOREIGN)
    if len(data) != block.payload_bytes:
        raise OSError(errno.EINVAL, "payload length differs")
    region = bytearray(fs_format.header_bytes(block))
    got = _move(os.preadv, fd, [region, data], 0)
    offset = fs_format.data_offset(memoryview(region)[:got])
    if offset != len(region):
        region = bytearray(offset)
        got = _move(os.preadv, fd, [region, data], 0)
    header = fs_format.decode(memoryview(region)[:got])
    header.check(block, info.st_size)
    if got != info.st_size:
        raise FormatError(Flaw.SHORT)
    return header

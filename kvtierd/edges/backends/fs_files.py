"""Blocks as one file each: unique temporaries, rename, and every read proved."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence

from kvtierd.core.model import Block, BlockId
from kvtierd.core.stimuli import FoundBlock
from kvtierd.edges.backends import fs_format, fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.fs_io import File, Io
from kvtierd.edges.backends.fs_quarantine import Quarantine
from kvtierd.edges.backends.fs_tree import READ, Folders


class FileStore:
    """The blocks of a tier that have a file of their own; no state, calls come from several threads."""

    def __init__(self, io: Io, quarantine: Quarantine, count: Callable[[str], None]) -> None:
        self._io = io
        self._quarantine = quarantine
        self._count = count

    def write(self, folders: Folders, transfer: Transfer, *, spare: bool = False) -> int:
        """Write a block under its name; nobody ever sees half a file. Return what it occupies.

        ``spare``: a file that is there already and has the right header stays: another daemon wrote it.

        Raises:
            OSError, FormatError: it was not written; an older file of the name is untouched.
        """
        block, data = transfer.block, transfer.data

        def fill(fd: int) -> None:
            file = File(fd)
            header = fs_format.encode(block, fs_format.digest(data))
            region = self._io.region(len(header))
            region[:] = header
            self._io.write(file, 0, [region, data])
            if file.direct and len(data) % fs_format.ALIGN:  # whole pages were written
                os.ftruncate(fd, len(header) + len(data))
            self._io.sync(fd)

        with folders.of(block.id, create=True) as folder:
            if spare and (stored := self._spared(folder, block)):
                return stored
            publish(folder, fs_tree.file_name(block.key), fill)
            self._io.sync_folder(folder)
        return fs_format.stored_bytes(block)

    def _spared(self, folder: int, block: Block) -> int:
        """Return what a block's file occupies if there is a good one, which counts as used now; 0 if not."""
        try:
            fd = os.open(fs_tree.file_name(block.key), READ, dir_fd=folder)
        except OSError:
            return 0
        try:
            info = os.fstat(fd)
            there = found(read_header(fd, info.st_size), block.id) if stat.S_ISREG(info.st_mode) else None
            if there is None or there.block.payload_bytes != block.payload_bytes:
                return 0
            _touch(fd)
        except (OSError, FormatError):
            return 0
        finally:
            os.close(fd)
        self._count("was_there")
        return there.stored_bytes

    def read(self, folders: Folders, transfer: Transfer) -> None:
        """Read a block straight into its memory and prove header, identity, length and payload.

        Raises:
            FormatError: the file is not that block.
            OSError: it cannot be read; FileNotFoundError when there is none.
        """
        block = transfer.block
        with folders.of(block.id) as folder:
            fd = os.open(fs_tree.file_name(block.key), READ, dir_fd=folder)
        try:
            self._load(File(fd), block, transfer.data)
            _touch(fd)
        finally:
            with contextlib.suppress(OSError):  # an error of close after a full read is harmless
                os.close(fd)

    def _load(self, file: File, block: Block, data: memoryview) -> None:
        """Read and prove a file; its size says how long the header region is, whoever wrote the metadata."""
        info = os.fstat(file.fd)
        if not stat.S_ISREG(info.st_mode):
            raise FormatError(Flaw.FOREIGN)
        if len(data) != block.payload_bytes:
            raise OSError(errno.EINVAL, "payload length differs")
        size = info.st_size - len(data)
        if size % fs_format.ALIGN or not 0 < size <= fs_format.MAX_HEADER_BYTES:
            raise _flaw_of(file.fd, info.st_size, block)
        region, payload = self._io.region(size), fs_format.Digest()
        got = self._io.read(file, 0, [region, data], payload.update)
        _, expected = fs_format.prove(region[: min(got, size)], block, info.st_size)
        if got != info.st_size:
            raise FormatError(Flaw.SHORT)
        fs_format.check_digest(payload.digest(), expected)

    def delete(self, folders: Folders, block_id: BlockId, *, corrupt: bool) -> None:
        """Unlink a block's file, or move it to the quarantine; none there is fine.

        Raises:
            OSError: it is still there.
        """
        # FileNotFound: gone already. NotADirectory: a link or file stands in the folder's place.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folders.of(block_id) as folder:
            if corrupt:
                self._quarantine.move(folders, folder, block_id)
                self._count("quarantined")
            else:
                os.unlink(fs_tree.file_name(block_id.key), dir_fd=folder)

    def probe(self, folders: Folders, block_id: BlockId) -> FoundBlock:
        """Prove a block by its header and size.

        Raises:
            FormatError: the file is not that block.
            OSError: it cannot be read; FileNotFoundError when there is none.
        """
        with folders.of(block_id) as folder:
            fd = os.open(fs_tree.file_name(block_id.key), READ, dir_fd=folder)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise FormatError(Flaw.FOREIGN)
            return found(read_header(fd, info.st_size), block_id)
        finally:
            os.close(fd)


def _flaw_of(fd: int, size: int, block: Block) -> FormatError:
    """Say what is wrong with a file whose size alone rules it out."""
    try:
        read_header(fd, size).check(block, size)
    except FormatError as error:
        return error
    return FormatError(Flaw.SHORT)


def read_header(fd: int, size: int) -> Header:
    """Prove the header and the size of a file that is open.

    Raises:
        FormatError: it does not prove itself.
    """
    start = os.pread(fd, fs_format.ALIGN, 0)
    length = fs_format.data_offset(start)
    if length > len(start):
        start += os.pread(fd, length - len(start), len(start))
    header = fs_format.decode(start)
    header.check_size(size)
    return header


def found(header: Header, block_id: BlockId) -> FoundBlock:
    """Return the block of a proved header, which must be ``block_id``'s; raises :class:`FormatError`."""
    if header.block.id != block_id:
        raise FormatError(Flaw.OTHER_BLOCK)
    return FoundBlock(header.block, header.data_offset + fs_format.aligned(header.block.payload_bytes))


def _touch(fd: int) -> None:
    """Record the use of a file, best effort; with our own clock, which is finer than the kernel's tick."""
    with contextlib.suppress(OSError):
        now = time.time_ns()
        os.utime(fd, ns=(now, now))


def publish(folder: int, name: str, fill: Callable[[int], None]) -> None:
    """Fill a temporary and rename it; on any error nothing of it stays.

    Raises:
        OSError: it was not written; an older file of the name is untouched.
    """
    fd, temporary = fs_tree.create_temporary(folder)
    try:
        try:
            fill(fd)
            _touch(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def write_all(parts: Sequence[bytes]) -> Callable[[int], None]:
    """Return a filler for :func:`publish` that writes these bytes."""

    def fill(fd: int) -> None:
        if os.writev(fd, parts) != sum(map(len, parts)):
            raise OSError(errno.EIO, "short write")

    return fill

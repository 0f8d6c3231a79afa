"""What ``kvtierd gc`` and ``kvtierd verify`` do to the root of a filesystem tier, without a daemon.

Looking is always allowed. Removing needs the root: nobody may hold it, or only daemons that share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtierd.core.model import BlockId
from kvtierd.edges.backends import fs_format, fs_segments, fs_tree
from kvtierd.edges.backends.fs_files import read_header
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.fs_lock import RootLock
from kvtierd.edges.backends.fs_slot_io import written_slots
from kvtierd.edges.backends.fs_tree import READ, Folders
from kvtierd.errors import TierError

Progress = Callable[[int, int], None]
"""Called with the blocks done and the blocks there seem to be."""


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """A namespace's content: its readable record (None: missing or not readable), blocks, allocated bytes."""

    namespace: str
    record: dict[str, object] | None
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """One block checked. ``place`` is a path below the root, with ``#slot`` for a packed block.

    ``flaw`` is None for a block that proved itself, payload included; ``id`` is what its name or header says.
    """

    place: str
    id: BlockId | None
    flaw: str | None
    bytes: int


def stale_temporaries(root: Path, *, remove: bool = False) -> list[str]:
    """Return the temporaries whose writers are provably dead, as paths below the root; remove them if asked.

    Raises:
        TierError: the root cannot be read; or ``remove`` and a daemon holds it alone.
    """
    with _opened(root, write=remove) as (folders, alone):
        return [
            f"{path}/{name}"
            for path, folder in _all_folders(folders)
            for name in sorted(os.listdir(folder))
            if name.startswith(fs_tree.TEMPORARY)
            and fs_tree.remove_stale_temporary(folder, name, alone=alone, dry=not remove)
        ]


def namespaces(root: Path) -> list[NamespaceReport]:
    """Return what each namespace holds.

    Raises:
        TierError: the root cannot be read.
    """
    with _opened(root) as (folders, _):
        return [_report(folders, name) for name in _namespace_names(folders)]


def remove_namespace(root: Path, namespace: str) -> None:
    """Remove a namespace with all its blocks; names that are not kvtierd's stay, and their folders.

    Raises:
        TierError: no such namespace, a daemon holds the root alone, or something could not be removed.
    """
    with _opened(root, write=True) as (folders, _):
        if not fs_tree.is_namespace(namespace) or namespace not in _namespace_names(folders):
            raise TierError(str(root), f"there is no namespace {namespace!r}")
        parent = folders.namespace(namespace)
        for name in _subfolders(parent):
            folder = fs_tree.open_folder(name, parent)
            try:
                for entry in os.listdir(folder):
                    if _is_ours(entry, name):
                        os.unlink(entry, dir_fd=folder)
            finally:
                os.close(folder)
            with contextlib.suppress(OSError):  # something foreign is in it
                os.rmdir(name, dir_fd=parent)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fs_tree.RECORD, dir_fd=parent)
        with contextlib.suppress(OSError):
            os.rmdir(namespace, dir_fd=folders.blocks())


def verify(root: Path, progress: Progress | None = None) -> Iterator[Verdict]:
    """Read every block and check all of it, as a read of the tier would; change nothing.

    A block of a living daemon may be replaced while it is read, so a flaw is looked at twice.

    Raises:
        TierError: the root cannot be read.
    """
    with _opened(root) as (folders, _):
        total = sum(_report(folders, name).blocks for name in _namespace_names(folders))
        done = 0
        for namespace in _namespace_names(folders):
            for shard in filter(fs_tree.is_shard, _subfolders(folders.namespace(namespace))):
                for verdict in _verify_files(folders, namespace, shard):
                    done += 1
                    if progress is not None:
                        progress(done, max(done, total))
                    yield verdict
            for verdict in _verify_segments(folders, namespace):
                done += 1
                if progress is not None:
                    progress(done, max(done, total))
                yield verdict


@contextlib.contextmanager
def _opened(root: Path, *, write: bool = False) -> Iterator[tuple[Folders, bool]]:
    """Open a root; the second value says whether nobody else can be writing there."""
    lock: RootLock | None = None
    try:
        with Folders(root, None) as folders:
            if write:
                lock = RootLock(folders.root, shared=True, sign=False)
            yield folders, lock is not None and lock.alone
    except OSError as error:
        hint = "; stop the daemon first" if isinstance(error, BlockingIOError) else ""
        raise TierError(str(root), f"{error.strerror}{hint}") from error
    finally:
        if lock is not None:
            lock.release()


def _namespace_names(folders: Folders) -> list[str]:
    try:
        return sorted(filter(fs_tree.is_namespace, os.listdir(folders.blocks())))
    except FileNotFoundError:
        return []


def _subfolders(parent: int) -> list[str]:
    """Return the names of the folders of blocks and segments in a namespace."""
    with os.scandir(parent) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
            and (fs_tree.is_shard(entry.name) or entry.name == fs_tree.PACKED)
        )


def _all_folders(folders: Folders) -> Iterator[tuple[str, int]]:
    """Yield every folder that temporaries may lie in, with its path below the root."""
    try:
        yield fs_tree.BLOCKS, folders.blocks()
    except FileNotFoundError:
        return
    for namespace in _namespace_names(folders):
        parent = folders.namespace(namespace)
        yield f"{fs_tree.BLOCKS}/{namespace}", parent
        for name in _subfolders(parent):
            folder = fs_tree.open_folder(name, parent)
            try:
                yield f"{fs_tree.BLOCKS}/{namespace}/{name}", folder
            finally:
                os.close(folder)


def _is_ours(entry: str, folder: str) -> bool:
    if entry.startswith(fs_tree.TEMPORARY):
        return True
    if folder == fs_tree.PACKED:
        return fs_tree.parse_segment(entry) is not None
    return fs_tree.is_block(entry, folder)


def _report(folders: Folders, namespace: str) -> NamespaceReport:
    parent = folders.namespace(namespace)
    blocks = size = 0
    for name in _subfolders(parent):
        folder = fs_tree.open_folder(name, parent)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _is_ours(entry.name, name) and entry.is_file(follow_symlinks=False):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if name == fs_tree.PACKED:
                            blocks += sum(1 for _ in _headers(folder, entry.name))
                        else:
                            blocks += not entry.name.startswith(fs_tree.TEMPORARY)
        finally:
            os.close(folder)
    return NamespaceReport(namespace, _record(parent), blocks, size)


def _record(parent: int) -> dict[str, object] | None:
    try:
        fd = os.open(fs_tree.RECORD, READ, dir_fd=parent)
        try:
            record = json.loads(os.read(fd, 1 << 20))
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _verify_files(folders: Folders, namespace: str, shard: str) -> Iterator[Verdict]:
    folder = fs_tree.open_folder(shard, folders.namespace(namespace))
    try:
        for name in sorted(os.listdir(folder)):
            key = fs_tree.parse_name(name)
            if key is None or not fs_tree.is_block(name, shard):
                continue
            block_id, place = BlockId(namespace, key), f"{fs_tree.BLOCKS}/{namespace}/{shard}/{name}"
            for attempt in (1, 2):
                try:
                    size = _check_file(folder, name, block_id)
                except FileNotFoundError:
                    break
                except (FormatError, OSError) as error:
                    if attempt == 2:
                        yield Verdict(place, block_id, _words(error), 0)
                else:
                    yield Verdict(place, block_id, None, size)
                    break
    finally:
        os.close(folder)


def _words(error: FormatError | OSError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


def _check_file(folder: int, name: str, block_id: BlockId) -> int:
    """Prove a whole file; return its allocated bytes; raises ``FormatError`` or ``OSError``."""
    fd = os.open(name, READ, dir_fd=folder)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise FormatError(Flaw.FOREIGN)
        header = read_header(fd, info.st_size)
        if header.block.id != block_id:
            raise FormatError(Flaw.OTHER_BLOCK)
        header.check_payload(os.pread(fd, header.block.payload_bytes, header.data_offset))
        return info.st_blocks * 512
    finally:
        os.close(fd)


_Slot = tuple[int, int, Header | FormatError]
"""A slot's number, its offset and what its header says."""


def _headers(folder: int, name: str) -> Iterator[_Slot]:
    """Yield the slots of a segment that are not empty."""
    slot_bytes = fs_tree.parse_segment(name)
    if slot_bytes is None:
        return
    segment = fs_segments.Segment(0, "", slot_bytes, name, exists=True)
    try:
        fd = os.open(name, READ, dir_fd=folder)
    except OSError:
        return
    try:
        for slot in written_slots(fd, segment):
            offset = segment.offset(slot)
            start = os.pread(fd, fs_format.ALIGN, offset)
            if start.strip(b"\0"):
                yield slot, offset, _header(fd, offset, start)
    finally:
        os.close(fd)


def _header(fd: int, offset: int, start: bytes) -> Header | FormatError:
    try:
        length = fs_format.data_offset(start)
        if length > len(start):
            start += os.pread(fd, length - len(start), offset + len(start))
        return fs_format.decode(start)
    except FormatError as error:
        return error


def _verify_segments(folders: Folders, namespace: str) -> Iterator[Verdict]:
    try:
        folder = folders.packed(namespace)
        names = sorted(name for name in os.listdir(folder) if fs_tree.parse_segment(name))
    except OSError:
        return
    for name in names:
        slot_bytes = fs_tree.parse_segment(name) or 0
        for slot, offset, _ in _headers(folder, name):
            place = f"{fs_tree.BLOCKS}/{namespace}/{fs_tree.PACKED}/{name}#{slot}"
            first = _check_slot(folder, name, offset, namespace, slot_bytes)
            again = _check_slot(folder, name, offset, namespace, slot_bytes) if first and first[1] else first
            if again is not None and (first is None or again[0] == first[0] or not again[1]):
                yield Verdict(place, again[0], again[1], slot_bytes)


def _check_slot(
    folder: int, name: str, offset: int, namespace: str, slot_bytes: int
) -> tuple[BlockId | None, str | None] | None:
    """Prove a whole slot: whose it is and what is wrong with it; None when it is empty now."""
    try:
        fd = os.open(name, READ, dir_fd=folder)
    except OSError:
        return None
    try:
        content = os.pread(fd, slot_bytes, offset)
    finally:
        os.close(fd)
    if not content[: fs_format.ALIGN].strip(b"\0"):
        return None
    try:
        header = fs_format.decode(content)
    except FormatError as error:
        return None, str(error)
    payload = content[header.data_offset : header.data_offset + header.block.payload_bytes]
    try:
        if header.block.namespace != namespace:
            raise FormatError(Flaw.OTHER_BLOCK)
        if header.data_offset + fs_format.aligned(header.block.payload_bytes) != slot_bytes:
            raise FormatError(Flaw.LENGTHS)
        header.check_payload(payload)
    except FormatError as error:
        return header.block.id, str(error)
    return header.block.id, None

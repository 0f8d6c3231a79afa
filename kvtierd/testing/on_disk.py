"""Where blocks lie below the root of a filesystem tier, found by what ``FORMAT.md`` says and nothing else.

For tests that break what a daemon wrote. It shares no code with the backend, so it checks the document too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtierd.core.model import BlockId, BlockKey, block_key, group_of, hash_of

MAGIC = b"\x89KVTIER\n"
_LENGTHS = struct.Struct("<8sHHIIIQ")
_METADATA = 48
_METADATA_MAX = 1 << 20
_PAGE = 4096
_SEGMENT_BYTES = 256 << 20
_SEGMENT = re.compile(r"(\d+)-[0-9a-f]{16}")
_BLOCK = re.compile(r"([0-9a-f]{2,128})\.(\d+)")


@dataclass(frozen=True, slots=True)
class Copy:
    """One block's header region (``header`` bytes) and payload, ``nbytes`` in all, at ``offset`` of a file.

    ``packed``: the file is a segment and holds other blocks as well.
    """

    key: BlockKey
    path: Path
    offset: int
    nbytes: int
    header: int
    packed: bool

    def read(self) -> bytes:
        """Return all bytes of the copy."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.nbytes)

    def write(self, data: bytes, at: int = 0) -> None:
        """Overwrite bytes in place, from byte ``at`` of the copy on; the file's length stays."""
        with self.path.open("r+b") as file:
            file.seek(self.offset + at)
            file.write(data)

    def flip(self, at: int) -> None:
        """Invert all bits of byte ``at`` of the copy."""
        self.write(bytes([self.read()[at] ^ 0xFF]), at)

    def cut(self, nbytes: int) -> None:
        """End the file after ``nbytes`` bytes of the copy; of a segment that cuts what comes behind, too."""
        os.truncate(self.path, self.offset + nbytes)

    def remove(self) -> None:
        """Take the copy away as another process might: its file, or all bytes of its slot."""
        if self.packed:
            self.write(bytes(self.nbytes))
        else:
            self.path.unlink()


def copies(root: Path, namespace: str) -> dict[BlockKey, Copy]:
    """Return every block of a namespace that has a readable header, by its key."""
    folder = root / "v1" / namespace
    found = [*_files(folder), *(copy for path in _segments(folder) for copy in _slots(path))]
    return {copy.key: copy for copy in found}


def _files(folder: Path) -> Iterator[Copy]:
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        name = _BLOCK.fullmatch(path.name)
        if name and name[1].endswith(path.parent.name) and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                start = file.read(_LENGTHS.size)
            header = _LENGTHS.unpack(start)[3] if len(start) == _LENGTHS.size else 0
            key = block_key(bytes.fromhex(name[1]), int(name[2]))
            yield Copy(key, path, 0, path.stat().st_size, header, packed=False)


def _segments(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("packed/*") if _SEGMENT.fullmatch(path.name) and path.is_file())


def _slots(path: Path) -> Iterator[Copy]:
    slot_bytes = int(path.name.partition("-")[0])
    slots = max(1, _SEGMENT_BYTES // slot_bytes)
    first = -(-8 * slots // _PAGE) * _PAGE
    with path.open("rb") as file:
        for slot in _written(file.fileno(), first, slot_bytes):
            offset = first + slot * slot_bytes
            start = os.pread(file.fileno(), _PAGE, offset)
            if start[:8] == MAGIC:
                _, _, _, header, length, _, payload = _LENGTHS.unpack_from(start)
                with contextlib.suppress(msgspec.DecodeError, KeyError):
                    metadata = os.pread(file.fileno(), min(length, _METADATA_MAX), offset + _METADATA)
                    fields = msgspec.msgpack.decode(metadata)
                    key = block_key(fields["hash"], fields["group"])
                    yield Copy(key, path, offset, header + payload, header, packed=True)


def _written(fd: int, first: int, slot_bytes: int) -> Iterator[int]:
    """Return the numbers of the slots that are no hole: a segment is sparse."""
    slot = 0
    while True:
        try:
            data = os.lseek(fd, first + slot * slot_bytes, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole, or the end
                return
            raise
        slot = max(slot, (data - first) // slot_bytes)
        yield slot
        slot += 1


def path_of(root: Path, block_id: BlockId) -> Path:
    """Return where a block that has a file of its own lies."""
    digest = hash_of(block_id.key).hex()
    return root / "v1" / block_id.namespace / digest[-2:] / f"{digest}.{group_of(block_id.key)}"


def files_in(root: Path) -> list[str]:
    """Return the paths of all files below ``root`` but the locks, relative to it, sorted."""
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
    return [name for name in names if name.rpartition("/")[2] != "lock"]

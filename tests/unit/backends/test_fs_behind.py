"""What is packed leaves the page cache once it is on the disk, also from slots that are used again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.edges.backends import fs_behind
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.fs_behind import WriteBehind
from kvtierd.edges.backends.fs_io import Io, cached_pages
from kvtierd.edges.backends.fs_segment_files import SegmentFiles
from kvtierd.edges.backends.fs_segments import Segment
from kvtierd.edges.backends.fs_tree import Folders
from kvtierd.testing.backend_kit import NAMESPACE, block, payload

SLOT = 64 << 10
PAGE = 4096


class Disk(Io):
    """Notes what is begun or dropped; ``late``: offsets of what is not on the disk yet."""

    def __init__(self) -> None:
        super().__init__("auto")
        self.late: set[int] = set()
        self.asked: list[int] = []

    def behind(self, fd: int, offset: int, length: int) -> None:
        self.asked.append(offset)

    def unwritten(self, fd: int, offset: int, length: int) -> int:
        return int(offset in self.late)


def can_drop(folder: Path) -> bool:
    """Whether the page cache lets go of what is written (not of a tmpfs), and says what it has."""
    with (folder / "probe").open("w+b", buffering=0) as file:
        file.write(bytes(PAGE))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, PAGE, os.POSIX_FADV_DONTNEED)
        return cached_pages(file.fileno(), 0, PAGE) == 0


@pytest.fixture
def files(root: Path) -> Iterator[SegmentFiles]:
    opened = FsBackend("disk", root)
    opened.open()
    with Folders(root, root.stat().st_dev) as folders, SegmentFiles(folders) as open_files:
        yield open_files
    opened.close()


@pytest.fixture
def segment() -> Segment:
    return Segment(0, NAMESPACE, SLOT, f"{SLOT}-{'a' * 16}", False)


def test_what_is_late_keeps_its_turn_and_what_comes_later_waits_for_it(
    files: SegmentFiles, segment: Segment
) -> None:
    disk = Disk()
    behind = WriteBehind(disk)
    disk.late = {1, 2, 3, 4}
    behind.begin(files, [(segment, 1, 1), (segment, 2, 1)])
    behind.begin(files, [(segment, 3, 1)])
    assert (disk.asked, len(behind)) == ([1, 2, 3], 3)
    disk.late = {2, 4}
    behind.begin(files, [(segment, 4, 1)])
    assert disk.asked[3:] == [4, 1], "the first is on the disk, the second is not"
    disk.late = set()
    behind.begin(files, [(segment, 5, 1)])
    assert disk.asked[5:] == [5, 2, 3], "twice as many as are begun, the oldest first"
    behind.begin(files, [(segment, 6, 1)])
    assert disk.asked[8:] == [6, 4, 5], "never what was begun just now"
    assert len(behind) == 1


def test_what_is_gone_or_too_much_is_forgotten(
    files: SegmentFiles, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_behind, "LIMIT", 4)
    disk, lost = Disk(), Segment(1, NAMESPACE, SLOT, f"{SLOT}-{'b' * 16}", False)
    removed = Segment(2, NAMESPACE, SLOT, f"{SLOT}-{'c' * 16}", True)  # said to be there, and is not
    behind = WriteBehind(disk)
    behind.begin(files, [(lost, 1, 1), (removed, 2, 1), (segment, 3, 1)])
    lost.lost = True
    behind.begin(files, [(segment, 4, 1), (segment, 5, 1)])
    assert (disk.asked, len(behind)) == ([1, 3, 4, 5, 3], 2)
    disk.late = {4}
    behind.begin(files, [(segment, number, 1) for number in range(6, 20)])
    assert len(behind) == 4


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_slot_that_is_used_again_is_not_kept_in_the_page_cache(root: Path, io: str) -> None:
    backend = FsBackend("disk", root, io=io)
    backend.open()
    if not can_drop(root):
        pytest.skip("this kernel or filesystem keeps what is on the disk in its cache, or does not tell")
    size = SLOT - PAGE
    data = memoryview(payload(1, size))

    def store(numbers: range) -> None:
        backend.write([Transfer(block(number, size=size), data) for number in numbers])
        for path in root.glob("v1/*/packed/*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def delete(numbers: range) -> None:
        backend.delete([block(number, size=size).id for number in numbers])

    for first in range(0, 160, 32):  # all but the first round has slots of the round before
        store(range(first, first + 32))
        if first:
            delete(range(first - 32, first))
    store(range(1000, 1001))
    cached = 0
    for path in root.glob("v1/*/packed/*"):
        with path.open("rb") as file:
            cached += cached_pages(file.fileno(), 0, path.stat().st_size) or 0
    pages = 64 * SLOT // PAGE
    assert cached < pages // 4 if io == "auto" else cached > pages // 2
    backend.close()

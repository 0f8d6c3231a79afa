"""What was written into segments leaves the page cache once it is on the disk.

A write-back that is begun takes a while, and pages that are not written yet cannot be dropped; so what was
begun is looked at again with later writes, the oldest first. ``RWF_DONTCACHE`` alone does not do: the kernel
drops pages of a slot that is written for the first time, and keeps those of one that is used again (seen with
ext4 and Linux 6.18).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from kvtierd.edges.backends.fs_format import FormatError
from kvtierd.edges.backends.fs_io import Io
from kvtierd.edges.backends.fs_segment_files import SegmentFiles
from kvtierd.edges.backends.fs_segments import Segment

LIMIT = 1 << 14
"""Ranges that are remembered; older ones are left to the kernel."""

Range = tuple[Segment, int, int]
"""A segment, an offset in it and a length."""


class WriteBehind:
    """Ranges of segments that are on their way to the disk; safe to call from several threads."""

    def __init__(self, io: Io) -> None:
        self._io = io
        self._begun: deque[Range] = deque(maxlen=LIMIT)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, files: SegmentFiles, ranges: Sequence[Range]) -> None:
        """Start the write-back of what a call wrote, and drop what is on the disk of what came before."""
        if self._io.mode != "auto":
            return
        for segment, offset, length in ranges:
            with contextlib.suppress(OSError, FormatError):
                self._io.behind(files.open(segment).fd, offset, length)
        with self._lock:
            self._begun.extend(ranges)
        self._drop(files, min(len(self._begun) - len(ranges), 2 * len(ranges)))

    def _drop(self, files: SegmentFiles, most: int) -> None:
        """Drop at most so many ranges; the first that is not on the disk yet ends it."""
        for _ in range(most):
            with self._lock:
                if not self._begun:
                    return
                segment, offset, length = oldest = self._begun.popleft()
            with contextlib.suppress(OSError, FormatError):
                if segment.lost:
                    continue
                fd = files.open(segment).fd
                if self._io.unwritten(fd, offset, length):
                    with self._lock:
                        self._begun.appendleft(oldest)
                    return
                self._io.behind(fd, offset, length)

"""The segments that a call has open."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from types import TracebackType

from kvtierd.edges.backends import fs_tree
from kvtierd.edges.backends.fs_format import Flaw, FormatError
from kvtierd.edges.backends.fs_io import File
from kvtierd.edges.backends.fs_segments import Segment
from kvtierd.edges.backends.fs_tree import Folders

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SegmentFiles:
    """The segments that one call has open; closed at its end, like :class:`Folders`.

    ``reading``: the call can do without writing, so that a filesystem that turned read-only still serves.
    """

    def __init__(self, folders: Folders, *, reading: bool = False) -> None:
        self.folders = folders
        self._reading = reading
        self._open: dict[int, File] = {}

    def __enter__(self) -> SegmentFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):
                os.close(file.fd)

    def __iter__(self) -> Iterator[File]:
        return iter(self._open.values())

    def open(self, segment: Segment) -> File:
        """Return the open segment; a new one is made.

        Raises:
            FileNotFoundError: somebody removed it.
            OSError, FormatError: it cannot be opened, or is no file.
        """
        file = self._open.get(segment.number)
        if file is None:
            new = not segment.exists
            folder = self.folders.packed(segment.namespace, create=new)
            fd = self._descriptor(segment.name, folder, new)
            file = self._open[segment.number] = File(fd)
            if not stat.S_ISREG((info := os.fstat(fd)).st_mode):
                raise FormatError(Flaw.FOREIGN)
            if new and info.st_size == 0:  # XFS would allocate in advance behind the end of a file that grows
                os.ftruncate(fd, segment.offset(segment.slots))
            segment.exists = True
        return file

    def _descriptor(self, name: str, folder: int, new: bool) -> int:
        try:
            return os.open(name, _FLAGS | (os.O_CREAT if new else 0), 0o660, dir_fd=folder)
        except OSError as error:
            if not self._reading or error.errno != errno.EROFS:
                raise
        return os.open(name, fs_tree.READ, dir_fd=folder)

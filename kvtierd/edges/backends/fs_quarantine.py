"""Keeps the newest corrupt blocks of a filesystem tier for a person to look at, within a bound of bytes."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from kvtierd.core.model import BlockId
from kvtierd.edges.backends import fs_tree
from kvtierd.edges.backends.fs_tree import Folders


class Quarantine:
    """Holds at most ``keep`` files of together at most ``max_bytes`` (allocated) bytes."""

    def __init__(self, keep: int, max_bytes: int = 64 << 20) -> None:
        self._keep = keep
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def limit(self, max_bytes: int) -> None:
        """Change the bound; it takes effect with the next :meth:`move` or :meth:`trim`."""
        self._max_bytes = max_bytes

    def move(self, folders: Folders, folder: int, block_id: BlockId) -> None:
        """Move a block's file aside and drop the oldest; without room to move it, unlink it.

        Raises:
            OSError: neither could be done; FileNotFoundError when there is no such file.
        """
        name = fs_tree.file_name(block_id.key)
        with self._lock:
            try:
                size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks * 512
                aside = folders.quarantine()
                if not self._make_room(aside, size):
                    os.unlink(name, dir_fd=folder)
                    return
                os.rename(name, _target(block_id), src_dir_fd=folder, dst_dir_fd=aside)
            except FileNotFoundError:
                raise
            except OSError:
                os.unlink(name, dir_fd=folder)

    def keep(self, folders: Folders, block_id: BlockId, content: bytes) -> None:
        """Keep a copy of bytes that failed, best effort."""
        with self._lock, contextlib.suppress(OSError):
            aside = folders.quarantine()
            if self._make_room(aside, len(content) + fs_tree.PAGE):
                name = _target(block_id)
                fd = fs_tree.create_file(aside, name)
                try:
                    if os.write(fd, content) != len(content):
                        os.unlink(name, dir_fd=aside)
                finally:
                    os.close(fd)

    def trim(self, folders: Folders) -> None:
        """Come down to the bounds, best effort."""
        with self._lock, contextlib.suppress(OSError):
            self._make_room(folders.quarantine(), 0, 0)

    def _make_room(self, aside: int, size: int, files: int = 1) -> bool:
        """Drop the oldest until ``size`` more bytes and ``files`` more files fit; say whether they do."""
        if size > self._max_bytes or files > self._keep:
            return False
        names = sorted(name for name in os.listdir(aside) if fs_tree.is_namespace(name[21:53]))
        sizes = [os.stat(name, dir_fd=aside, follow_symlinks=False).st_blocks * 512 for name in names]
        total, count = sum(sizes) + size, len(names) + files
        for name, freed in zip(names, sizes, strict=True):
            if total <= self._max_bytes and count <= self._keep:
                break
            os.unlink(name, dir_fd=aside)
            total -= freed
            count -= 1
        return total <= self._max_bytes and count <= self._keep


def _target(block_id: BlockId) -> str:
    return f"{time.time_ns():020d}.{block_id.namespace}.{fs_tree.file_name(block_id.key)}"

"""What a call may take of a filesystem that others use as well."""

from __future__ import annotations

import os

from kvtierd.edges.backends.fs_tree import Folders


class Room:
    """What a call's writes may take of the filesystem's free bytes."""

    def __init__(self, folders: Folders, min_free: int | None) -> None:
        self._left: int | None = None
        if min_free is not None:
            info = os.fstatvfs(folders.root)
            self._left = info.f_bavail * info.f_frsize - min_free

    def take(self, size: int) -> bool:
        """Take ``size`` bytes, or say that ``min_free`` forbids it."""
        if self._left is None:
            return True
        if size > self._left:
            return False
        self._left -= size
        return True

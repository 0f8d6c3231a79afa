"""From errors of the system to outcomes with a reason that people understand."""

from __future__ import annotations

import contextlib
import errno
import os

from kvtierd.core.stimuli import Status

_WORDS = {
    errno.ENOSPC: "the filesystem is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the filesystem is read-only",
    errno.EACCES: "no permission for a file or folder below the root",
    errno.EPERM: "not permitted below the root",
    errno.EIO: "the device reports an error",
    errno.EMFILE: "this process has too many open files; raise its limit",
    errno.ENFILE: "the system has too many open files",
    errno.ENOLCK: "the system has no more locks",
    errno.EBUSY: "in use by another process",
}


def describe(error: OSError, root: int | None = None) -> str:
    """Return the error's code and what it means here; ``root``, open, tells what exactly is full."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    if error.errno in (errno.ESTALE, errno.EBUSY, errno.EINVAL):  # ours mostly, with words of their own
        return f"{code}: {error.strerror}"
    if error.errno == errno.ENOSPC and root is not None:
        with contextlib.suppress(OSError):
            if os.fstatvfs(root).f_favail == 0 < os.fstatvfs(root).f_files:
                return f"{code}: the filesystem has no free inodes"
    return f"{code}: {_WORDS.get(error.errno or 0, error.strerror)}"


def status(error: OSError, *, reading: bool) -> Status:
    """Return how a block's operation ended that raised this."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and not reading:
        return Status.FULL
    if reading and error.errno == errno.ENOENT:
        return Status.GONE
    if reading and error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link or file in the way: not ours
        return Status.CORRUPT
    return Status.FAILED

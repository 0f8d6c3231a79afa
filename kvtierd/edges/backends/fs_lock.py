"""Who may write below a root: one daemon alone, or several that all run with ``shared: true``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time

from kvtierd.edges.backends import fs_tree

WAIT_SECONDS = 2.0


class RootLock:
    """A ``flock`` on ``<root>/lock``: exclusive, or shared among daemons that share the root.

    It ends with its process, however that ends. ``held`` is false where the filesystem has no locks.
    """

    def __init__(self, root: int, *, shared: bool, sign: bool = True, wait: float | None = None) -> None:
        """Take the lock of the root with this descriptor; ``sign``: leave a word in it for people.

        ``wait``: for how many seconds to try (``None``: ``WAIT_SECONDS``).

        Raises:
            BlockingIOError: another process has it (EBUSY).
            OSError: the lock file cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(fs_tree.LOCK, flags, 0o660, dir_fd=root)
        self.alone = self.held = False
        self._supported = True
        try:
            self._take(shared, WAIT_SECONDS if wait is None else wait)
            if not self.held and self._supported:
                raise BlockingIOError(errno.EBUSY, f"it is in use by {self._owner()}")
            if self.held and sign:
                self._sign()
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, shared: bool, wait: float) -> None:
        """Try for a while: a daemon that shares the root begins alone, and one that ends takes a moment."""
        deadline = time.monotonic() + wait
        while self._supported and not self.held:
            self.alone = self._try(fcntl.LOCK_EX)
            self.held = self.alone or (shared and self._try(fcntl.LOCK_SH))
            if not self.held and time.monotonic() > deadline:
                return
            if not self.held:
                time.sleep(0.01)

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self._supported = False
            return False
        return True

    def share(self) -> None:
        """Let others in that share the root."""
        if self.held:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.alone = False

    def release(self) -> None:
        """Give the lock up."""
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _sign(self) -> None:
        """Leave a word for people in the file, best effort: nothing reads it but :meth:`_owner`."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def _owner(self) -> str:
        with contextlib.suppress(OSError):
            text = os.pread(self._fd, 200, 0).decode("utf-8", "replace").strip()
            return text if text.isprintable() and text else "another process"
        return "another process"

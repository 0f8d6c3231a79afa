"""Liveness descriptors: how the daemon learns that a process can touch the pool no more.

Each attach hands over the write end of a pipe together with the pool. No one ever writes; the kernel closes
the last write end when the process is gone, and the read end here hangs up. That works across containers,
where pids are not visible.

Where the pool outlives the daemon the pipes have names, so that the next daemon can open the read ends again:
of a pipe without a writer its process is gone, or was never given the pool.

A pipe says what its holder says, and a careless holder may close it while it still maps the pool. Where the
kernel gives a descriptor of the peer's process (``SO_PEERPIDFD``, Linux 6.5), that one has to agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h


class Liveness:
    """The watched pipes of all processes that mapped the pool.

    A process may hold several (one for each attach) and may close all but one of them: it is dead when the
    last one hung up. ``folder``: where the pipes have names; it is made when there is none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        died: Callable[[bytes], None],
        folder: Path | None = None,
    ) -> None:
        self._loop = loop
        self._died = died
        self._folder = folder
        self._pipes: dict[bytes, set[int]] = {}
        self._paths: dict[int, Path] = {}
        self._names = itertools.count()
        self._vouched: dict[bytes, int] = {}
        """Process to a descriptor of it (a pidfd), as long as it lives."""
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)

    def __len__(self) -> int:
        return len(self._pipes)

    @property
    def pipes(self) -> int:
        """How many pipes and processes are watched; each is a descriptor here."""
        return sum(map(len, self._pipes.values())) + len(self._vouched)

    def find(self, processes: Iterable[bytes]) -> None:
        """Watch again what an earlier daemon handed to these processes; pipes of others are removed.

        Those that are gone are reported dead in the next round of the loop.
        """
        assert self._folder is not None
        named = {_name(process): process for process in processes}
        for path in list(self._folder.iterdir()):
            process = named.get(path.name.partition(".")[0])
            if process is None or not self._watch_again(process, path):
                path.unlink(missing_ok=True)
        for process in named.values():
            self.not_handed_out(process)

    def _watch_again(self, process: bytes, path: Path) -> bool:
        """Open a named pipe; ``False`` when nobody has its other end."""
        read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.suppress(BlockingIOError):
            while os.read(read_end, 4096):
                pass  # somebody wrote, which means nothing
            os.close(read_end)
            return False
        self._watch(process, read_end, path)
        return True

    def hand_out(self, process: bytes, peer: socket.socket | None = None) -> int:
        """Return a write end to pass to the process; the caller closes it after passing.

        ``peer``: the connection to it.

        Raises:
            OSError: no descriptor is left; a process that has no other pipe is reported as dead, since it
                cannot be given the pool.
        """
        try:
            read_end, write_end, path = self._make(process)
        except OSError:
            self.not_handed_out(process)
            raise
        self._watch(process, read_end, path)
        if peer is not None and process not in self._vouched:
            with contextlib.suppress(OSError):  # an older kernel, or no descriptor is left
                pidfd = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
                self._vouched[process] = pidfd
                self._loop.add_reader(pidfd, self._exited, process)
        return write_end

    def _make(self, process: bytes) -> tuple[int, int, Path | None]:
        if self._folder is None:
            return *os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK), None
        while True:
            path = self._folder / f"{_name(process)}.{next(self._names)}"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
                break
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        try:
            read_end = os.open(path, os.O_RDONLY | flags)
            try:
                return read_end, os.open(path, os.O_WRONLY | flags), path
            except OSError:
                os.close(read_end)
                raise
        except OSError:
            path.unlink()
            raise

    def _watch(self, process: bytes, read_end: int, path: Path | None) -> None:
        self._pipes.setdefault(process, set()).add(read_end)
        if path is not None:
            self._paths[read_end] = path
        self._loop.add_reader(read_end, self._readable, process, read_end)

    def not_handed_out(self, process: bytes) -> None:
        """Note that a process which attached was not given the pool: without any pipe it counts as dead."""
        self._loop.call_soon(self._report_unwatched, process)

    def _report_unwatched(self, process: bytes) -> None:
        if process not in self._pipes and process not in self._vouched:
            self._died(process)

    def _readable(self, process: bytes, read_end: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(read_end, 64):
                return  # somebody wrote, which means nothing
            self._drop(process, read_end)
            if not self._pipes[process]:
                del self._pipes[process]
                self._report_unwatched(process)

    def _exited(self, process: bytes) -> None:
        self._unvouch(process)
        self._report_unwatched(process)

    def _unvouch(self, process: bytes) -> None:
        pidfd = self._vouched.pop(process)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    def _drop(self, process: bytes, read_end: int, *, forget: bool = True) -> None:
        self._pipes[process].discard(read_end)
        self._loop.remove_reader(read_end)
        os.close(read_end)
        path = self._paths.pop(read_end, None)
        if path is not None and forget:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop watching; pipes with names stay for the next daemon."""
        for process, pipes in self._pipes.items():
            for read_end in list(pipes):
                self._drop(process, read_end, forget=False)
        self._pipes.clear()
        for process in list(self._vouched):
            self._unvouch(process)


def _name(process: bytes) -> str:
    """Return a file name for a process, whatever it calls itself."""
    return hashlib.blake2b(process, digest_size=16).hexdigest()

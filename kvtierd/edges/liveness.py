"""Liveness descriptors: how the daemon learns that a process can touch the pool no more.

Each attach hands over the write end of a pipe together with the pool. No one ever writes; the kernel closes
the last write end when the process is gone, and the read end here hangs up. That works across containers,
where pids are not visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable


class Liveness:
    """The watched pipes of all processes that mapped the pool.

    A process may hold several (one for each attach) and may close all but one of them: it is dead when the
    last one hung up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, died: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._died = died
        self._pipes: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._pipes)

    @property
    def pipes(self) -> int:
        """How many pipes are watched; each is a descriptor here."""
        return sum(map(len, self._pipes.values()))

    def hand_out(self, process: bytes) -> int:
        """Return a write end to pass to the process; the caller closes it after passing.

        Raises:
            OSError: no descriptor is left; a process that has no other pipe is reported as dead, since it
                cannot be given the pool.
        """
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            self.not_handed_out(process)
            raise
        self._pipes.setdefault(process, set()).add(read_end)
        self._loop.add_reader(read_end, self._readable, process, read_end)
        return write_end

    def not_handed_out(self, process: bytes) -> None:
        """Note that a process which attached was not given the pool: without any pipe it counts as dead."""
        self._loop.call_soon(self._report_unwatched, process)

    def _report_unwatched(self, process: bytes) -> None:
        if process not in self._pipes:
            self._died(process)

    def _readable(self, process: bytes, read_end: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(read_end, 64):
                return  # somebody wrote, which means nothing
            self._drop(process, read_end)
            if not self._pipes[process]:
                del self._pipes[process]
                self._died(process)

    def _drop(self, process: bytes, read_end: int) -> None:
        self._pipes[process].discard(read_end)
        self._loop.remove_reader(read_end)
        os.close(read_end)

    def close(self) -> None:
        """Stop watching."""
        for process, pipes in self._pipes.items():
            for read_end in list(pipes):
                self._drop(process, read_end)
        self._pipes.clear()

"""Liveness descriptors: how the daemon learns that a process can touch the pool no more.

Each attach hands over the write end of a pipe together with the pool. No one ever writes; the kernel closes
the last write end when the process is gone, and the read end here hangs up. That works across containers,
where pids are not visible.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class Liveness:
    """One watched pipe for each process that mapped the pool."""

    def __init__(self, loop: asyncio.AbstractEventLoop, died: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._died = died
        self._pipes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._pipes)

    def hand_out(self, process: bytes) -> int:
        """Return a write end to pass to the process; the caller closes it after passing.

        A process that attaches again gets a new pipe; the old one says nothing that the new one does not.
        """
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._drop(process)
        self._pipes[process] = read_end
        self._loop.add_reader(read_end, self._hung_up, process, read_end)
        return write_end

    def _hung_up(self, process: bytes, read_end: int) -> None:
        try:
            if os.read(read_end, 64):
                return  # somebody wrote, which means nothing
        except BlockingIOError:
            return
        except OSError:
            pass
        if self._pipes.get(process) == read_end:
            self._drop(process)
            self._died(process)

    def _drop(self, process: bytes) -> None:
        read_end = self._pipes.pop(process, None)
        if read_end is not None:
            self._loop.remove_reader(read_end)
            os.close(read_end)

    def close(self) -> None:
        """Stop watching."""
        for process in list(self._pipes):
            self._drop(process)

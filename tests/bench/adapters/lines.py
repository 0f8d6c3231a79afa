"""JSON lines between the driver and one adapter. Standard library only: it runs in each rival's environment.

A request is ``{"do": NAME, ...arguments}``; the answer is ``{"ok": RESULT}`` or ``{"error": TEXT}``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# Libraries print: what they say goes to the log, the answers to the pipe that was standard output.
_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def serve(subject: Any) -> None:
    """Answer requests with the methods of ``subject`` until the driver hangs up; then close it."""
    is_open = False
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            is_open = is_open or name == "open"
            answer = {"ok": getattr(subject, name)(**request)}
            is_open = is_open and name != "close"
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _answers.write(json.dumps(answer) + "\n")
    if is_open:
        subject.close()


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cost(call: Callable[[], object]) -> tuple[float, float]:
    """Return a call's wall time, and the processor time of all threads of this process, in seconds."""
    cpu = time.process_time()
    wall = timed(call)
    return wall, time.process_time() - cpu


class Memory:
    """Page-aligned memory that is touched: ``count`` blocks to store, and as many to load into.

    ``shared``: a file with both, to be mapped instead of memory of its own.
    """

    def __init__(self, block_bytes: int, count: int, shared: str = "") -> None:
        self.block_bytes, self.count = block_bytes, count
        self.bytes = block_bytes * count
        if shared:
            with open(shared, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 2 * self.bytes)
        else:
            self._map = mmap.mmap(-1, 2 * self.bytes)
        self.view = memoryview(self._map)
        for i in range(0 if shared else count):
            self.source(i)[:] = os.urandom(block_bytes)
            self.target(i)[:] = bytes(block_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def source(self, number: int) -> memoryview:
        return self.view[number * self.block_bytes : (number + 1) * self.block_bytes]

    def target(self, number: int) -> memoryview:
        return self.source(self.count + number)

    def wrong(self) -> int:
        """Return how many loaded blocks are not what was stored, and wipe them."""
        count = 0
        for i in range(self.count):
            count += bytes(self.source(i)) != bytes(self.target(i))
            self.target(i)[:] = bytes(self.block_bytes)
        return count


def key(round_number: int, number: int) -> bytes:
    """Return 32 bytes that look like a block's hash, another for each round."""
    return hashlib.sha256(b"%d %d" % (round_number, number)).digest()


def batches(count: int, threads: int, most: int = 16) -> list[range]:
    """Cut blocks into jobs as kvtierd's mover does: enough for all threads, at most ``most`` blocks each."""
    size = min(most, -(-count // threads))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]

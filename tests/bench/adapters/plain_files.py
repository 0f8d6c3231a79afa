"""What the machine can do: a thread pool that writes and reads one plain file a block, nothing checked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lines


class Files:
    def open(
        self, folder: str, block_bytes: int, count: int, threads: int, direct: bool, memory: str
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True)
        self.memory = lines.Memory(block_bytes, count, memory)
        self.flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self.jobs = lines.batches(count, threads)
        self.pool = ThreadPoolExecutor(threads)
        self.round = 0

    def store(self) -> tuple[float, float]:
        self.round += 1
        return lines.cost(lambda: self._all(self._write))

    def load(self) -> tuple[float, float]:
        return lines.cost(lambda: self._all(self._read))

    def wrong(self) -> int:
        return self.memory.wrong()

    def wipe(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def close(self) -> None:
        self.pool.shutdown()
        shutil.rmtree(self.folder)

    def _all(self, act: Callable[[int], None]) -> None:
        def job(numbers: range) -> None:
            for number in numbers:
                act(number)

        for _ in self.pool.map(job, self.jobs):
            pass

    def _write(self, number: int) -> None:
        path = self.folder / f"{self.round}-{number}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.flags, 0o600)
        try:
            if os.pwrite(fd, self.memory.source(number), 0) != self.memory.block_bytes:
                raise OSError("short write")
        finally:
            os.close(fd)

    def _read(self, number: int) -> None:
        fd = os.open(self.folder / f"{self.round}-{number}", os.O_RDONLY | self.flags)
        try:
            if os.preadv(fd, [self.memory.target(number)], 0) != self.memory.block_bytes:
                raise OSError("short read")
        finally:
            os.close(fd)


if __name__ == "__main__":
    lines.serve(Files())

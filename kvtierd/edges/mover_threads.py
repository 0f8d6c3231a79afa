"""Threads of a mover over two queues: work, and background work that never keeps work waiting for long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvtierd.edges.mover_work import Chunk


class Threads:
    """``count`` threads that ``run`` one chunk at a time; the mover bounds what goes in.

    Background chunks are begun only when no other waits, and by at most half of the threads (at least one).

    Not ``ThreadPoolExecutor``: its threads are joined at the interpreter's exit, which a stalled mount would
    then block for ever. These are daemon threads.
    """

    def __init__(
        self, name: str, count: int, run: Callable[[Chunk], None], clock: Callable[[], float]
    ) -> None:
        self.count = count
        self.stuck: set[Chunk] = set()
        """Chunks past the deadline, each with a thread of its own; owned by the loop's thread."""
        self._run = run
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Chunk] = deque()
        self._background: deque[Chunk] = deque()
        self._background_running = 0
        self._background_limit = max(1, count // 2)
        self._running: set[Chunk] = set()
        self._ending = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stalled(self) -> bool:
        """Whether no thread is left that could begin anything."""
        return len(self.stuck) >= self.count

    @property
    def background_stalled(self) -> bool:
        """Whether no thread is left that could begin background work."""
        return sum(chunk.is_background for chunk in self.stuck) >= self._background_limit

    def put(self, chunks: Iterable[Chunk]) -> None:
        """Queue chunks."""
        with self._changed:
            for chunk in chunks:
                (self._background if chunk.is_background else self._waiting).append(chunk)
                self._changed.notify()

    def running(self) -> list[Chunk]:
        """Return the chunks that have begun and not ended."""
        with self._changed:
            return [chunk for chunk in self._running if chunk.ended is None]

    def withdraw(self, which: Callable[[Chunk], bool]) -> list[Chunk]:
        """Take chunks out that no thread has begun; they never will be."""
        taken: list[Chunk] = []
        with self._changed:
            for queue in (self._waiting, self._background):
                if any(map(which, queue)):
                    kept = [chunk for chunk in queue if not which(chunk)]
                    taken += [chunk for chunk in queue if which(chunk)]
                    queue.clear()
                    queue.extend(kept)
        return taken

    def stop(self) -> None:
        """Let each thread end once nothing is queued."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _next(self) -> Chunk | None:
        """Return the chunk to begin now, marked as running; None when there is none for this thread."""
        chunk = None
        if self._waiting:
            chunk = self._waiting.popleft()
        elif self._background and self._background_running < self._background_limit:
            chunk = self._background.popleft()
            self._background_running += 1
        if chunk is not None:
            chunk.began = self._clock()
            self._running.add(chunk)
        return chunk

    def _take(self, done: Chunk | None) -> Chunk | None:
        """Wait for a chunk; None when the thread has to end."""
        with self._changed:
            if done is not None:
                self._running.discard(done)
                self._background_running -= done.is_background
            while (chunk := self._next()) is None:
                # A queued background chunk above the limit is begun by the thread that frees its place.
                if self._ending:
                    return None
                self._changed.wait()
            return chunk

    def _work(self) -> None:
        chunk: Chunk | None = None
        while (chunk := self._take(chunk)) is not None:
            self._run(chunk)

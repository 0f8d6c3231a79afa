"""Reads many folders of block files: the first ones here, the rest, if there are many, in processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtierd.edges.backends.fs_scan_worker import FolderContent, read_folder
from kvtierd.edges.backends.fs_tree import Folders
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

FEW_FILES = 20_000
"""So many are read faster than processes start."""
_END_SECONDS = 5.0
_AHEAD = 3
_PIPE_BYTES = 1 << 20

Folder = tuple[str, str]
"""Namespace and name of the folder in it."""


class FolderReader:
    """Reads each folder once, in any order; ``processes`` 0 reads all of them here."""

    def __init__(self, root: Path, device: int | None, processes: int | None = None) -> None:
        self._root = root
        self._device = device
        # More than cores: with a cold cache each waits for the disk.
        self._processes = min(8, max(4, os.cpu_count() or 1)) if processes is None else processes
        self._decoder: msgspec.msgpack.Decoder[FolderContent] = msgspec.msgpack.Decoder(FolderContent)
        self._left: deque[Folder] = deque()
        self._done: queue.SimpleQueue[tuple[Folder, FolderContent] | None] = queue.SimpleQueue()

    def read(self, wanted: list[Folder]) -> Iterator[tuple[Folder, FolderContent]]:
        """Yield what each folder holds.

        Raises:
            OSError: the root cannot be opened.
        """
        self._left.extend(wanted)
        yield from self._read_here(FEW_FILES if self._processes else sys.maxsize)
        if self._left:
            yield from self._read_there()
            yield from self._read_here(sys.maxsize)  # what processes left that could not be started, or died

    def _read_here(self, files: int) -> Iterator[tuple[Folder, FolderContent]]:
        if not self._left:
            return
        with Folders(self._root, self._device) as folders:
            while self._left and files > 0:
                folder = self._left.popleft()
                content = read_folder(folders, *folder)
                files -= len(content.proved)
                yield folder, content

    def _read_there(self) -> Iterator[tuple[Folder, FolderContent]]:
        workers = [worker for worker in (self._start() for _ in range(self._processes)) if worker is not None]
        threads = [
            threading.Thread(target=self._feed, args=(worker,), name="scan-feed", daemon=True)
            for worker in workers
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                done = self._done.get()
                if done is None:
                    running -= 1
                else:
                    yield done
        finally:
            if running:  # broken off: nothing more to do for anybody
                self._left.clear()
            for worker in workers:
                _end(worker)

    def _start(self) -> subprocess.Popen[bytes] | None:
        arguments = [str(self._root), str(self._device)]
        module = "kvtierd.edges.backends.fs_scan_worker"
        try:
            worker = subprocess.Popen(  # noqa: S603 - our own module, in this interpreter
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=1 << 16,
            )
        except OSError as error:
            log.info("scan: no process of its own: %s", error, extra=event("scan_in_process"))
            return None
        with contextlib.suppress(OSError):  # room for a folder's answer, so that no process waits for us
            assert worker.stdout is not None
            fcntl.fcntl(worker.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return worker

    def _feed(self, worker: subprocess.Popen[bytes]) -> None:
        """Keep a process busy until no folder is left, or it fails; what it did not answer is put back.

        It has its next folder while its answer is taken in: this thread may have to wait for the interpreter.
        """
        asked: deque[Folder] = deque()
        try:
            while self._ask(worker, asked) or asked:
                content = _answer(worker, self._decoder)
                self._done.put((asked.popleft(), content))
        except (OSError, ValueError, EOFError, msgspec.MsgspecError):
            self._left.extend(asked)
        finally:
            self._done.put(None)

    def _ask(self, worker: subprocess.Popen[bytes], asked: deque[Folder]) -> bool:
        assert worker.stdin is not None
        while len(asked) < _AHEAD:
            try:
                asked.append(self._left.popleft())
            except IndexError:
                return False
            worker.stdin.write(f"{asked[-1][0]} {asked[-1][1]}\n".encode("ascii"))
            worker.stdin.flush()
        return True


def _answer(
    worker: subprocess.Popen[bytes], decoder: msgspec.msgpack.Decoder[FolderContent]
) -> FolderContent:
    assert worker.stdout is not None
    size = int.from_bytes(_exactly(worker.stdout, 4), "little")
    return decoder.decode(_exactly(worker.stdout, size))


def _exactly(stream: object, size: int) -> bytes:
    data: bytes = stream.read(size)  # type: ignore[attr-defined]
    if len(data) != size:
        raise EOFError
    return data


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End a process of ours and close its pipes."""
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        worker.wait(0.5)
    except subprocess.TimeoutExpired:
        worker.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a stalled mount
            worker.wait(_END_SECONDS)

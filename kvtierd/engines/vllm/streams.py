# mypy: disable-error-code="import-not-found,import-untyped"
"""Copies on side streams: ordered after what was computed, ended by events, never waited for within a step.

Each direction has a stream of its own. A job first waits, on its stream, for all that the compute stream was
given until then: a store sees what was computed, and a load overwrites nothing that is still being read. Its
end event is polled. What an :class:`Accelerator` is, is in :mod:`kvtierd.engines.vllm.cuda`; tests have one
whose streams run when they are told to.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvtierd.engines.vllm.copies import Piece

logger = logging.getLogger(__name__)

REGISTER_CHUNK = 16 << 30
"""Bytes pinned by one call of the driver: it may refuse very large ones."""

Addresses = np.ndarray[Any, np.dtype[np.int64]]


class Accelerator(Protocol):
    """What the copies need of a device. Streams and events are used as torch's are."""

    def stream(self) -> Any:
        """Make a side stream."""

    def event(self) -> Any:
        """Make an event with timing."""

    def current_stream(self) -> Any:
        """Return the stream that the engine computes on."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give the stream what is called meanwhile."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin host memory for fast copies; returns what went wrong, "" for nothing."""

    def unregister(self, address: int) -> None:
        """End a registration."""

    @property
    def batch(self) -> Callable[..., None] | None:
        """Return vLLM's ``swap_blocks_batch``, which copies between addresses in one call, if any."""


@dataclass(slots=True)
class _Running:
    job: int
    start: Any
    end: Any
    kept: object = None  # what must not go before the copy has ended
    ok: bool = True


class Registration:
    """Host memory pinned for a device, in chunks; without it copies still work, only slower.

    ``background`` pins on a thread: pinning takes about a second for each 10 GiB, and an engine that follows
    its daemon to a new pool must not stand still for that.
    """

    def __init__(self, device: Accelerator, pool: torch.Tensor, *, background: bool) -> None:
        self._device = device
        self._pool = pool  # the mapping must not go while it is being pinned
        self._address, self._nbytes = pool.data_ptr(), pool.numel()
        self._chunks: list[int] = []
        self._closed = False
        self._running = True
        self._lock = threading.Lock()
        if background:
            threading.Thread(target=self._run, name="kvtierd-pin", daemon=True).start()
        else:
            self._run()

    @property
    def pinned(self) -> bool:
        """Whether all of the memory is pinned."""
        with self._lock:
            return not self._running and bool(self._chunks)

    def close(self) -> None:
        """Unpin; no copy is running."""
        with self._lock:
            self._closed = True
            if not self._running:
                self._unregister()

    def _run(self) -> None:
        problem = ""
        for start in range(0, self._nbytes, REGISTER_CHUNK):
            with self._lock:
                if self._closed:
                    break
            size = min(REGISTER_CHUNK, self._nbytes - start)
            problem = self._device.register(self._address + start, size)
            if problem:
                break
            self._chunks.append(self._address + start)
        with self._lock:
            self._running = False
            if problem or self._closed:
                self._unregister()
        if problem:
            logger.warning(
                "kvtierd: the pool of %d bytes cannot be pinned for the device (%s): copies use pageable"
                " memory and are slower; raise the memlock limit or lower pool.bytes",
                self._nbytes,
                problem,
            )

    def _unregister(self) -> None:
        chunks, self._chunks = self._chunks, []
        for address in chunks:
            self._device.unregister(address)


class StreamCopier:
    """The copier of a device with streams (see :class:`kvtierd.engines.vllm.copies.Copier`)."""

    later = True

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._out, self._in = device.stream(), device.stream()
        self._running: deque[_Running] = deque()
        self._events: list[Any] = []
        self._pool: torch.Tensor | None = None
        self._registration: Registration | None = None
        self._retired: list[Registration] = []
        self._mapped_before = False

    @property
    def pinned(self) -> bool:
        """Whether the pool in use is pinned for the device."""
        return self._registration is not None and self._registration.pinned

    def map(self, pool: memoryview) -> None:
        """Use this mapping and pin it; the first one before this returns."""
        # torch.frombuffer(mmap) does not hold the mapping; the memoryview's export does.
        self._pool = torch.frombuffer(pool, dtype=torch.int8)
        self._registration = Registration(self._device, self._pool, background=self._mapped_before)
        self._mapped_before = True

    def store(self, job: int, pieces: Sequence[Piece]) -> None:
        """Start device to host."""
        self._submit(job, pieces, self._out, to_pool=True)

    def load(self, job: int, pieces: Sequence[Piece]) -> None:
        """Start host to device."""
        self._submit(job, pieces, self._in, to_pool=False)

    def finished(self) -> Sequence[tuple[int, float, bool]]:
        """Poll the end events; both streams' jobs share one queue, looked through as a whole."""
        if not self._running:
            return ()
        done = [running for running in self._running if running.end.query()]
        ended = []
        for running in done:
            self._running.remove(running)
            ended.append((running.job, running.start.elapsed_time(running.end) * 1e-3, running.ok))
            self._events += (running.start, running.end)
        self._release_retired()
        return ended

    def wait(self, job: int) -> None:
        """Synchronise with one job's end."""
        for running in self._running:
            if running.job == job:
                running.end.synchronize()

    def unmap(self) -> None:
        """Let go of the mapping; it stays pinned until the copies that use it have ended, unwaited for."""
        if self._registration is not None:
            self._retired.append(self._registration)
        self._pool = self._registration = None
        self._release_retired()

    def close(self) -> None:
        """Wait for all copies and let go of everything."""
        for running in self._running:
            running.end.synchronize()
        self._running.clear()
        self.unmap()

    def _release_retired(self) -> None:
        if self._retired and not self._running:
            for registration in self._retired:
                registration.close()
            self._retired.clear()

    def _submit(self, job: int, pieces: Sequence[Piece], stream: Any, *, to_pool: bool) -> None:
        if self._pool is None:
            raise ValueError("no pool is mapped")
        check(pieces, self._pool.numel())
        running = _Running(job, self._event(), self._event())
        stream.wait_stream(self._device.current_stream())
        with self._device.on(stream):
            running.start.record(stream)
            try:
                if self._device.batch is not None:
                    running.kept = copy_batched(self._device.batch, pieces, self._pool, to_pool=to_pool)
                else:
                    copy_rows(pieces, self._pool, to_pool=to_pool)
            except Exception:  # what was begun runs on: the job fails when that has ended, not before
                logger.exception("kvtierd: a copy of %d pieces failed on its way", len(pieces))
                running.ok = False
            running.end.record(stream)
            self._running.append(running)

    def _event(self) -> Any:
        return self._events.pop() if self._events else self._device.event()


def check(pieces: Sequence[Piece], limit: int) -> None:
    """Look that no piece reaches outside the mapping.

    Raises:
        ValueError: one does; nothing was copied.
    """
    for piece in pieces:
        if piece.offsets.min() < 0 or piece.offsets.max() + piece.nbytes > limit:
            raise ValueError(f"slots reach outside the pool of {limit} bytes")


def copy_batched(
    batch: Callable[..., None], pieces: Sequence[Piece], pool: torch.Tensor, *, to_pool: bool
) -> tuple[torch.Tensor, ...]:
    """Copy with one call; returns the descriptors, which have to live until the copy has ended."""
    device, host, sizes = (torch.from_numpy(array) for array in descriptors(pieces, pool.data_ptr()))
    source, target = (device, host) if to_pool else (host, device)
    # Reads out of stream order are allowed only where nothing on the device writes the source.
    batch(source, target, sizes, is_src_access_order_any=not to_pool)
    return device, host, sizes


def descriptors(pieces: Sequence[Piece], base: int) -> tuple[Addresses, Addresses, Addresses]:
    """Device addresses, host addresses and sizes of all copies; none crosses a pinned chunk's border."""
    device = [piece.tensor.data_ptr() + piece.blocks * piece.tensor.stride(0) for piece in pieces]
    offsets = [piece.offsets for piece in pieces]
    sizes = [np.full(len(piece.blocks), piece.nbytes, np.int64) for piece in pieces]
    all_device, all_offsets, all_sizes = (np.concatenate(part) for part in (device, offsets, sizes))
    border = (all_offsets // REGISTER_CHUNK + 1) * REGISTER_CHUNK
    head = np.minimum(all_sizes, border - all_offsets)
    crosses = head < all_sizes
    if crosses.any():
        rest = (all_sizes - head)[crosses]
        all_device = np.concatenate([all_device, (all_device + head)[crosses]])
        all_offsets = np.concatenate([all_offsets, (all_offsets + head)[crosses]])
        head = np.concatenate([head, rest])
    return all_device, all_offsets + base, head


def copy_rows(pieces: Sequence[Piece], pool: torch.Tensor, *, to_pool: bool) -> None:
    """Copy block by block with torch alone, for devices without a batched copy."""
    for piece in pieces:
        for block, offset in zip(piece.blocks.tolist(), piece.offsets.tolist(), strict=True):
            on_device = piece.tensor[block, : piece.nbytes]
            in_pool = pool[offset : offset + piece.nbytes]
            if to_pool:
                in_pool.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(in_pool, non_blocking=True)

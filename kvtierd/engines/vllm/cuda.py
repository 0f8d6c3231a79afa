# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"
"""Copies between CUDA KV tensors and the pool.

NOT RUN YET: written from vLLM's source, exercised by no test. Each direction has its own side stream; a job
waits for the compute stream at its submission, so that it sees what was computed and overwrites nothing
that is still being read, and ends with an event that is polled: no host synchronisation in a step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops

from kvtierd.engines.vllm.copies import Piece

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    job: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    descriptors: tuple[torch.Tensor, ...]


class CudaCopier:
    """Batched asynchronous copies with vLLM's ``swap_blocks_batch``."""

    later = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._running: deque[_Running] = deque()
        self._pool: torch.Tensor | None = None
        self._registered = 0

    def map(self, pool: memoryview) -> None:
        """Register the mapping with CUDA, best effort: without it copies still work, only slower."""
        # torch.frombuffer(mmap) does not hold the mapping; the memoryview's export does.
        self._pool = torch.frombuffer(pool, dtype=torch.int8)
        address = self._pool.data_ptr()
        result = torch.cuda.cudart().cudaHostRegister(address, self._pool.numel(), 0)
        if int(result) == 0:
            self._registered = address
        else:
            logger.warning("kvtierd: cudaHostRegister failed (%s): copies use pageable memory", result)

    def store(self, job: int, pieces: Sequence[Piece]) -> None:
        """Start device to host."""
        self._submit(job, pieces, self._out, to_pool=True)

    def load(self, job: int, pieces: Sequence[Piece]) -> None:
        """Start host to device."""
        self._submit(job, pieces, self._in, to_pool=False)

    def finished(self) -> Sequence[tuple[int, float]]:
        """Poll the end events. Both streams' jobs share one queue, looked through as a whole."""
        done = [running for running in self._running if running.end.query()]
        for running in done:
            self._running.remove(running)
        return [(running.job, running.start.elapsed_time(running.end) * 1e-3) for running in done]

    def wait(self, job: int) -> None:
        """Synchronise with one job's end."""
        for running in self._running:
            if running.job == job:
                running.end.synchronize()

    def unmap(self) -> None:
        """Drain both streams before the memory may go."""
        self._out.synchronize()
        self._in.synchronize()
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0
        self._pool = None

    def _submit(self, job: int, pieces: Sequence[Piece], stream: torch.cuda.Stream, *, to_pool: bool) -> None:
        device, host, sizes = self._descriptors(pieces)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            start.record(stream)
            source, target = (device, host) if to_pool else (host, device)
            # Reads out of stream order are allowed only where nothing on the GPU writes the source.
            ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=not to_pool)
            end.record(stream)
        self._running.append(_Running(job, start, end, (device, host, sizes)))

    def _descriptors(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Addresses and sizes of all copies of a job, as int64 CPU tensors.

        Raises:
            ValueError: a piece would reach outside the mapping.
        """
        assert self._pool is not None
        base, limit = self._pool.data_ptr(), self._pool.numel()
        device: list[Any] = []
        host: list[Any] = []
        sizes: list[Any] = []
        for piece in pieces:
            if piece.offsets.min() < 0 or piece.offsets.max() + piece.nbytes > limit:
                raise ValueError(f"slots reach outside the pool of {limit} bytes")
            device.append(piece.tensor.data_ptr() + piece.blocks * piece.tensor.stride(0))
            host.append(base + piece.offsets)
            sizes.append(np.full(len(piece.blocks), piece.nbytes, np.int64))
        return (
            torch.from_numpy(np.concatenate(device)),
            torch.from_numpy(np.concatenate(host)),
            torch.from_numpy(np.concatenate(sizes)),
        )

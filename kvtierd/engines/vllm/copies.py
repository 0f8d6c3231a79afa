# mypy: disable-error-code="import-not-found,import-untyped"
"""Moving bytes between the engine's KV tensors and the mapped pool.

A copy job is a list of :class:`Piece`, one per KV tensor and place in the slot. Which copier serves a device
is decided once, by :func:`copier_for`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvtierd.core.geometry import UNIT


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` of row ``blocks[i]`` of ``tensor`` (int8, blocks x page) belong at pool byte ``offsets[i]``.

    All offsets of a piece have the same remainder modulo ``UNIT``: they are one place in different slots.
    """

    tensor: Any
    nbytes: int
    blocks: np.ndarray[Any, np.dtype[np.int64]]
    offsets: np.ndarray[Any, np.dtype[np.int64]]


class Copier(Protocol):
    """Copies jobs. ``later``: they may still run when the call returns, and end in :meth:`finished`.

    A call that raises has copied nothing and will not.
    """

    later: bool

    def map(self, pool: memoryview) -> None:
        """Use this mapping from now on; no copy is running."""

    def store(self, job: int, pieces: Sequence[Piece]) -> None:
        """Start the copy from the KV tensors into the pool."""

    def load(self, job: int, pieces: Sequence[Piece]) -> None:
        """Start the copy from the pool into the KV tensors."""

    def finished(self) -> Sequence[tuple[int, float, bool]]:
        """The jobs that ended since the last call: the seconds that each took, and whether it copied all."""

    def wait(self, job: int) -> None:
        """Block until this job has ended."""

    def unmap(self) -> None:
        """Let go of the mapping as soon as no copy uses it."""

    def close(self) -> None:
        """Wait for running copies and let go of everything."""


class HostCopier:
    """KV tensors in host memory (vLLM's CPU backend): copies at once, one numpy call per piece."""

    later = False

    def __init__(self) -> None:
        self._pool: np.ndarray[Any, np.dtype[np.int8]] = np.empty(0, np.int8)

    def map(self, pool: memoryview) -> None:
        """Hold the mapping through a view of the memoryview, which keeps it from being closed below us."""
        self._pool = np.frombuffer(pool, np.int8)

    def store(self, job: int, pieces: Sequence[Piece]) -> None:
        """Copy into the pool."""
        for piece in pieces:
            rows, index = self._rows(piece)
            rows[index] = piece.tensor.numpy()[piece.blocks, : piece.nbytes]

    def load(self, job: int, pieces: Sequence[Piece]) -> None:
        """Copy out of the pool."""
        for piece in pieces:
            rows, index = self._rows(piece)
            piece.tensor.numpy()[piece.blocks, : piece.nbytes] = rows[index]

    def finished(self) -> Sequence[tuple[int, float, bool]]:
        """Nothing is ever in flight."""
        return ()

    def wait(self, job: int) -> None:
        """Nothing is ever in flight."""

    def unmap(self) -> None:
        """Drop the view."""
        self._pool = np.empty(0, np.int8)

    def close(self) -> None:
        """Drop the view."""
        self.unmap()

    def _rows(self, piece: Piece) -> tuple[Any, Any]:
        """View the pool as one row per unit (rows overlap), and the piece's row numbers in it.

        Raises:
            ValueError: a piece would reach outside the mapping.
        """
        base = int(piece.offsets[0]) % UNIT
        count = (self._pool.size - base - piece.nbytes) // UNIT + 1
        index = (piece.offsets - base) // UNIT
        if index.min() < 0 or index.max() >= count:
            raise ValueError(f"slots reach outside the pool of {self._pool.size} bytes")
        view = np.lib.stride_tricks.as_strided(
            self._pool[base:], shape=(count, piece.nbytes), strides=(UNIT, 1)
        )
        return view, index


def copier_for(device: torch.device) -> Copier:
    """Return the copier of a device: host memory, or one with streams."""
    if device.type == "cpu":
        return HostCopier()
    from kvtierd.engines.vllm.cuda import TorchAccelerator
    from kvtierd.engines.vllm.streams import StreamCopier

    return StreamCopier(TorchAccelerator(device))

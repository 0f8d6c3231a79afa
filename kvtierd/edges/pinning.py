"""Registers the pool with CUDA in the daemon, where there is a device and torch.

Registration counts for one process only: every engine process that copies with its GPU registers its own
mapping. torch is imported here and only when a device is there, never on the daemon's usual start path.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvtierd.config.schema import BestEffort
from kvtierd.edges.pool import Pool
from kvtierd.errors import PoolError

CHUNK_BYTES = 64 << 30
"""Bytes of one registration: one of 512 GiB or more fails (vLLM PR 51081)."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class CudaRuntime(Protocol):
    """The two calls of the CUDA runtime that pinning needs; both return a ``cudaError``, 0 for success."""

    def register(self, address: int, length: int) -> int:
        """Page-lock and register a range of host memory."""

    def unregister(self, address: int) -> int:
        """Undo one registration, named by its start."""


class _TorchRuntime:
    def __init__(self, cudart: Any) -> None:
        self._cudart = cudart

    def register(self, address: int, length: int) -> int:
        return int(self._cudart.cudaHostRegister(address, length, _PORTABLE))

    def unregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))


def find_cuda(device: Path = Path("/dev/nvidiactl")) -> CudaRuntime | str:
    """Return the CUDA runtime, or why there is none."""
    if not device.exists():
        return "no CUDA device in this container"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return _TorchRuntime(torch.cuda.cudart())
    except Exception as error:  # whatever a broken driver or build raises
        return f"CUDA cannot be used: {error}"


def pin(pool: Pool, mode: BestEffort, find: Callable[[], CudaRuntime | str] = find_cuda) -> None:
    """Register the pool's mapping as ``mode`` says, until it closes; noting it as ``achieved['pin']``.

    Blocks for about 0.1 s per GB; call it from a thread and after the pre-fault.

    Raises:
        PoolError: ``require``, and it cannot be registered; nothing stays registered.
    """
    if mode == "off":
        pool.record("pin", "off")
        return
    runtime = find()
    reason = runtime if isinstance(runtime, str) else _register(pool, runtime)
    if reason and mode == "require":
        raise PoolError(f"pool.pin: require: {reason}")
    pool.record("pin", "not pinned" if reason else "pinned", reason)


def _register(pool: Pool, runtime: CudaRuntime) -> str:
    """Register all chunks or none; return why not, or nothing."""
    done: list[int] = []

    def undo() -> None:
        while done:
            runtime.unregister(done.pop())

    for offset in range(0, pool.bytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, pool.bytes - offset)
        try:
            code = runtime.register(pool.address + offset, length)
        except RuntimeError as error:  # torch turns some codes into exceptions
            undo()
            return f"cudaHostRegister: {error}"
        if code != 0:
            undo()
            return f"cudaHostRegister of {length} bytes failed with code {code}"
        done.append(pool.address + offset)
    pool.on_close(undo)
    return ""

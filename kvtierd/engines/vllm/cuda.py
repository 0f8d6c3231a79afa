# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"
"""A CUDA (or ROCm, or other torch) device as the copies see it.

Needs torch only; where vLLM's operators are loaded, its batched copy is used. ``tests/gpu/run_on_gpu.py``
runs it on a real device; the order of streams and events is tested with a device that is none.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


class TorchAccelerator:
    """A device that torch has streams and events for; pins host memory only where it is CUDA."""

    def __init__(self, device: torch.device, *, batched: bool = True) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._batched = batched

    def stream(self) -> Any:
        """Make a side stream."""
        return self._module.Stream(self._device)

    def event(self) -> Any:
        """Make an event with timing."""
        return self._module.Event(enable_timing=True)

    def current_stream(self) -> Any:
        """Return the stream that the engine computes on."""
        return self._module.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give the stream what is called meanwhile."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    @cached_property
    def batch(self) -> Callable[..., None] | None:
        """Return vLLM's batched copy: one driver call for a whole job on CUDA 12.8 and later."""
        operators = getattr(torch.ops, "_C_cache_ops", None)
        if not self._batched or self._device.type != "cuda":
            return None
        try:
            operator = operators.swap_blocks_batch  # type: ignore[union-attr]
        except AttributeError:  # vLLM's operators are not loaded, or have none of that name
            logger.warning("kvtierd: no swap_blocks_batch in this vLLM: blocks are copied one by one")
            return None

        def call(source: Any, target: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:
            operator(source, target, sizes, is_src_access_order_any)

        return call

    def register(self, address: int, nbytes: int) -> str:
        """Pin host memory with the CUDA runtime that torch uses."""
        runtime = _runtime() if self._device.type == "cuda" else None
        if runtime is None:
            return f"no CUDA runtime for a {self._device.type} device"
        with self._module.device(self._device):
            code = runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0)
            if code:
                runtime.cudaGetLastError()  # otherwise the next kernel's launch reports this error
        return "" if code == 0 else f"cudaHostRegister says {code}"

    def unregister(self, address: int) -> None:
        """End a registration."""
        runtime = _runtime()
        if runtime is not None:
            with self._module.device(self._device):
                if runtime.cudaHostUnregister(ctypes.c_void_p(address)):
                    runtime.cudaGetLastError()


def _runtime() -> Any:
    """Return the CUDA runtime library of this process, ``None`` when there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart" in path:
            return ctypes.CDLL(path)
    return None

"""LMCache's filesystem adapters, in process: ``fs_native`` (C++) or ``fs`` (Python), by the argument."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lines  # first: it takes standard output
import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import (
    FSNativeL2AdapterConfig,
    _create_fs_native_l2_adapter,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

DEADLINE = 120.0


class Files:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def open(
        self, folder: str, block_bytes: int, count: int, threads: int, direct: bool, memory: str
    ) -> None:
        self.folder = Path(folder)
        self.memory = lines.Memory(block_bytes, count, memory)
        whole = torch.frombuffer(self.memory.view, dtype=torch.uint8)
        self.objects = [self._object(whole, number) for number in range(2 * count)]
        self.folder.mkdir(parents=True)
        if self.kind == "fs_native":
            self.adapter = _create_fs_native_l2_adapter(
                FSNativeL2AdapterConfig(folder, num_workers=threads, use_odirect=direct)
            )
        else:
            self.adapter = FSL2Adapter(FSL2AdapterConfig(folder, use_odirect=direct))
            self.adapter._loop.set_default_executor(ThreadPoolExecutor(threads))
        self.jobs = lines.batches(count, threads)
        self.round = 0

    def _object(self, whole: torch.Tensor, number: int) -> MemoryObj:
        size = self.memory.block_bytes
        metadata = MemoryObjMetadata(
            shape=torch.Size([size]),
            dtype=torch.uint8,
            address=number * size,
            phy_size=size,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        data = whole[number * size : (number + 1) * size]
        return TensorMemoryObj(raw_data=data, metadata=metadata, parent_allocator=None)

    def store(self) -> tuple[float, float]:
        self.round += 1
        self.keys = [
            ObjectKey(chunk_hash=lines.key(self.round, number), model_name="bench", kv_rank=0)
            for number in range(self.memory.count)
        ]
        return lines.cost(self._store)

    def load(self) -> tuple[float, float]:
        return lines.cost(self._load)

    def wrong(self) -> int:
        return self.memory.wrong()

    def wipe(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.unlink()

    def close(self) -> None:
        self.adapter.close()
        shutil.rmtree(self.folder)

    def _store(self) -> None:
        left = {
            self.adapter.submit_store_task([self.keys[i] for i in job], [self.objects[i] for i in job])
            for job in self.jobs
        }
        while left:
            self._wait(self.adapter.get_store_event_fd())
            for task, result in self.adapter.pop_completed_store_tasks().items():
                left.discard(task)
                if not result.is_successful():
                    raise RuntimeError("LMCache's adapter failed a store")

    def _load(self) -> None:
        count = self.memory.count
        left = {
            self.adapter.submit_load_task(
                [self.keys[i] for i in job], [self.objects[count + i] for i in job]
            ): len(job)
            for job in self.jobs
        }
        while left:
            self._wait(self.adapter.get_load_event_fd())
            for task in list(left):
                bitmap = self.adapter.query_load_result(task)
                if bitmap is not None and bitmap.popcount() != left.pop(task):
                    raise RuntimeError("LMCache's adapter failed a load")

    def _wait(self, fd: int) -> None:
        if not wait_eventfd(fd, timeout=DEADLINE):
            raise TimeoutError("LMCache's adapter did not end in time")


if __name__ == "__main__":
    lines.serve(Files(sys.argv[1]))

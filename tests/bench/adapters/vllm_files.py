"""vLLM's own filesystem tier: its FileSystemTierManager, in process, with its C extension if it has one."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import lines  # first: it takes standard output
import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager


def _spec() -> SimpleNamespace:
    """Return what the tier reads of an engine's offloading specification."""
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
        model=SimpleNamespace(name="bench", dtype="uint8"),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        ),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)


class Files:
    def open(
        self, folder: str, block_bytes: int, count: int, threads: int, direct: bool, memory: str
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True)
        self.memory = lines.Memory(block_bytes, count, memory)
        view = self.memory.view.cast("B", (2 * count, block_bytes))
        # Every thread takes from both queues, so half of them each are as many as the others have.
        half = max(1, threads // 2)
        self.tier = FileSystemTierManager(
            _spec(), view, "fs", folder, n_read_threads=threads - half, n_write_threads=half
        )
        if direct and not self.tier._use_o_direct:
            raise RuntimeError("vLLM's tier found no O_DIRECT here")
        self.tier._use_o_direct = direct  # buffered is what it does where the filesystem has no O_DIRECT
        self.jobs = lines.batches(count, threads)
        self.context = ReqContext(req_id="bench")
        self.number = self.round = 0

    def store(self) -> tuple[float, float]:
        self.round += 1
        return lines.cost(lambda: self._all(self.tier.submit_store, 0))

    def load(self) -> tuple[float, float]:
        return lines.cost(lambda: self._all(self.tier.submit_load, self.memory.count))

    def wrong(self) -> int:
        return self.memory.wrong()

    def wipe(self) -> None:
        for path in self.folder.rglob("*.bin"):
            path.unlink()

    def close(self) -> None:
        self.tier.shutdown()
        shutil.rmtree(self.folder)

    def _key(self, number: int) -> bytes:
        # vLLM hashes are uniform, and its folders are named by their first digits.
        return make_offload_key(lines.key(self.round, number), 0)

    def _all(self, submit, first: int) -> None:  # type: ignore[no-untyped-def]
        for numbers in self.jobs:
            self.number += 1
            chunks = np.array([first + number for number in numbers])
            keys = [self._key(number) for number in numbers]
            submit(TransferJob(self.number, keys, chunks, first > 0, self.context))
        self.tier.drain_jobs()
        if not all(done.success for done in self.tier.get_finished_jobs()):
            raise RuntimeError("vLLM's tier failed a job")


if __name__ == "__main__":
    lines.serve(Files())

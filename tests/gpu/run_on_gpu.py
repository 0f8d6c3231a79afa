"""Everything about the copies that needs a GPU, in one go: a minute on a lent machine.

``python tests/gpu/run_on_gpu.py [--gib 4]`` with torch for CUDA, numpy and msgspec; vLLM is used where it is
installed, for its batched copy. Prints one JSON line for each part (and writes them to ``$OUT/gpu.jsonl``
where that is set); ends with 1 if anything was wrong. ``--without-gpu`` tries the script itself, on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvtierd.engines.vllm.copies import Piece
from kvtierd.engines.vllm.cuda import TorchAccelerator
from kvtierd.engines.vllm.streams import StreamCopier

LAYERS = 32
ROUNDS = 200
failed: list[str] = []


class NoGpu:
    """An accelerator in name: every call is carried out at once."""

    batch = None
    done = True

    def stream(self) -> NoGpu:
        return self

    event = current_stream = stream

    def on(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 1e-3


class Bench:
    """A pool over a memfd, KV tensors on the device, and the copier between them."""

    def __init__(self, device: str, nbytes: int, page: int, *, batched: bool = True, fd: int = -1) -> None:
        self.device, self.page = device, page
        self.fd = fd if fd >= 0 else os.memfd_create("gpu-pool")
        if fd < 0:
            os.ftruncate(self.fd, nbytes)
        self.mapping = mmap.mmap(self.fd, nbytes)
        if fd < 0:
            np.frombuffer(self.mapping, np.int8)[:: mmap.PAGESIZE] = 1  # as the daemon, have the pages first
        self.slot = LAYERS * page
        self.slots = nbytes // self.slot
        self.blocks = min(self.slots, 1024)
        self.caches = [torch.zeros(self.blocks, page, dtype=torch.int8, device=device) for _ in range(LAYERS)]
        accelerator: Any = (
            NoGpu() if device == "cpu" else TorchAccelerator(torch.device(device), batched=batched)
        )
        self.copier = StreamCopier(accelerator)
        began = time.monotonic()
        self.copier.map(memoryview(self.mapping))
        self.register_seconds = time.monotonic() - began
        self._job = 0

    def pieces(self, blocks: list[int], slots: list[int]) -> list[Piece]:
        rows, starts = np.asarray(blocks, np.int64), np.asarray(slots, np.int64) * self.slot
        return [Piece(cache, self.page, rows, starts + n * self.page) for n, cache in enumerate(self.caches)]

    def run(self, direction: str, blocks: list[int], slots: list[int]) -> float:
        """One job to its end; seconds on the device."""
        self._job += 1
        getattr(self.copier, direction)(self._job, self.pieces(blocks, slots))
        self.copier.wait(self._job)
        ((_, seconds, ok),) = self.copier.finished()
        expect(ok, f"a {direction} failed")
        return seconds


def expect(truth: bool, what: str) -> None:
    if not truth:
        failed.append(what)


def tell(part: str, **figures: object) -> None:
    line = json.dumps({"part": part, **figures})
    print(line, flush=True)
    if out := os.environ.get("OUT"):
        with (Path(out) / "gpu.jsonl").open("a") as sink:
            sink.write(line + "\n")


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def bandwidth(device: str, nbytes: int) -> None:
    """Store and load against plain copies of the same sizes and of one piece, from memory torch pinned."""
    for page in (16 << 10, 64 << 10, 256 << 10):
        for batched in (True, False):
            bench = Bench(device, nbytes, page, batched=batched)
            count = min(bench.blocks, max(1, (256 << 20) // bench.slot))
            blocks = torch.randperm(bench.blocks)[:count].tolist()
            slots = torch.randperm(bench.slots)[:count].tolist()
            total = count * bench.slot
            rates = {}
            for direction in ("store", "load"):
                bench.run(direction, blocks, slots)
                rates[direction] = max(total / bench.run(direction, blocks, slots) for _ in range(5)) / 1e9
            tell(
                "bandwidth",
                page=page,
                bytes=total,
                batched=batched and bench.copier._device.batch is not None,
                pinned=bench.copier.pinned,
                register_seconds=round(bench.register_seconds, 3),
                gb_per_s={name: round(rate, 2) for name, rate in rates.items()},
                memcpy_same_sizes=plain(device, bench, count),
                memcpy_one_piece=plain(device, bench, 0),
            )
            expect(bench.copier.pinned, "the pool could not be pinned")
            bench.copier.close()


def plain(device: str, bench: Bench, count: int) -> dict[str, float]:
    """GB/s of cudaMemcpyAsync alone: ``count`` blocks of pages, or one large piece for 0."""
    host = torch.zeros(
        max(count, 1) * bench.slot * (1 if count else 64), dtype=torch.int8, pin_memory=device != "cpu"
    )
    there = torch.zeros_like(host, device=device)
    size = bench.page if count else len(host)
    rates = {}
    for name, target, source in (("store", host, there), ("load", there, host)):
        best = 0.0
        for _ in range(3):
            synchronise(device)
            began = time.monotonic()
            for start in range(0, len(host), size):
                target[start : start + size].copy_(source[start : start + size], non_blocking=True)
            synchronise(device)
            best = max(best, len(host) / (time.monotonic() - began) / 1e9)
        rates[name] = round(best, 2)
    return rates


def ordering(device: str, nbytes: int) -> None:
    """L62: checksums on the device before a store and after a load, while the compute stream is busy."""
    bench = Bench(device, nbytes, 64 << 10)
    size = 256 if device == "cpu" else 4096
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    wrong, early = 0, 0
    submit = 0.0
    for number in range(ROUNDS if device != "cpu" else 5):
        source, target = (int(n) for n in torch.randperm(bench.blocks)[:2])
        slot = number % bench.slots
        for _ in range(10):  # the kernels that the store must wait for
            left = torch.tanh(left @ right)
        for layer, cache in enumerate(bench.caches):
            cache[source].fill_((number + layer) % 127)
        before = torch.stack([cache[source].sum(dtype=torch.int64) for cache in bench.caches])
        computed = None if device == "cpu" else torch.cuda.Event()
        if computed is not None:
            computed.record()
        began = time.monotonic()
        bench.copier.store(2 * number, bench.pieces([source], [slot]))
        submit = max(submit, time.monotonic() - began) if number else 0.0
        early += computed is not None and not computed.query()  # it returned while the kernels ran
        bench.copier.wait(2 * number)
        for cache in bench.caches:
            cache[source].zero_()
            cache[target].fill_(-1)  # still queued when the load is submitted
        bench.copier.load(2 * number + 1, bench.pieces([target], [slot]))
        bench.copier.wait(2 * number + 1)
        after = torch.stack([cache[target].sum(dtype=torch.int64) for cache in bench.caches])
        wrong += not torch.equal(before, after)
        bench.copier.finished()
    tell(
        "ordering", rounds=ROUNDS, wrong=wrong, returned_early=early, longest_submit_ms=round(submit * 1e3, 3)
    )
    expect(wrong == 0, f"{wrong} blocks changed on their way through the pool")
    expect(device == "cpu" or early > ROUNDS // 2, "submitting a store waited for the compute stream")
    bench.copier.close()


def two_processes(device: str, nbytes: int) -> None:
    """A child that maps and pins the same pool stores; this process loads what it stored."""
    bench = Bench(device, nbytes, 64 << 10)
    command = [
        sys.executable,
        __file__,
        "--child",
        str(bench.fd),
        "--nbytes",
        str(nbytes),
        "--device",
        device,
    ]
    child = subprocess.run(command, pass_fds=[bench.fd], check=False, timeout=120)
    expect(child.returncode == 0, "the child failed")
    bench.run("load", [1, 2, 3], [5, 0, 7])
    right = all(
        bool((cache[block] == (block + layer) % 100).all())
        for layer, cache in enumerate(bench.caches)
        for block in (1, 2, 3)
    )
    tell("two processes", right=right, pinned_here=bench.copier.pinned)
    expect(right, "one process loaded other bytes than the other had stored")
    bench.copier.close()


def be_the_child(fd: int, nbytes: int, device: str) -> None:
    bench = Bench(device, nbytes, 64 << 10, fd=fd)
    for layer, cache in enumerate(bench.caches):
        for block in (1, 2, 3):
            cache[block].fill_((block + layer) % 100)
    bench.run("store", [1, 2, 3], [5, 0, 7])
    expect(bench.copier.pinned, "the child could not pin the pool")
    bench.copier.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--without-gpu", action="store_true")
    parser.add_argument("--child", type=int, default=-1)
    parser.add_argument("--nbytes", type=int, default=0)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    if options.child >= 0:
        be_the_child(options.child, options.nbytes, options.device)
        return int(bool(failed))
    device, nbytes = options.device, int(options.gib * (1 << 30))
    if options.without_gpu:
        device, nbytes = "cpu", 16 << 20
    elif not torch.cuda.is_available():
        print("no CUDA device: nothing was tested", file=sys.stderr)
        return 2
    with contextlib.suppress(ImportError):
        import vllm._custom_ops  # noqa: F401 - loads the operators
    name = "none" if device == "cpu" else torch.cuda.get_device_name(0)
    tell("device", name=name, torch=torch.__version__, cuda=torch.version.cuda)
    ordering(device, nbytes)
    two_processes(device, nbytes)
    bandwidth(device, nbytes)
    tell("result", failed=failed)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

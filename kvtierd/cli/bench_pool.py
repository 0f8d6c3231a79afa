"""``kvtierd bench pool``: stores and loads of blocks through the client, beside memcpy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

from kvtierd.cli.bench_echo import in_turns, percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.bench_rpc import POOL_ONLY, chain_of
from kvtierd.client import Client, Group, Layout, Session
from kvtierd.testing.cores import on_cores, places
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

BATCH = 16
Buffer = bytearray | memoryview
Calls = dict[str, Callable[[], object]]


def measure(*, block_bytes: int, seconds: float) -> list[Figure]:
    """Measure with a daemon of our own; batches of 16 blocks of ``block_bytes``."""
    layout = Layout(
        model="kvtierd-bench-pool",
        dtype="uint8",
        layout="none",
        groups=(Group(tokens_per_block=16, block_bytes=block_bytes),),
    )
    with short_folder("bench") as folder:
        pool, at = max(64 << 20, 4 * BATCH * block_bytes), places()
        with contextlib.ExitStack() as stack:
            with on_cores(at.servers):
                daemon = stack.enter_context(LocalDaemon(folder, pool_bytes=pool, disk_bytes=64 << 20))
            stack.enter_context(on_cores(at.client))
            client = stack.enter_context(Client(daemon.socket, deadline=5.0))
            session = client.attach(layout, engine_id="bench-pool")
            return _measure(session, block_bytes, seconds)


def _measure(session: Session, block_bytes: int, seconds: float) -> list[Figure]:
    keys, metas = chain_of(BATCH, b"kvtierd bench pool")
    source = [bytearray(b"\x07" * block_bytes) for _ in range(BATCH)]
    with contextlib.ExitStack() as stack:
        shared, private = stack.enter_context(_shared(block_bytes)), [bytearray(block_bytes) for _ in source]

        def memcpy(into: Sequence[Buffer], blocks: Sequence[Buffer]) -> None:
            for target, block in zip(into, blocks, strict=True):
                copy_bytes(target, block)

        def store(*, copy: bool = True) -> None:
            job = session.prepare_store(keys, metas, POOL_ONLY)
            memcpy(job.views() if copy else (), source if copy else ())
            if len(job.commit()) != BATCH:
                raise AssertionError("a daemon with room refused blocks")

        def forget() -> None:
            session.evict(keys)
            session.lookup(keys)  # answered when the removals are told: the next store waits for nothing

        def load(*, copy: bool) -> None:
            got = session.load(keys)
            memcpy(private if copy else (), got.views() if copy else ())
            got.release(wait=False)  # as the engine's connector does

        stores: Calls = {"all": store, "control": lambda: store(copy=False)}
        stored = in_turns(stores | {"memcpy": lambda: memcpy(shared, source)}, seconds / 2, undo=forget)
        store()
        loads: Calls = {"all": lambda: load(copy=True), "control": lambda: load(copy=False)}
        loaded = in_turns(loads | {"memcpy": lambda: memcpy(private, shared)}, seconds / 2)
        if private != source:
            raise AssertionError("a load brought other bytes than were stored")
    return [*_figures("store", block_bytes, stored), *_figures("load", block_bytes, loaded)]


@contextlib.contextmanager
def _shared(block_bytes: int) -> Iterator[list[memoryview]]:
    """Give blocks of memory such as the pool is: of a memfd, touched, in pages of the same size."""
    fd = os.memfd_create("kvtierd-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, BATCH * block_bytes)
        mapping = mmap.mmap(fd, BATCH * block_bytes)
    finally:
        os.close(fd)
    with mapping, memoryview(mapping) as whole:
        whole[:] = b"\x07" * len(whole)
        blocks = [whole[start : start + block_bytes] for start in range(0, len(whole), block_bytes)]
        yield blocks
        for block in blocks:
            block.release()


def copy_bytes(into: Buffer, source: Buffer) -> None:
    """Copy as a C program would, without the interpreter's lock (assigning to a view would hold it)."""
    there, here = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (into, source))
    ctypes.memmove(there, here, len(source))


def _figures(verb: str, block_bytes: int, times: dict[str, list[float]]) -> list[Figure]:
    def rate(name: str) -> float:
        return BATCH * block_bytes / percentile(times[name], 0.5) / 1e3

    control = percentile(times["control"], 0.5) / BATCH
    return [
        Figure(f"{verb} of {BATCH} blocks", rate("all"), "GB/s", rate("memcpy"), more_is_better=True),
        Figure(f"{verb}, control per block", control, "us"),
    ]

"""``kvtierd bench pool``: stores and loads of blocks through the client, beside memcpy."""

from __future__ import annotations

import ctypes

from kvtierd.cli.bench_echo import in_turns, percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.bench_rpc import POOL_ONLY, chain_of
from kvtierd.client import Client, Group, Layout, Session
from kvtierd.testing.local_daemon import LocalDaemon, short_folder

BATCH = 16


def measure(*, block_bytes: int, seconds: float) -> list[Figure]:
    """Measure with a daemon of our own; batches of 16 blocks of ``block_bytes``."""
    layout = Layout(
        model="kvtierd-bench-pool",
        dtype="uint8",
        layout="none",
        groups=(Group(tokens_per_block=16, block_bytes=block_bytes),),
    )
    with short_folder("bench") as folder:
        pool = max(64 << 20, 4 * BATCH * block_bytes)
        with (
            LocalDaemon(folder, pool_bytes=pool, disk_bytes=64 << 20) as daemon,
            Client(daemon.socket, deadline=5.0) as client,
        ):
            session = client.attach(layout, engine_id="bench-pool")
            return _measure(session, block_bytes, seconds)


def _measure(session: Session, block_bytes: int, seconds: float) -> list[Figure]:
    keys, metas = chain_of(BATCH, b"kvtierd bench pool")
    source = [bytearray(b"\x07" * block_bytes) for _ in range(BATCH)]
    target = [bytearray(block_bytes) for _ in range(BATCH)]

    def memcpy() -> None:
        for into, block in zip(target, source, strict=True):
            copy_bytes(into, block)

    def store(*, copy: bool = True) -> None:
        job = session.prepare_store(keys, metas, POOL_ONLY)
        for view, block in zip(job.views(), source, strict=True) if copy else ():
            copy_bytes(view, block)
        if len(job.commit()) != BATCH:
            raise AssertionError("a daemon with room refused blocks")

    def cycle(*, copy: bool) -> None:
        store(copy=copy)
        session.evict(keys)

    def load(*, copy: bool) -> None:
        with session.load(keys) as got:
            for into, view in zip(target, got.views(), strict=True) if copy else ():
                copy_bytes(into, view)

    half = seconds / 2
    stores = in_turns(
        {"all": lambda: cycle(copy=True), "control": lambda: cycle(copy=False), "memcpy": memcpy}, half
    )
    store()
    loads = in_turns(
        {"all": lambda: load(copy=True), "control": lambda: load(copy=False), "memcpy": memcpy}, half
    )
    if target != source:
        raise AssertionError("a load brought other bytes than were stored")
    return [*_figures("store", block_bytes, stores), *_figures("load", block_bytes, loads)]


def copy_bytes(into: bytearray | memoryview, source: bytearray | memoryview) -> None:
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

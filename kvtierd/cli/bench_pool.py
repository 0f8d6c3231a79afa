"""``kvtierd bench pool``: stores and loads of blocks through the client, beside memcpy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence

from kvtierd.cli.bench_echo import in_turns, percentile
from kvtierd.cli.bench_figures import Figure
from kvtierd.cli.bench_rpc import POOL_ONLY, chain_of
from kvtierd.client import BlockKey, Client, Group, Layout, Session
from kvtierd.client.pipeline import Call, Pipeline
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
    """Measure as vLLM's connector does it: slots are waited for, the answers of commit and release are not.

    What is given back is looked at before the next call, untimed. The bare copies have the very slots that
    the blocks have, as some memory is a sixth slower than other of the same kind: nobody else stores here.
    """
    keys, metas = chain_of(BATCH, b"kvtierd bench pool")
    source = [bytearray(b"\x07" * block_bytes) for _ in range(BATCH)]
    private = [bytearray(block_bytes) for _ in source]
    pipeline = Pipeline(session)
    slots: tuple[memoryview, ...] = ()
    committed: list[Call[tuple[BlockKey, ...]]] = []

    def memcpy(into: Sequence[Buffer], blocks: Sequence[Buffer]) -> None:
        for target, block in zip(into, blocks, strict=True):
            copy_bytes(target, block)

    def store(*, copy: bool = True) -> None:
        nonlocal slots
        prepared = pipeline.prepare_store(keys, metas, POOL_ONLY)
        pipeline.wait([prepared])
        job = prepared.result
        slots = job.views()
        memcpy(slots if copy else (), source if copy else ())
        committed.append(pipeline.commit(job))
        pipeline.flush()

    def forget() -> None:
        pipeline.wait(committed)
        if any(len(commit.result) != BATCH for commit in committed):
            raise AssertionError("a daemon with room refused blocks")
        committed.clear()
        session.evict(keys)
        session.lookup(keys)  # answered when the removals are told: the next store waits for nothing

    def load(*, copy: bool) -> None:
        got = session.load(keys)
        memcpy(private if copy else (), got.views() if copy else ())
        got.release(wait=False)

    stores: Calls = {"all": store, "control": lambda: store(copy=False)}
    stored = in_turns(stores | {"memcpy": lambda: memcpy(slots, source)}, seconds / 2, undo=forget)
    store()
    loads: Calls = {"all": lambda: load(copy=True), "control": lambda: load(copy=False)}
    loaded = in_turns(loads | {"memcpy": lambda: memcpy(private, slots)}, seconds / 2)
    if private != source:
        raise AssertionError("a load brought other bytes than were stored")
    return [*_figures("store", block_bytes, stored), *_figures("load", block_bytes, loaded)]


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

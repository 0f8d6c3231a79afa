"""The measurements: the same thing done by each subject in turns, so that a busy moment hits all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .driver import Peer, PeerError, Running, resident, running
from .rows import Row

__all__ = ["SHORT", "Sizes", "daemons", "files", "footprint", "replace"]

GB = 1e9
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LMCACHE = ("LMCache server", "LMCache server (its own mode)")


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the short form only shows that everything works."""

    rounds: int = 5
    times: int = 20
    seconds: float = 1.0
    lanes: int = 4
    pool: int = GIB
    block: int = 512 * KIB
    layers: int = 8
    prompt: int = 512
    grown: int = 8192
    file_blocks: tuple[int, ...] = (256 * KIB, 2 * MIB, 16 * MIB)
    file_total: int = 128 * MIB
    threads: int = 4


SHORT = Sizes(1, 2, 0.1, 2, 64 * MIB, 64 * KIB, 2, 32, 64, (64 * KIB, 256 * KIB), MIB, 2)


LOOKUP = (
    "kvtierd and OpenLake are asked by block hashes, LMCache by token ids, which it hashes; its answer is"
    " polled for. What gives found blocks free again is not in the time. LMCache always pins what it finds."
)
PINS = "As the rows before, but kvtierd pins, too: each block found is leased, and released afterwards."
COPY = (
    "Until the daemon has answered; all memory was touched before, every byte is compared after a load, and"
    " LMCache's lookup before a load is not timed. In LMCache's own mode its server copies, else the client."
)
IDLE = (
    "Private resident memory after the first client came. Pools are shared memory and not in it, but for"
    " LMCache's in its own mode."
)
PER_BLOCK = (
    "What blocks of 16 tokens and 4 KiB add to that. kvtierd keeps their token ids and parents, the others"
    " what finds them (LMCache one object for 16 of them)."
)
FILES = (
    "the same memory for all, jobs of at most 16 blocks, no fsync, everything synced before each store, new"
    " names in each round."
    " kvtierd's mover and backend with header and checksum, proved at each load; vLLM's FileSystemTierManager"
    " and LMCache's adapters without; plain: one file a block, one pwrite or pread each."
)
FILE_GOALS = {
    "plain files": 0.9,
    "vLLM fs tier": 1.2,
    "LMCache fs_native (C++)": 1.0,
    "LMCache fs (Python)": 1.5,
}


def _sync(folder: Path) -> None:
    """Bring all of a folder's filesystem to its disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def say(what: str) -> None:
    """Tell who waits how far it is."""
    print(what, file=sys.stderr, flush=True)


class Group:
    """Subjects that run at once and take turns; one that fails is left out from then on, with a note."""

    def __init__(self, peers: Sequence[Peer], logs: Path, notes: dict[str, str]) -> None:
        self._stack = contextlib.ExitStack()
        self._notes = notes
        self._running: dict[str, Running] = {}
        for peer in peers:
            with self._noting(peer.name):
                self._running[peer.name] = self._stack.enter_context(running(peer, logs))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            self._notes.setdefault(name, str(error))
            self._running.pop(name, None)

    def turn(self, number: int) -> Iterator[tuple[str, Running]]:
        """Yield the subjects, another one first each time; the body runs in :meth:`noted`."""
        names = list(self._running)
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            if name in self._running:
                yield name, self._running[name]

    noted = _noting


def _daemon_rows(sizes: Sizes) -> dict[str, Row]:
    chunk = f"{16 * sizes.block / MIB:g} MiB"
    prompt = f"{16 * sizes.prompt:,} tokens"
    lookup = f"{sizes.prompt} resident blocks of 16 tokens, one blocking client. {LOOKUP}"
    rate = f"{sizes.lanes} at a time from one process, until each is answered; LMCache's with what ends it."
    copy = f"{chunk} (256 tokens) from or to {2 * sizes.layers} paged tensors of this process. {COPY}"
    fifteen, ten, three = (dict.fromkeys(LMCACHE, goal) for goal in (15.0, 10.0, 3.0))
    return {
        "lookup": Row(f"lookup of {prompt}, p50", "us", lookup, False, fifteen),
        "pinned": Row(f"lookup of {prompt} that pins, p50", "us", PINS, False),
        "lookups": Row(f"lookups of {prompt} a second", "/s", rate, True, ten),
        "pinned lookups": Row(f"lookups of {prompt} that pin, a second", "/s", PINS),
        "store": Row(f"store of {chunk}", "GB/s", copy, True, three),
        "load": Row(f"load of {chunk}", "GB/s", copy, True, three),
    }


def daemons(peers: Sequence[Peer], sizes: Sizes, logs: Path, into: list[Row], notes: dict[str, str]) -> None:
    """Measure lookups, stores and loads through daemons."""
    rows = _daemon_rows(sizes)
    into += rows.values()
    with Group(peers, logs, notes) as group:
        for name, peer in group.turn(0):
            with group.noted(name):
                peer.ask(
                    "open",
                    pool_bytes=sizes.pool,
                    block_bytes=sizes.block,
                    layers=sizes.layers,
                    prompt=sizes.prompt,
                )
                _daemon_round(peer, sizes)  # to warm up
        for number in range(sizes.rounds):
            say(f"daemons, round {number + 1}")
            for name, peer in group.turn(number):
                with group.noted(name):
                    for what, value in _daemon_round(peer, sizes).items():
                        rows[what].add(name, value)


def _daemon_round(peer: Running, sizes: Sizes) -> dict[str, float]:
    chunk = 16 * sizes.block

    def median(what: str, **arguments: object) -> float:
        return statistics.median(peer.ask(what, times=sizes.times, **arguments))

    found: dict[str, float] = {}
    for what, rate, pin in (("lookup", "lookups", False), ("pinned", "pinned lookups", True)):
        if peer.ask("pins", pin=pin):
            found[what] = 1e6 * median("lookup", pin=pin)
            found[rate] = peer.ask("lookups", seconds=sizes.seconds, lanes=sizes.lanes, pin=pin)
    found["store"] = chunk / GB / median("store")
    found["load"] = chunk / GB / median("load")
    peer.ask("wipe")
    return found


def footprint(
    peers: Sequence[Peer], sizes: Sizes, logs: Path, into: list[Row], notes: dict[str, str]
) -> None:
    """Measure what memory daemons need beside their pools."""
    idle = Row("memory of the idle daemon", "MB", IDLE, False)
    block = Row("memory per resident block", "B", f"{sizes.grown:,} blocks. {PER_BLOCK}", False)
    into += [idle, block]
    for peer in peers:
        say(f"memory of {peer.name}")
        try:
            with running(peer, logs) as adapter:
                pids = adapter.ask("open", pool_bytes=GIB, block_bytes=4 * KIB, layers=1, prompt=0)
                before = resident(pids)
                adapter.ask("grow", blocks=sizes.grown, at_once=sizes.prompt)
                idle.add(peer.name, before / 1e6)
                block.add(peer.name, max(0, resident(pids) - before) / sizes.grown)
        except PeerError as error:
            notes.setdefault(peer.name, str(error))


def files(
    peers: Sequence[Peer], sizes: Sizes, folder: Path, logs: Path, into: list[Row], notes: dict[str, str]
) -> None:
    """Measure filesystem tiers in a folder; through the page cache and around it."""
    with Group(peers, logs, notes) as group:
        for direct in (False, True):
            for block_bytes in sizes.file_blocks:
                say(f"files of {block_bytes >> 10} KiB, {'direct' if direct else 'cached'}")
                _files(group, sizes, folder, block_bytes, direct, into)


def _files(group: Group, sizes: Sizes, folder: Path, block_bytes: int, direct: bool, into: list[Row]) -> None:
    count = max(1, sizes.file_total // block_bytes)
    size = f"{block_bytes >> 10} KiB" if block_bytes < MIB else f"{block_bytes >> 20} MiB"
    way = "direct" if direct else "cached"
    state = "O_DIRECT" if direct else "Through the page cache, loads of what was just stored"
    how = f"{state}; {sizes.file_total >> 20} MiB by {sizes.threads} threads, {FILES}"
    goals = FILE_GOALS if block_bytes >= 256 * KIB else {}
    name = {verb: f"fs {verb} {size}, {way}" for verb in ("store", "load")}
    rows = {verb: Row(name[verb], "GB/s", how, True, goals) for verb in name}
    work = {verb: Row(f"{name[verb]}: CPU", "s/GiB", how, False) for verb in name}
    into += [*rows.values(), *work.values()]
    with _memory(count * block_bytes) as memory:
        _take_turns(group, sizes, folder, block_bytes, direct, memory, rows, work)


def _take_turns(
    group: Group,
    sizes: Sizes,
    folder: Path,
    block_bytes: int,
    direct: bool,
    memory: str,
    rows: dict[str, Row],
    work: dict[str, Row],
) -> None:
    count = max(1, sizes.file_total // block_bytes)
    for name, peer in group.turn(0):
        with group.noted(name):
            place = folder / "".join(filter(str.isalnum, name))
            peer.ask(
                "open",
                folder=str(place),
                block_bytes=block_bytes,
                count=count,
                threads=sizes.threads,
                direct=direct,
                memory=memory,
            )
            _file_round(peer, folder)  # to warm up
    for number in range(sizes.rounds):
        for name, peer in group.turn(number):
            with group.noted(name):
                for verb, (wall, cpu) in _file_round(peer, folder).items():
                    rows[verb].add(name, count * block_bytes / GB / wall)
                    work[verb].add(name, cpu / (count * block_bytes / GIB))
    for name, peer in group.turn(0):
        with group.noted(name):
            peer.ask("close")


@contextlib.contextmanager
def _memory(size: int) -> Iterator[str]:
    """Give a file of random bytes, and as many zeroes, that all subjects have as their memory.

    A disk's direct I/O is up to twice as fast where pages lie together, which is luck.
    """
    fd = os.memfd_create("kvtierd-peers", os.MFD_CLOEXEC)
    try:
        for part in range(0, size, MIB):
            os.pwrite(fd, os.urandom(min(MIB, size - part)), part)
        for part in range(size, 2 * size, MIB):
            os.pwrite(fd, bytes(min(MIB, 2 * size - part)), part)
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def _file_round(peer: Running, folder: Path) -> dict[str, tuple[float, float]]:
    _sync(folder)  # nobody pays for what another one wrote
    seconds = {"store": peer.ask("store"), "load": peer.ask("load")}
    if wrong := peer.ask("wrong"):
        raise PeerError(f"{wrong} blocks came back with other bytes")
    peer.ask("wipe")
    return seconds

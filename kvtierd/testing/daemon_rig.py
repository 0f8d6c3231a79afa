"""A running daemon under test: clients on its socket, a router on its stream, its files and its status.

For black-box tests. The router joins before the first store and records what it folded;
:meth:`DaemonRig.agree` compares its state with the daemon's inventory at a quiet point. Blocks hold the bytes
that their keys stand for (:func:`kvtierd.testing.workload.payload`); they are 4 KiB, unless the rig's layout
says otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtierd.client import BlockKey, Client, Group, Layout, Scope, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.consumer import ReferenceConsumer, residencies
from kvtierd.testing.local_daemon import LocalDaemon, is_idle
from kvtierd.testing.on_disk import Copy, copies
from kvtierd.testing.workload import Chain, WorkBlock, payload
from kvtierd.wire.kvevents import BlockRemoved, BlockStored, EventBatch

BLOCK = 4096
FILE = 8192
"""Bytes that one block of ``LAYOUT`` takes on disk: a header of 4096 and the payload."""
BIG_BLOCK = 512 << 10


def layout_of(model: str, block_bytes: int) -> Layout:
    """Return a layout with one group of blocks of this size."""
    groups = (Group(tokens_per_block=4, block_bytes=block_bytes),)
    return Layout(model=model, dtype="float16", layout="test", groups=groups)


LAYOUT = layout_of("tiny", BLOCK)
"""Blocks that a filesystem tier packs into segments."""
BIG = layout_of("big", BIG_BLOCK)
"""Blocks that have a file each."""
CPU: dict[str, Any] = {"name": "cpu", "type": "cpu", "policy": "lru"}


def chain(count: int, seed: str = "chain") -> list[WorkBlock]:
    """Return ``count`` blocks, each the parent of the next; other seeds share no block."""
    row = Chain(4, seed.encode())
    row.extend(list(range(4 * count)))
    return row.blocks


def loose(count: int, prefix: str = "b") -> list[WorkBlock]:
    """Return blocks that have nothing to do with each other."""
    return [chain(1, f"{prefix}{number}")[0] for number in range(count)]


def keys_of(blocks: Sequence[WorkBlock]) -> list[BlockKey]:
    """Return the keys of blocks."""
    return [block.key for block in blocks]


def fs_tier(folder: Path, name: str = "disk", **options: Any) -> dict[str, Any]:
    """Return a tier file's entry of an FS tier below ``folder``."""
    return {"name": name, "type": "fs", "path": str(folder / name), "max_bytes": "unlimited", **options}


def store(
    session: Session, blocks: Sequence[WorkBlock], *, scope: Scope | None = None, rich: bool = True
) -> tuple[BlockKey, ...]:
    """Store blocks, with metadata if ``rich``; return the keys that are visible then."""
    metas = [block.meta for block in blocks] if rich else None
    job = session.prepare_store(keys_of(blocks), meta=metas, scope=scope)
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, len(view))
    return job.commit()


def load(
    session: Session, blocks: Sequence[WorkBlock], *, scope: Scope | None = None, deadline: float = 5.0
) -> list[str]:
    """Load blocks and prove their bytes; return the tiers that served the leading ones.

    Raises:
        AssertionError: wrong bytes, or keys that are no prefix of those asked for.
    """
    with session.load(keys_of(blocks), deadline=deadline, scope=scope) as got:
        assert list(got.keys) == keys_of(blocks)[: len(got.keys)], "no prefix"
        for key, view in zip(got.keys, got.views(), strict=True):
            assert bytes(view) == payload(key, len(view)), f"wrong bytes for {key!r}"
        return list(got.sources)


class Router(ReferenceConsumer):
    """The reference consumer with a record of what it folded."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []
        self.following = False

    def fold(self, batch: EventBatch) -> None:
        """Record the batch, then apply it."""
        self.batches.append(batch)
        super().fold(batch)

    @property
    def events(self) -> list[BlockStored | BlockRemoved]:
        """All placement changes so far, in order."""
        return [
            event
            for batch in self.batches
            for event in batch.events
            if isinstance(event, BlockStored | BlockRemoved)
        ]

    def told(self, block: WorkBlock) -> list[tuple[str, str | None, str | None]]:
        """Return what was said of a block, in order: (event type, medium, locality)."""
        return [
            (type(event).__name__, event.medium, event.locality)
            for event in self.events
            if block.meta.hashes[0] in event.block_hashes
        ]


class DaemonRig:
    """One daemon on ``folder``, which has to be short (see :class:`LocalDaemon`).

    ``tiers`` replaces the one FS tier below the pool of ``slots`` blocks of ``layout``; ``changes`` replaces
    other sections of the tier file. Every layout that :meth:`attach` is called with is compared in
    :meth:`agree`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layout: Layout = LAYOUT,
        slots: int = 64,
        disk_bytes: int = 1 << 30,
        tiers: Sequence[dict[str, Any]] | None = None,
        changes: dict[str, Any] | None = None,
        heartbeat: str = "30ms",
        paranoid: bool = True,
        python: str = sys.executable,
    ) -> None:
        sections = {"engine": {"shutdown_grace": "4s"}, **(changes or {})}
        if tiers is not None:
            sections["tiers"] = [CPU, *tiers]
        self.folder = folder
        self.layout = layout
        pool_bytes = slots * layout.groups[0].block_bytes
        self.daemon = LocalDaemon(
            folder,
            pool_bytes=pool_bytes,
            disk_bytes=disk_bytes,
            changes=sections,
            paranoid=paranoid,
            python=python,
        )
        self.edit(lambda body: body["events"].update(heartbeat=heartbeat))
        self.client = Client(self.daemon.socket, deadline=10.0)
        self.router = Router()
        self.layouts: set[Layout] = set()
        self._counted: dict[str, Counter[str]] = {}

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the tier file for the next start; its FS tiers have a file for each block of ``BIG``."""
        body = json.loads(self.daemon.config.read_text())
        change(body)
        for tier in body["tiers"]:
            if tier["type"] == "fs":
                tier.setdefault("pack_below", f"{BIG_BLOCK}B")
        self.daemon.config.write_text(json.dumps(body))

    # -- life ---------------------------------------------------------------------------------------

    def start(self) -> DaemonRig:
        """Start the daemon and wait until the router hears it."""
        self._counted.clear()
        self.daemon.start()
        self.follow(self.router)
        return self

    def restart(self, *, crash: bool = False) -> DaemonRig:
        """Stop and start the daemon; after a crash a new router takes the place of the old one.

        Raises:
            AssertionError: the stop did not end with exit code 0.
        """
        if crash:
            self.daemon.kill()
            self.router.close()
            self.router = Router()
        else:
            code = self.daemon.stop()
            assert code == 0, f"exit code {code}: {self.daemon.log_tail()}"
        return self.start()

    def renew(self) -> bool:
        """Make the running daemon as good as a new one: no session, no block, no past; whether it is.

        Only :meth:`counter` forgets: other figures of the status go on.
        """
        if self.daemon.pid is None or not self.layouts <= {self.layout}:
            return False
        with self.attach(engine_id="cleaner") as session:
            session.reset()
        self.client.close()
        try:
            status = wait_for(self._clean, "nobody to be left", timeout=3.0)
        except TimeoutError:
            return False
        assert status is not None
        self.catch_up(self.router, status)
        self.router.batches.clear()
        self.router.counts.clear()
        self.layouts.clear()
        self._counted = {tier["name"]: Counter(tier["counters"]) for tier in status["tiers"]}
        return not self.router.resident

    def _clean(self) -> dict[str, Any] | None:
        status = self._idle()
        if status is None or status["sessions"] or status["quarantined_slots"]:
            return None
        wrong = (tier["blocks"] or tier.get("condition", "ok") != "ok" for tier in status["tiers"])
        return None if any(wrong) else status

    def close(self) -> None:
        """Close everything and stop the daemon if it runs."""
        self.client.close()
        self.router.close()
        self.daemon.stop()

    # -- asking -------------------------------------------------------------------------------------

    def attach(self, layout: Layout | None = None, **options: Any) -> Session:
        """Attach a scheduler session of engine ``e0``, unless the options say otherwise."""
        layout = layout or self.layout
        self.layouts.add(layout)
        return self.client.attach(layout, **{"engine_id": "e0", **options})

    def status(self) -> dict[str, Any]:
        """Return the daemon's status."""
        return self.client.status()

    def tier(self, name: str) -> dict[str, Any]:
        """Return one tier's part of the status."""
        found: dict[str, Any] = next(tier for tier in self.status()["tiers"] if tier["name"] == name)
        return found

    def counter(self, tier: str, name: str) -> int:
        """Return a tier's counter: since the start, or since the rig was renewed in the same run."""
        before = self._counted.get(tier, Counter())
        return int(self.tier(tier)["counters"].get(name, 0)) - before[name]

    def copies(self, *, root: str = "disk") -> dict[BlockKey, Copy]:
        """Return where the blocks of the rig's layout lie below a filesystem tier's root."""
        return copies(self.folder / root, self.layout.namespace())

    @contextmanager
    def descriptors(self, spare: int) -> Iterator[None]:
        """Leave the daemon only ``spare`` file descriptors more than it has open."""
        pid = self.daemon.pid
        assert pid is not None
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = self._open_descriptors()
        free = (number for number in itertools.count() if number not in used)
        limit = next(itertools.islice(free, spare, None))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def _open_descriptors(self) -> set[int]:
        """Return the descriptors that stay open: a closed connection's take a moment to go."""
        seen: list[set[int]] = []

        def steady() -> bool:
            seen.append(set(map(int, os.listdir(f"/proc/{self.daemon.pid}/fd"))))
            return len(seen) > 4 and all(other == seen[-1] for other in seen[-4:])

        wait_for(steady, "the daemon's descriptors to stay the same")
        return seen[-1]

    def resources(self) -> tuple[int, float]:
        """Return the daemon's resident bytes and the seconds of processor time it used."""
        fields = Path(f"/proc/{self.daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), sum(map(int, fields[11:13])) / os.sysconf(
            "SC_CLK_TCK"
        )

    def complaints(self) -> list[str]:
        """Return what the daemon logged and should never have to; that it would not start is none of it."""
        lines = self.daemon.log.read_text(errors="replace").splitlines() if self.daemon.log.exists() else []
        return [
            line
            for line in lines
            if re.search(r' (ERROR|CRITICAL) |"level": "(error|critical)"|Traceback', line)
            and not re.search(r' CRITICAL kvtierd: |"event": "failed"', line)
        ]

    # -- quiet points -------------------------------------------------------------------------------

    def follow(self, router: Router) -> Router:
        """Connect a router unless it is, and wait until it hears the daemon."""
        if not router.following:
            router.connect(self.daemon.endpoint, self.daemon.replay)
            router.following = True
        heard = router.counts["batches"]
        router.wait_for(lambda r: r.counts["batches"] > heard and r.wanted is None, what="a batch")
        return router

    def settle(self) -> dict[str, Any]:
        """Wait until nothing is under way and the router heard everything; return the status."""
        status = wait_for(self._idle, "the daemon to be idle", poll=0.003)
        assert status is not None
        self.catch_up(self.router, status)
        return status

    def catch_up(self, router: Router, status: dict[str, Any] | None = None) -> Router:
        """Wait until a router heard the last batch that the status (default: a new one) tells of."""
        last = (status or self.status())["events"]["sequence"]
        if last is not None:
            router.wait_for(lambda r: (r.expected or 0) > last and r.wanted is None, what=f"batch {last}")
        return router

    def _idle(self) -> dict[str, Any] | None:
        status = self.status()
        return status if is_idle(status) else None

    def agree(self, *others: Router) -> None:
        """Check that what the router (and every other one given) folded is what the daemon has.

        Tiers whose events are off are left out.

        Raises:
            AssertionError: it is not.
        """
        status = self.settle()
        tiers = json.loads(self.daemon.config.read_text())["tiers"]
        hidden = frozenset(tier["name"] for tier in tiers if not tier.get("events", True))
        truth = set()
        for layout in self.layouts:
            with self.client.attach(layout, engine_id="auditor") as session:
                truth |= residencies(session.inventory(), hidden=hidden)
        for router in (self.router, *others):
            self.catch_up(router, status)
            assert router.resident == truth, (router.resident - truth, truth - router.resident)
            assert router.counts["unknown_removals"] == 0, router.counts
        assert status["events"]["unmatched_removals"] == 0, status["events"]

# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""The pages of one host pool of SGLang's, in a namespace of their own at the daemon."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvtierd.client import Client, Session
from kvtierd.core.model import BlockKey, BlockMeta, Group, KeyState, Layout, SkipReason, block_key, hash_of
from kvtierd.engines.guard import Guard
from kvtierd.engines.sglang.settings import Settings
from kvtierd.errors import KvtierdError

logger = logging.getLogger(__name__)

_THERE = (SkipReason.RESIDENT, SkipReason.PENDING)
_HEX = 64
_LOOK_AGAIN = 0.002


def to_key(page: str, group: int = 0) -> BlockKey:
    """Return the key of a page: SGLang's SHA-256 in hex; any other name is hashed."""
    if len(page) == _HEX:
        try:
            return block_key(bytes.fromhex(page), group)
        except ValueError:
            pass
    return block_key(hashlib.sha256(page.encode()).digest(), group)


def to_event_hash(page: str) -> int:
    """Return the hash that SGLang's own events name a page by: its first 64 bits (here unsigned)."""
    return int.from_bytes(hash_of(to_key(page))[:8], "big")


class Pages:
    """One host pool. Reads and writes have a connection each: a load that waits holds up no backup.

    ``group`` is its number in keys and events: pools of one engine have pages of the same name, and a router
    must not take the one for the other. Without a daemon, or with one that refuses this engine (logged),
    every page is a miss.
    """

    def __init__(
        self, pool: Any, config: Any, settings: Settings, engine: str, group: int, guard: Guard
    ) -> None:
        page = pool.get_dummy_flat_data_page()
        self._pool, self._group = pool, group
        self._page_size, self._dtype = pool.page_size or 1, page.dtype
        self._settings, self._guard = settings, guard
        self._clients: list[Client] = []
        self.layout = _layout(pool, config, settings, page.numel() * page.element_size(), group)
        self.reader = self._open(engine, config.dp_rank)
        self.writer = self._open(f"{engine}-backup", config.dp_rank)

    def _open(self, engine: str, dp_rank: int) -> Session | None:
        client = Client(self._settings.socket, deadline=self._settings.deadline)
        self._clients.append(client)
        try:
            return client.attach(self.layout, engine_id=engine, dp_rank=dp_rank, role="scheduler")
        except KvtierdError as error:
            logger.error("kvtierd: the daemon refuses this engine, which runs without storage: %s", error)
            return None

    def there(self, keys: Sequence[str]) -> list[bool]:
        """Say of each page whether it is in any tier, or may be and is still looked for."""
        session = self.reader
        nowhere = [False] * len(keys)
        if session is None or not keys:
            return nowhere
        wanted = [to_key(key, self._group) for key in keys]
        return self._guard.call("lookup", lambda: self._known(session, wanted), nowhere)

    def _known(self, session: Session, wanted: Sequence[BlockKey]) -> list[bool]:
        """Look, and again while tiers that other daemons write to are asked, within one call's bound."""
        until = time.monotonic() + self._settings.deadline
        while True:
            states = session.lookup(wanted, touch=True).states
            if KeyState.PENDING not in states or time.monotonic() >= until:
                return [state is not KeyState.MISS for state in states]
            time.sleep(_LOOK_AGAIN)

    # -- between the daemon and the host pool -----------------------------------------------------------

    def fetch(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Load pages into the host pool; ``host_indices``: ``page_size`` token slots for each."""
        starts = self._starts(keys, host_indices)
        if starts is None:
            return [False] * len(keys)
        return self.load(
            keys,
            lambda number, page: self._pool.set_from_flat_data_page(starts[number], page.view(self._dtype)),
        )

    def back_up(self, keys: Sequence[str], host_indices: torch.Tensor, parent: str | None) -> list[bool]:
        """Store pages of the host pool; ``parent``: the page before the first."""
        starts = self._starts(keys, host_indices)
        if starts is None:
            return [False] * len(keys)
        return self.store(keys, lambda number: self._pool.get_data_page(starts[number], flat=True), parent)

    def _starts(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int] | None:
        """Return the first token slot of each page, ``None`` where there are not as many as pages."""
        starts = [] if host_indices is None else host_indices[:: self._page_size].tolist()
        if len(starts) == len(keys):
            return starts
        self._guard.report("call", f"{len(keys)} pages for {len(starts)} places: none is moved")
        return None

    def load(self, keys: Sequence[str], take: Callable[[int, torch.Tensor], None]) -> list[bool]:
        """Give ``take`` each leading page that could be had, as bytes that are valid during the call."""
        session, taken = self.reader, 0
        if session is None or not keys:
            return [False] * len(keys)
        wanted = [to_key(key, self._group) for key in keys]

        def load() -> None:
            nonlocal taken
            with session.load(wanted, deadline=self._settings.promotion_deadline) as got:
                for view in got.views():
                    take(taken, torch.frombuffer(view, dtype=torch.uint8))
                    taken += 1

        self._guard.call("load", load, None)
        return [number < taken for number in range(len(keys))]

    def store(
        self, keys: Sequence[str], page: Callable[[int], torch.Tensor], parent: str | None
    ) -> list[bool]:
        """Store pages; say of each whether it is there now."""
        session = self.writer
        if session is None or not keys:
            return [False] * len(keys)
        wanted = {to_key(key, self._group): number for number, key in enumerate(keys)}

        def store() -> set[BlockKey]:
            job = session.prepare_store(list(wanted), meta=_metas(list(keys), parent))
            there = {skipped.key for skipped in job.skipped if skipped.reason in _THERE}
            try:
                for key, view in zip(job.keys, job.views(), strict=True):
                    source = page(wanted[key]).contiguous().view(torch.uint8).numpy().reshape(-1)
                    np.frombuffer(view, np.uint8)[:] = source
            except BaseException:
                job.abort()
                raise
            return there | set(job.commit())

        nothing: set[BlockKey] = set()
        stored = self._guard.call("store", store, nothing)
        return [to_key(key, self._group) in stored for key in keys]

    # -- life --------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove every page of this namespace from every tier."""
        if self.writer is not None:
            self._guard.call("reset", self.writer.reset, None)

    def close(self) -> None:
        """Say goodbye."""
        clients, self._clients = self._clients, []
        self.reader = self.writer = None
        for client in clients:
            self._guard.call("close", client.close, None)


def _layout(pool: Any, config: Any, settings: Settings, page_bytes: int, group: int) -> Layout:
    """Gather everything that changes a page's bytes.

    Every rank is a namespace of its own, but for the main pool of models whose ranks hold the same bytes.
    """
    rank = "all" if config.is_mla_model and group == 0 else f"{config.tp_rank}"
    parts = (
        "sglang",
        type(pool).__name__,
        pool.layout,
        getattr(pool, "storage_format_tag", None) or "",
        f"tp{rank}of{config.tp_size}",
        f"pp{config.pp_rank}of{config.pp_size}",
        f"cp{config.attn_cp_rank}of{config.attn_cp_size}",
        f"dcp{config.dcp_rank}of{config.dcp_size}",
        f"layers{getattr(pool, 'start_layer', '')}to{getattr(pool, 'end_layer', '')}",
    )
    pages = Group(tokens_per_block=pool.page_size or 1, block_bytes=page_bytes)
    return Layout(
        model=config.model_name or "unnamed",
        revision=settings.weights_id,
        dtype=str(pool.dtype),
        layout="/".join(parts),
        groups=(*(Group(tokens_per_block=1, block_bytes=1),) * group, pages),
        hash_algorithm="sglang-sha256",
        tenant=settings.tenant,
    )


def _metas(keys: list[str], parent: str | None) -> list[BlockMeta]:
    """Name each page and the one before it. SGLang tells a backend no token, so the events have none."""
    before = [parent, *keys[:-1]]
    return [
        BlockMeta(hashes=(to_event_hash(key),), parent=to_event_hash(last) if last else None)
        for key, last in zip(keys, before, strict=True)
    ]

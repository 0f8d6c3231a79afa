# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""A HiCache storage backend: SGLang's host pages go to and come from a kvtierd daemon.

SGLang's prefetch and backup threads call it, each page by a hash that covers all tokens up to its end. Every
rank is a namespace of its own (SGLang itself agrees on the prefix that all ranks have), except for models
whose ranks hold the same bytes. Trouble with the daemon is a miss, never an exception.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtierd.client import Client, Session
from kvtierd.core.model import BlockKey, BlockMeta, Group, KeyState, Layout, SkipReason, block_key, hash_of
from kvtierd.engines.guard import Guard
from kvtierd.engines.sglang.settings import Settings
from kvtierd.errors import KvtierdError

logger = logging.getLogger(__name__)

_THERE = (SkipReason.RESIDENT, SkipReason.PENDING)
_HEX = 64


def to_key(page: str) -> BlockKey:
    """Return the key of a page: SGLang's SHA-256 in hex; any other name is hashed."""
    if len(page) == _HEX:
        try:
            return block_key(bytes.fromhex(page))
        except ValueError:
            pass
    return block_key(hashlib.sha256(page.encode()).digest())


def to_event_hash(page: str) -> int:
    """Return the hash that SGLang's own events name a page by: its first 64 bits (here unsigned)."""
    return int.from_bytes(hash_of(to_key(page))[:8], "big")


class KvtierdStorage(HiCacheStorage):
    """``dynamic`` backend, with ``interface_v1`` or without.

    Reads and writes have a connection each, so that a load that waits for a slow tier holds up no backup.
    Without a daemon, or with one that refuses this engine (logged), every page is a miss.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._settings = Settings.of(storage_config.extra_config)
        self._guard = Guard(logger)
        self._clients: list[Client] = []
        self._reader: Session | None = None
        self._writer: Session | None = None
        self._page_size = 1
        self._dtype = torch.uint8

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn what a page is, and attach."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        self._page_size, self._dtype = mem_pool_host.page_size, page.dtype
        layout = self._layout(mem_pool_host, page.numel() * page.element_size())
        engine = f"sglang-{uuid.uuid4().hex[:12]}"
        self.close()
        self._reader, self._writer = self._open(layout, engine), self._open(layout, f"{engine}-backup")

    def _open(self, layout: Layout, engine: str) -> Session | None:
        client = Client(self._settings.socket, deadline=self._settings.deadline)
        self._clients.append(client)
        try:
            return client.attach(layout, engine_id=engine, dp_rank=self._config.dp_rank, role="scheduler")
        except KvtierdError as error:
            logger.error("kvtierd: the daemon refuses this engine, which runs without storage: %s", error)
            return None

    def _layout(self, pool: Any, page_bytes: int) -> Layout:
        """Gather everything that changes a page's bytes."""
        config = self._config
        rank = "all" if config.is_mla_model else f"{config.tp_rank}"
        parts = (
            "sglang",
            type(pool).__name__,
            pool.layout,
            getattr(pool, "storage_format_tag", None) or "",
            f"tp{rank}of{config.tp_size}",
            f"pp{config.pp_rank}of{config.pp_size}",
            f"cp{config.attn_cp_rank}of{config.attn_cp_size}",
            f"dcp{config.dcp_rank}of{config.dcp_size}",
            f"layers{pool.start_layer}to{pool.end_layer}",
        )
        return Layout(
            model=config.model_name or "unnamed",
            revision=self._settings.weights_id,
            dtype=str(pool.dtype),
            layout="/".join(parts),
            groups=(Group(tokens_per_block=pool.page_size, block_bytes=page_bytes),),
            hash_algorithm="sglang-sha256",
            tenant=self._settings.tenant,
        )

    # -- what is there ---------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is in any tier."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are in any tier."""
        session = self._reader
        if session is None:
            return 0
        wanted = [to_key(key) for key in keys]

        def ask() -> int:
            states = session.lookup(wanted).states
            return next((n for n, state in enumerate(states) if state is KeyState.MISS), len(states))

        return self._guard.call("lookup", ask, 0)

    # -- loads -----------------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; ``host_indices``: ``page_size`` token slots for each."""
        pool, starts = self.mem_pool_host, host_indices[:: self._page_size].tolist()
        return self._load(
            keys, lambda number, page: pool.set_from_flat_data_page(starts[number], page.view(self._dtype))
        )

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages as tensors: the given ones, filled, or new ones."""
        found: list[torch.Tensor | None] = [None] * len(keys)

        def take(number: int, page: torch.Tensor) -> None:
            if target_locations is None:
                found[number] = page.clone().view(self._dtype)
                return
            target_locations[number].view(torch.uint8).copy_(page)
            found[number] = target_locations[number]

        self._load(keys, take)
        return found

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load one page."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def _load(self, keys: Sequence[str], take: Callable[[int, torch.Tensor], None]) -> list[bool]:
        """Give ``take`` each leading page that could be had, as bytes that are valid during the call."""
        session, taken = self._reader, 0
        if session is None or not keys:
            return [False] * len(keys)
        wanted = [to_key(key) for key in keys]

        def load() -> None:
            nonlocal taken
            with session.load(wanted, deadline=self._settings.promotion_deadline) as got:
                for view in got.views():
                    take(taken, torch.frombuffer(view, dtype=torch.uint8))
                    taken += 1

        self._guard.call("load", load, None)
        return [number < taken for number in range(len(keys))]

    # -- stores ----------------------------------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool."""
        pool, starts = self.mem_pool_host, host_indices[:: self._page_size].tolist()
        prefix = getattr(extra_info, "prefix_keys", None) or []
        parent = prefix[-1] if prefix else None
        return self._store(keys, lambda number: pool.get_data_page(starts[number], flat=True), parent)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages given as tensors; whether all of them are there now."""
        return all(self._store(keys, lambda number: values[number], None))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page."""
        return self.batch_set([key], [value])

    def _store(
        self, keys: Sequence[str], page: Callable[[int], torch.Tensor], parent: str | None
    ) -> list[bool]:
        session = self._writer
        if session is None or not keys:
            return [False] * len(keys)
        wanted = {to_key(key): number for number, key in enumerate(keys)}

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
        return [to_key(key) in stored for key in keys]

    # -- life ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove every page of this rank's namespace from every tier."""
        if self._writer is not None:
            self._guard.call("reset", self._writer.reset, None)

    def close(self) -> None:
        """Say goodbye."""
        clients, self._clients = self._clients, []
        self._reader = self._writer = None
        for client in clients:
            self._guard.call("close", client.close, None)


def _metas(keys: list[str], parent: str | None) -> list[BlockMeta]:
    """Name each page and the one before it. SGLang tells a backend no token, so the events have none."""
    before = [parent, *keys[:-1]]
    return [
        BlockMeta(hashes=(to_event_hash(key),), parent=to_event_hash(last) if last else None)
        for key, last in zip(keys, before, strict=True)
    ]

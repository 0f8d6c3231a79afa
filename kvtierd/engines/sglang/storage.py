# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""A HiCache storage backend: SGLang's host pages go to and come from a kvtierd daemon.

SGLang's prefetch and backup threads call it, each page by a hash that covers all tokens up to its end. Every
rank is a namespace of its own (SGLang itself agrees on the prefix that all ranks have), except for models
whose ranks hold the same bytes; so is every host pool beside the main one. Trouble with the daemon is a miss,
never an exception.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvtierd.engines.guard import Guard
from kvtierd.engines.sglang.pages import Pages
from kvtierd.engines.sglang.settings import Settings

logger = logging.getLogger(__name__)

_GROUPS = {name.value: number for number, name in enumerate(PoolName)}
"""Pools' numbers in keys and events; the main one (``kv``) is 0."""


class KvtierdStorage(HiCacheStorage):
    """``dynamic`` backend, with ``interface_v1`` or without, for one host pool or several (v2)."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._settings = Settings.of(storage_config.extra_config)
        self._guard = Guard(logger)
        self._engine = f"sglang-{uuid.uuid4().hex[:12]}"
        self._pages: dict[str, Pages] = {}
        self._dtype = torch.uint8

    @property
    def _main(self) -> Pages | None:
        return self._pages.get(PoolName.KV.value)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn what a page is, and attach."""
        super().register_mem_pool_host(mem_pool_host)
        self._dtype = mem_pool_host.get_dummy_flat_data_page().dtype
        self._attach(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Attach a pool beside the main one: a sliding window's, an indexer's, one of recurrent state."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._attach(PoolName(host_pool_name).value, host_pool)

    def _attach(self, name: str, pool: Any) -> None:
        if (before := self._pages.pop(name, None)) is not None:
            before.close()
        group = _GROUPS[name]
        engine = self._engine if group == 0 else f"{self._engine}-{name}"
        self._pages[name] = Pages(pool, self._config, self._settings, engine, group, self._guard)

    # -- what is there ---------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is in any tier."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are in any tier."""
        return 0 if self._main is None else _leading(self._main.there(keys))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the longest prefix that all pools can restore, what each has of it, and all such prefixes.

        A pool either needs every page of the prefix or its last ones (a window, a state).
        """
        hits = self.batch_exists(keys)
        found = {PoolName.KV: hits} if hits else {}
        restorable = list(range(1, hits + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            own = self._restorable(transfer, keys[:hits])
            if own:
                found[transfer.name] = max(own)
            restorable = [length for length in restorable if length in own]
        return PoolTransferResult(restorable[-1] if restorable else 0, found, restorable)

    def _restorable(self, transfer: Any, keys: list[str]) -> set[int]:
        """Return the lengths of prefixes of ``keys`` for which a pool has what it needs.

        Raises:
            ValueError: a policy that this does not know; SGLang takes that for no hit.
        """
        pages = self._pages.get(PoolName(transfer.name).value)
        there = [False] * len(keys) if pages is None else pages.there(keys)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, _leading(there) + 1))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
            return {end for end in range(1, len(keys) + 1) if all(there[max(0, end - window) : end])}
        raise ValueError(f"kvtierd: pool {transfer.name}: unknown hit policy {transfer.hit_policy}")

    # -- loads -----------------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; ``host_indices``: ``page_size`` token slots for each."""
        return [False] * len(keys) if self._main is None else self._main.fetch(keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of several pools; of each the leading ones that could be had."""
        done = {}
        for transfer in transfers:
            pages, keys = self._pages.get(PoolName(transfer.name).value), transfer.keys or []
            done[transfer.name] = (
                [False] * len(keys) if pages is None else pages.fetch(keys, transfer.host_indices)
            )
        return done

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

        if self._main is not None:
            self._main.load(keys, take)
        return found

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load one page."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    # -- stores ----------------------------------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool."""
        if self._main is None:
            return [False] * len(keys)
        return self._main.back_up(keys, host_indices, _parent(extra_info))

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools; say of each page whether it is there now."""
        done = {}
        for transfer in transfers:
            pages, keys = self._pages.get(PoolName(transfer.name).value), transfer.keys or []
            done[transfer.name] = (
                [False] * len(keys)
                if pages is None
                else pages.back_up(keys, transfer.host_indices, _parent(extra_info))
            )
        return done

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages given as tensors; whether all of them are there now."""
        if self._main is None:
            return not keys
        return all(self._main.store(keys, lambda number: values[number], None))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page."""
        return self.batch_set([key], [value])

    # -- life ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove every page of this rank's namespaces from every tier."""
        for pages in self._pages.values():
            pages.clear()

    def close(self) -> None:
        """Say goodbye."""
        for pages in self._pages.values():
            pages.close()
        self._pages.clear()


def _leading(there: Sequence[bool]) -> int:
    return next((number for number, found in enumerate(there) if not found), len(there))


def _parent(extra_info: Any) -> str | None:
    prefix = getattr(extra_info, "prefix_keys", None) or []
    return prefix[-1] if prefix else None

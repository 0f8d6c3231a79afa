"""What an engine imports to use the daemon: a blocking and an asyncio client with the same verbs.

A miss is a value: while no daemon is there, every verb answers at once that nothing is cached and nothing was
stored. Standard library and msgspec only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvtierd.client.blocking import Client, Job, Loaded, Lookup, Session
from kvtierd.core.effects import InventoryEntry, Skipped
from kvtierd.core.model import (
    BlockKey,
    BlockMeta,
    Group,
    KeyState,
    Layout,
    Scope,
    SkipReason,
    block_key,
    group_of,
    hash_of,
)
from kvtierd.core.stimuli import Role
from kvtierd.errors import RequestRefused, Unavailable

if TYPE_CHECKING:
    from kvtierd.client.asynchronous import AsyncClient, AsyncJob, AsyncLoaded, AsyncLookup, AsyncSession

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncLoaded",
    "AsyncLookup",
    "AsyncSession",
    "BlockKey",
    "BlockMeta",
    "Client",
    "Group",
    "InventoryEntry",
    "Job",
    "KeyState",
    "Layout",
    "Loaded",
    "Lookup",
    "RequestRefused",
    "Role",
    "Scope",
    "Session",
    "SkipReason",
    "Skipped",
    "Unavailable",
    "block_key",
    "group_of",
    "hash_of",
]


def __getattr__(name: str) -> Any:
    """Import the asyncio client when it is first asked for: asyncio is a third of a command's start."""
    if name in __all__ and name.startswith("Async"):
        return getattr(importlib.import_module("kvtierd.client.asynchronous"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Opens tiers' storage for the tools that work without a daemon, unless a living one owns it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvtierd.errors import ConfigError, ExitCode, KvtierdError, TierError, Unavailable

if TYPE_CHECKING:
    from kvtierd.config.schema import StorageTier, TierFile
    from kvtierd.edges.backends.base import Backend
    from kvtierd.edges.backends.fs_upkeep import FsUpkeep

_HEX = re.compile(r"[0-9a-f]{24,}")
_SHOWN_HEX = 12
"""Digits; as many as anybody needs for ``--keep`` or a search."""
_BY_PATH = "path"


class StorageError(KvtierdError):
    """Storage that was named by its path cannot be used."""

    exit_code = ExitCode.IO


def shortened(name: str) -> str:
    """Return a name for a row of a table: the hashes in it cut, which ``--json`` gives in full."""
    return _HEX.sub(lambda found: f"{found.group()[:_SHOWN_HEX]}…", name)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which storage is meant."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", metavar="F", help="the tiers of this tier file")
    where.add_argument("--path", metavar="ROOT", help="the folder of a filesystem tier")
    parser.add_argument("--tier", metavar="T", help="only this tier of the tier file")


def tiers(args: argparse.Namespace) -> tuple[TierFile | None, list[StorageTier]]:
    """Return the tiers that the arguments of :func:`add_storage` mean, and the tier file if there is one.

    Raises:
        ConfigError: there is no such tier, or the tier file is wrong.
    """
    from kvtierd.config.load import load_tier_file
    from kvtierd.config.schema import CpuTier, FsTier

    if args.path is not None:
        if args.tier is not None:
            raise ConfigError("--tier chooses among the tiers of a --config")
        return None, [FsTier(name=_BY_PATH, path=Path(args.path).absolute(), max_bytes="unlimited")]
    tier_file = load_tier_file(args.config, os.environ).tier_file
    stored = [tier for tier in tier_file.tiers if not isinstance(tier, CpuTier)]
    chosen = [tier for tier in stored if args.tier in (None, tier.name)]
    if args.tier is not None and not chosen:
        names = ", ".join(tier.name for tier in stored) or "none"
        raise ConfigError(f"{args.config}: no tier below the pool is named {args.tier!r}; there are: {names}")
    return tier_file, chosen


def refuse_if_alive(tier_file: TierFile | None, names: list[str]) -> None:
    """Refuse tiers whose daemon answers.

    Raises:
        TierError: it does.
    """
    from kvtierd.client import Client

    if tier_file is None or not names:
        return
    path = tier_file.runtime_dir / "control.sock"
    try:
        pid = Client(str(path), deadline=2.0).status().get("pid", "unknown")
    except Unavailable:
        return
    raise TierError(names[0], f"the daemon with process id {pid} uses it ({path}): stop it first")


@contextlib.contextmanager
def opened(tier: StorageTier, *, by_path: bool) -> Iterator[Backend | FsUpkeep]:
    """Open a tier's storage; nothing is made where there is none. A filesystem is looked at without locks.

    ``by_path``: nobody named a tier, so errors name the path.

    Raises:
        TierError: it is not there, cannot be used, or somebody uses it.
        StorageError: the same ``by_path``.
    """
    try:
        with _opened(tier) as backend:
            yield backend
    except TierError as error:
        if not by_path:
            raise
        raise StorageError(str(error).removeprefix(f"tier {tier.name!r}: ")) from error


@contextlib.contextmanager
def _opened(tier: StorageTier) -> Iterator[Backend | FsUpkeep]:
    from kvtierd.config.schema import FsTier
    from kvtierd.edges.backends.factory import make_backend
    from kvtierd.edges.backends.fs_upkeep import FsUpkeep

    if isinstance(tier, FsTier):
        if not (tier.path / "v1").is_dir():
            raise TierError(tier.name, f"there is no kvtierd tree in {tier.path}")
        yield FsUpkeep(tier.name, tier.path)
        return
    backend = make_backend(tier)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()

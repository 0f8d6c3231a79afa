"""What ``reset`` and ``evict`` share: asking first, and telling what went. Light to import."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtierd.cli.common import text
from kvtierd.errors import KvtierdError

if TYPE_CHECKING:
    from kvtierd.core.effects import Removed


class Declined(KvtierdError):
    """Whoever was asked did not say yes."""


def confirm(what: str) -> None:
    """Ask on the terminal.

    Raises:
        Declined: the answer is not yes, or there is nobody to ask.
    """
    if not sys.stdin.isatty():
        raise Declined(f"{what}: nobody can be asked here; repeat it with --yes")
    print(f"{what}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined("nothing was changed")


def tell(removed: Removed, *, as_json: bool, would: bool) -> None:
    """Print what went, or would."""
    if as_json:
        print(json.dumps({"dry_run": would, **_plain(removed)}))
        return
    for line in lines(removed, would=would):
        print(line)


def summary(removed: Removed) -> str:
    """Return what went in words: blocks and bytes by tier."""
    from kvtierd.config.units import human_size

    parts = [
        f"{count:,} block{'s' if count != 1 else ''} ({human_size(removed.bytes[tier])}) from {text(tier)}"
        for tier, count in removed.blocks.items()
    ]
    return ", ".join(parts) or "no blocks"


def lines(removed: Removed, *, would: bool) -> Iterator[str]:
    """Yield what people read of it."""
    yield f"{'would remove' if would else 'removed'} {summary(removed)}"
    for namespace in removed.namespaces:
        yield f"  namespace {text(namespace)}"
    if removed.left:
        yield f"  {removed.left:,} more are in use, or parents of such, and stay"
    if removed.unknown:
        yield "  left alone, since no engine has told their model and tenant (name them with --namespace):"
        yield from (f"    {text(namespace)}" for namespace in removed.unknown)


def _plain(removed: Removed) -> dict[str, object]:
    return {
        "blocks": removed.blocks,
        "bytes": removed.bytes,
        "namespaces": list(removed.namespaces),
        "unknown": list(removed.unknown),
        "left": removed.left,
    }

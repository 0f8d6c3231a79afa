"""``kvtierd gc``: finds what no daemon needs in tiers' storage and removes it when told to."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvtierd.cli.common import table, text
from kvtierd.cli.main import Subparsers
from kvtierd.cli.storage import add_storage, opened, refuse_if_alive, shortened, tiers
from kvtierd.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from kvtierd.edges.backends.base import Maintained, StoredNamespace

NAME_WIDTH = 32
MODEL_WIDTH = 20
"""Cells, so that a row has at most about 120; ``--json`` gives names in full."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "gc",
        help="find and remove what no daemon needs in a tier's storage",
        description="List stale temporaries, quarantined blocks and namespaces in the storage of tiers, and"
        " remove with --yes what is marked so, unless a living daemon uses it. Namespaces are marked only"
        " when asked for: with --keep all that are not kept, with --unused-for those that were not used for"
        " so long, with both what is neither.",
    )
    add_storage(parser)
    parser.add_argument(
        "--keep", metavar="NS", action="append", default=[], help="a namespace to keep (or how it begins)"
    )
    parser.add_argument("--unused-for", metavar="T", type=_age, help="such as 30m, 12h or 30d")
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is changed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Look, print and perhaps remove; return 0."""
    from kvtierd.cli.progress import Progress
    from kvtierd.edges.backends.base import Maintained

    tier_file, chosen = tiers(args)
    if args.yes:
        refuse_if_alive(tier_file, [tier.name for tier in chosen])
    choice = Choice(tuple(args.keep), args.unused_for, time.time())
    items: list[Item] = []
    with contextlib.ExitStack() as stack:
        storages: dict[str, Maintained] = {}
        for tier in chosen:
            backend = stack.enter_context(opened(tier, by_path=args.path is not None))
            if isinstance(backend, Maintained):
                storages[tier.name] = backend
            elif not args.json:
                print(f"tier {tier.name}: {tier.type} storage keeps nothing that has to be collected")
        refuse_typos(choice.keep, storages.values())
        for name, storage in storages.items():
            with Progress(f"gc {name}", 0, quiet=args.json) as progress:
                items += collect(name, storage, choice, remove=args.yes, seen=progress.advance)
    for line in json_lines(items) if args.json else lines(items, removed=args.yes):
        print(line)
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class Choice:
    """Which namespaces are orphans: not kept, and unused for ``unused_for`` seconds before ``now``."""

    keep: tuple[str, ...]
    unused_for: float | None
    now: float

    def orphan(self, found: StoredNamespace) -> bool:
        """Say whether a namespace is one; none is unless it was asked for."""
        if not self.keep and self.unused_for is None:
            return False
        if any(found.namespace.startswith(name) for name in self.keep):
            return False
        return self.unused_for is None or found.used_at < self.now - self.unused_for


def refuse_typos(keep: Iterable[str], storages: Iterable[Maintained]) -> None:
    """Refuse to keep what is not there: everything else would go.

    Raises:
        ConfigError: no namespace begins so.
    """
    keep = list(keep)
    names = [space.namespace for storage in storages for space in storage.namespaces()] if keep else []
    for name in keep:
        if not any(known.startswith(name) for known in names):
            raise ConfigError(f"--keep {name}: no namespace begins so; nothing was changed")


@dataclass(frozen=True, slots=True)
class Item:
    """One thing found. ``marked``: it goes with ``--yes``; ``removed``: it went."""

    tier: str
    what: str
    name: str
    model: str
    blocks: int
    bytes: int
    unused_seconds: float | None
    marked: bool
    removed: bool


def collect(
    tier: str,
    backend: Maintained,
    choice: Choice,
    *,
    remove: bool,
    seen: Callable[[int, int], None] = lambda blocks, size: None,
) -> list[Item]:
    """Return all that is found in one tier's storage, and remove what is marked if ``remove``."""
    items = []
    leftovers = [("temporary", backend.stale_temporaries), ("quarantined", backend.quarantined)]
    for what, find in leftovers:
        for found in find(remove=remove):
            items.append(Item(tier, what, found.place, "", 0, found.bytes, None, True, remove))
            seen(0, found.bytes)
    for space in backend.namespaces():
        orphan = choice.orphan(space)
        if orphan and remove:
            backend.remove_namespace(space.namespace)
        unused = choice.now - space.used_at if space.used_at else None
        what = "orphan" if orphan else "namespace"
        removed = orphan and remove
        items.append(
            Item(tier, what, space.namespace, space.model, space.blocks, space.bytes, unused, orphan, removed)
        )
        seen(space.blocks, space.bytes)
    return items


def json_lines(items: Sequence[Item]) -> Iterator[str]:
    """Yield one JSON object per item."""
    for item in items:
        yield json.dumps(asdict(item))


def lines(items: Sequence[Item], *, removed: bool) -> Iterator[str]:
    """Yield a table for people and what it comes to."""
    from kvtierd.config.units import human_size

    if not items:
        yield "nothing found"
        return
    rows = [
        {
            "tier": item.tier,
            "what": item.what,
            "name": _clipped(shortened(text(item.name)), NAME_WIDTH),
            "model": _clipped(text(item.model), MODEL_WIDTH) or "-",
            "blocks": f"{item.blocks:,}" if item.blocks else "-",
            "bytes": human_size(item.bytes),
            "unused for": _days(item.unused_seconds),
            "decision": ("removed" if item.removed else "to be removed") if item.marked else "kept",
        }
        for item in items
    ]
    yield from table(rows, right=("blocks", "bytes"))
    marked = [item for item in items if item.marked]
    size = human_size(sum(item.bytes for item in marked))
    if removed:
        yield f"removed {len(marked)} of {len(items)}: {size}"
    elif marked:
        yield f"would remove {len(marked)} of {len(items)}: {size}; nothing was changed, --yes does it"
    else:
        yield "nothing to remove"


def _clipped(name: str, width: int) -> str:
    """Return a name in ``width`` cells; of a longer one the middle is left out."""
    end = width // 2
    return name if len(name) <= width else f"{name[: width - end - 1]}…{name[-end:]}"


def _days(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 3600:
        return f"{max(0.0, seconds) / 60:.0f}m"
    return f"{seconds / 3600:.0f}h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f}d"


def _age(value: str) -> float:
    from kvtierd.config.units import parse_duration

    if value.endswith("d") and value[:-1].isdigit() and int(value[:-1]):
        return float(value[:-1]) * 86400
    try:
        return parse_duration(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write an age of more than zero with its unit, such as 30m, 12h or 30d (got {value!r})"
        ) from None

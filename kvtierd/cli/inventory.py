"""``kvtierd inventory``: what a running daemon holds, in all namespaces."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtierd.cli.common import add_socket, control_socket, table, text
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode

if TYPE_CHECKING:
    from kvtierd.core.effects import SurveyEntry
    from kvtierd.wire.messages import SurveyPage

UNKNOWN = "-"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "inventory",
        help="list what a running daemon holds",
        description="Count the blocks of every namespace in every tier of a running daemon, or list them with"
        " --blocks. It is read page by page beside the daemon's work: blocks that come or go meanwhile may be"
        " missing. Models and tenants are known of namespaces that an engine attached since the"
        " daemon's start.",
    )
    add_socket(parser)
    parser.add_argument("--tier", metavar="T", help="only this tier")
    parser.add_argument("--namespace", metavar="NS", default="", help="only namespaces that begin so")
    parser.add_argument("--model", metavar="TEXT", default="", help="only models whose name contains this")
    parser.add_argument("--blocks", action="store_true", help="list every block")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Ask and print; return 0, or 69 where no daemon answers."""
    from kvtierd.cli.progress import Progress
    from kvtierd.client import Client

    client = Client(str(control_socket(args)), deadline=args.deadline)
    status = client.status()
    known = status.get("tiers", ())  # none yet while the daemon starts
    tenants = {layout["namespace"]: layout.get("tenant") for layout in status.get("layouts", ())}
    total = sum(tier["blocks"] for tier in known if args.tier in (None, tier["name"]))
    counts = Counts(tenants)
    with Progress("inventory", total, quiet=args.blocks) as progress:
        for page in client.survey(args.tier):
            chosen = list(_chosen(page, args.namespace, args.model))
            progress.advance(len(page.entries))
            if args.blocks:
                for entry in chosen:
                    print(_block(entry, as_json=args.json))
            else:
                counts.add(chosen, page.models)
    if not args.blocks:
        for line in counts.json_lines() if args.json else counts.lines():
            print(line)
    return ExitCode.OK


def _chosen(page: SurveyPage, namespace: str, model: str) -> Iterator[SurveyEntry]:
    for entry in page.entries:
        if entry.namespace.startswith(namespace) and (
            not model or model in page.models.get(entry.namespace, "")
        ):
            yield entry


def _block(entry: SurveyEntry, *, as_json: bool) -> str:
    from kvtierd.core.model import group_of, hash_of

    name, group = hash_of(entry.key).hex(), group_of(entry.key)
    if not as_json:
        return f"{entry.tier} {entry.namespace} {name}.{group} {entry.bytes} {entry.dp_rank}"
    return json.dumps(
        {
            "tier": entry.tier,
            "namespace": entry.namespace,
            "hash": name,
            "group": group,
            "bytes": entry.bytes,
            "dp_rank": entry.dp_rank,
        }
    )


@dataclass
class Counts:
    """Blocks and bytes per (tier, namespace), in the order met; ``tenants``: whose namespaces are."""

    tenants: dict[str, str | None] = field(default_factory=dict)
    blocks: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)

    def add(self, entries: list[SurveyEntry], models: dict[str, str]) -> None:
        """Count entries."""
        self.models |= models
        for entry in entries:
            where = (entry.tier, entry.namespace)
            self.blocks[where] = self.blocks.get(where, 0) + 1
            self.bytes[where] = self.bytes.get(where, 0) + entry.bytes

    def json_lines(self) -> Iterator[str]:
        """Yield one JSON object per tier and namespace."""
        for (tier, namespace), blocks in self.blocks.items():
            yield json.dumps(
                {
                    "tier": tier,
                    "namespace": namespace,
                    "model": self.models.get(namespace),
                    "tenant": self.tenants.get(namespace),
                    "blocks": blocks,
                    "bytes": self.bytes[tier, namespace],
                }
            )

    def lines(self) -> Iterator[str]:
        """Yield a table for people."""
        from kvtierd.config.units import human_size

        if not self.blocks:
            yield "nothing is resident"
            return
        named = any(self.tenants.get(namespace) for _, namespace in self.blocks)
        rows = [
            {
                "tier": tier,
                "namespace": namespace,
                "model": text(self.models.get(namespace, UNKNOWN)),
                **({"tenant": text(self.tenants.get(namespace) or UNKNOWN)} if named else {}),
                "blocks": f"{blocks:,}",
                "bytes": human_size(self.bytes[tier, namespace]),
            }
            for (tier, namespace), blocks in self.blocks.items()
        ]
        yield from table(rows, right=("blocks", "bytes"))

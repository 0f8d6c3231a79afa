"""``kvtierd reset``: removes whole namespaces, models or tenants from a running daemon, or everything."""

from __future__ import annotations

import argparse

from kvtierd.cli.common import add_socket, control_socket
from kvtierd.cli.main import Subparsers
from kvtierd.cli.removal import confirm, summary, tell
from kvtierd.errors import ExitCode


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "reset",
        help="remove namespaces, models or tenants, or everything",
        description="Remove every block that is chosen, whoever uses it, from the named tiers of a running"
        " daemon (default: from all); it ends when no restart could find them again. Several choices narrow"
        " it down: what fits all of them goes. Readers of the event stream hear of each block.",
    )
    parser.add_argument(
        "--namespace", metavar="NS", action="append", help="a namespace, in full or how it begins"
    )
    parser.add_argument("--model", metavar="NAME", help="namespaces of this model")
    parser.add_argument("--tenant", metavar="NAME", help="namespaces of this tenant")
    parser.add_argument("--tier", metavar="T", action="append", help="only from this tier; may be repeated")
    parser.add_argument("--all", action="store_true", help="all namespaces")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(deadline=600.0, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Ask, remove and print; return 0."""
    chosen = any((args.namespace, args.model is not None, args.tenant is not None))
    if args.all == chosen:
        args.usage_error("say what: --namespace, --model or --tenant; or --all, alone, for everything")
    from kvtierd.client import Client
    from kvtierd.core.effects import Removed
    from kvtierd.core.stimuli import OperatorReset

    fields = {
        "namespaces": tuple(args.namespace) if args.namespace else None,
        "model": args.model,
        "tenant": args.tenant,
        "tiers": tuple(args.tier) if args.tier else None,
    }
    with Client(str(control_socket(args)), deadline=args.deadline) as client:
        if args.dry_run or not args.yes:
            would = client.order(OperatorReset, Removed, **fields, dry_run=True)
            if args.dry_run:
                tell(would, as_json=args.json, would=True)
                return ExitCode.OK
            none = "" if would.blocks else " (kvtierd inventory lists what there is)"
            confirm(f"this removes {summary(would)}{none}")
        removed = client.order(OperatorReset, Removed, **fields)
    tell(removed, as_json=args.json, would=False)
    return ExitCode.OK

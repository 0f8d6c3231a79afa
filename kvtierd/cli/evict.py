"""``kvtierd evict``: makes room in a tier of a running daemon."""

from __future__ import annotations

import argparse

from kvtierd.cli.common import add_socket, control_socket
from kvtierd.cli.main import Subparsers
from kvtierd.cli.removal import tell
from kvtierd.errors import ExitCode


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "evict",
        help="make room in a tier",
        description="Remove blocks from one tier of a running daemon, those first that would leave it next,"
        " and nothing in use, until so much went. It is done in slices: engines are served in between."
        " Blocks in the CPU tier that no other tier has are lost; drain writes them down first.",
    )
    parser.add_argument("--tier", metavar="T", required=True, help="from this tier")
    parser.add_argument("--bytes", metavar="SIZE", type=_size, help="until so much went, such as 10GiB")
    parser.add_argument("--blocks", metavar="N", type=_count, help="until so many blocks went")
    parser.add_argument("--namespace", metavar="NS", help="only of namespaces that begin so")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go at most")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(deadline=600.0, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Evict and print; return 0."""
    if args.bytes is None and args.blocks is None and args.namespace is None:
        args.usage_error("say how much: --bytes, --blocks or --namespace")
    from kvtierd.client import Client
    from kvtierd.core.effects import Removed
    from kvtierd.core.stimuli import OperatorEvict

    with Client(str(control_socket(args)), deadline=args.deadline) as client:
        removed = client.order(
            OperatorEvict,
            Removed,
            tier=args.tier,
            bytes=args.bytes,
            blocks=args.blocks,
            namespace=args.namespace,
            dry_run=args.dry_run,
        )
    tell(removed, as_json=args.json, would=args.dry_run)
    return ExitCode.OK


def _size(value: str) -> int:
    from kvtierd.config.units import parse_size

    try:
        return parse_size(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(value: str) -> int:
    if not value.isdigit() or not int(value):
        raise argparse.ArgumentTypeError(f"write a number of blocks, at least 1 (got {value!r})")
    return int(value)

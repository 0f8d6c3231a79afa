"""``kvtierd reload``: has a running daemon take its changed tier file over."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from kvtierd.cli.common import add_socket, control_socket, table, text
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode

if TYPE_CHECKING:
    from kvtierd.wire.messages import Reloaded


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "reload",
        help="take the changed tier file over",
        description="Have a running daemon read its tier file again and take over what changed: limits, TTLs,"
        " deadlines, audiences, who may connect, the log's level. If anything else changed, or it is wrong,"
        f" nothing is taken over and every reason is told (exit code {ExitCode.CONFIG:d}). Variables are"
        " those that the daemon was started with.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(deadline=30.0)


def run(args: argparse.Namespace) -> int:
    """Reload and print; return 0, or 78 where it was refused."""
    from kvtierd.client import Client
    from kvtierd.wire.messages import Reloaded, ReloadRequest

    with Client(str(control_socket(args)), deadline=args.deadline) as client:
        answer = client.order(ReloadRequest, Reloaded, dry_run=args.dry_run)
    if args.json:
        print(json.dumps(_plain(answer, dry_run=args.dry_run)))
    else:
        _print(answer, dry_run=args.dry_run)
    return ExitCode.CONFIG if answer.outcome == "refused" else ExitCode.OK


def _plain(answer: Reloaded, *, dry_run: bool) -> dict[str, object]:
    return {
        "outcome": answer.outcome,
        "dry_run": dry_run,
        "changes": [
            {"key": c.key, "before": c.before, "after": c.after, "refusal": c.refusal or None}
            for c in answer.changes
        ],
        "problem": answer.problem,
    }


def _print(answer: Reloaded, *, dry_run: bool) -> None:
    words = {
        "applied": "would be applied" if dry_run else "applied",
        "unchanged": "nothing differs",
        "refused": "would be refused" if dry_run else "refused: the tier file of before stays in force",
    }
    print(words.get(answer.outcome, text(answer.outcome)))
    rows = [
        {
            "key": text(c.key),
            "before": text(c.before),
            "after": text(c.after),
            "takes": "a restart" if c.refusal else "a reload",
        }
        for c in answer.changes
    ]
    for line in table(rows) if rows else ():
        print(f"  {line}")
    for line in answer.problem.splitlines():
        print(text(line), file=sys.stderr)

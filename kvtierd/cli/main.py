"""The command ``kvtierd``: finds the command's module and turns its outcome into an exit code.

A module in :data:`COMMANDS` has ``add_parser(subparsers)`` and ``run(args) -> int``. Only the module of the
command that was asked for is imported: one that cannot be imported breaks no other, and ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from kvtierd import __version__
from kvtierd.errors import ExitCode, KvtierdError

COMMANDS = {
    "serve": ("kvtierd.cli.serve", "run the daemon"),
    "check": ("kvtierd.cli.check", "check a tier file and show the values in force"),
    "schema": ("kvtierd.cli.schema", "print the JSON Schema of the tier file"),
    "status": ("kvtierd.cli.status", "ask a running daemon how it is"),
    "top": ("kvtierd.cli.top", "watch a running daemon at work"),
    "inventory": ("kvtierd.cli.inventory", "list what a running daemon holds"),
    "log-level": ("kvtierd.cli.log_level", "show or change how much a running daemon logs"),
    "reset": ("kvtierd.cli.reset", "remove namespaces, models or tenants, or everything"),
    "evict": ("kvtierd.cli.evict", "make room in a tier"),
    "drain": ("kvtierd.cli.drain", "take no stores, be unready and write down what only the pool holds"),
    "reload": ("kvtierd.cli.reload", "take the changed tier file over"),
    "gc": ("kvtierd.cli.gc", "find and remove what no daemon needs in a tier's storage"),
    "verify": ("kvtierd.cli.verify", "prove every block in a tier's storage"),
    "events": ("kvtierd.cli.events", "watch the event stream"),
    "replay": ("kvtierd.cli.replay", "replay a request trace through tiers of a given size"),
    "demo": ("kvtierd.cli.demo", "run a small daemon, a workload and a router's view of it"),
    "bench": ("kvtierd.cli.bench", "measure the daemon on this machine"),
    "completion": ("kvtierd.cli.completion", "print a shell's completion"),
    "version": ("kvtierd.cli.version", "print the version"),
}

Subparsers = Any
"""``argparse._SubParsersAction``, which has no public name."""


Run = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Ends with sysexits' usage code instead of argparse's own."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}{self._meant(message)}\n")

    def _meant(self, message: str) -> str:
        """Return what was probably meant by what this parser does not know, as far as its words tell."""
        import difflib
        import re

        options = list(self._option_string_actions)
        if unknown := re.match(r"unrecognized arguments: (-[^ =]+)", message):
            wrong, known = unknown[1], options
        elif choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            wrong, known = choice[1], re.findall(r"[\w-]+", choice[2])
        else:
            return ""
        close = difflib.get_close_matches(wrong.lower(), known, n=1)
        return f"\ndid you mean {close[0]!r}?" if close else f" (see {self.prog} --help)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (sysexits.h); messages of errors go to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.OK
    except KvtierdError as error:
        print(f"kvtierd: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader went away (head, less): not our failure. Keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return ExitCode.INTERNAL


def make_parser(wanted: Collection[str]) -> tuple[argparse.ArgumentParser, dict[str, Run]]:
    """Return the parser and the functions of the ``wanted`` commands, the only ones that are imported."""
    parser = _Parser(prog="kvtierd", description="KV-cache tier daemon for LLM inference engines.")
    parser.add_argument("-V", "--version", action="version", version=f"kvtierd {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    runs: dict[str, Run] = {}
    for name, (module_name, help_text) in COMMANDS.items():
        if name in wanted:
            module = _import(name, module_name)
            module.add_parser(subparsers)
            runs[name] = module.run
        else:
            subparsers.add_parser(name, help=help_text)
    return parser, runs


def _run(arguments: list[str]) -> int:
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser, runs = make_parser({wanted} if wanted else ())
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _command_of(parser, arguments).error(f"unrecognized arguments: {' '.join(unknown)}")
    run = runs.get(wanted or "")
    if run is None:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    return int(run(args))


def _command_of(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the command, and of the command below it, that the arguments name."""
    for argument in arguments:
        for action in parser._subparsers._group_actions if parser._subparsers is not None else ():
            if argument in (action.choices or ()):
                parser = dict(action.choices or {})[argument]
    return parser


def _import(name: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        what = (
            "is not part of this build" if error.name == module_name else f"needs the package {error.name!r}"
        )
        raise KvtierdError(f"the command {name!r} {what}") from None

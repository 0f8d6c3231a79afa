"""``kvtierd completion``: prints the completion of a shell, made from the commands at build time."""

from __future__ import annotations

import argparse
from importlib.resources import files

from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode

SHELLS = ("bash", "zsh")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "completion",
        help="print a shell's completion",
        description='Print the completion of a shell. bash: eval "$(kvtierd completion bash)"; '
        "zsh: put it into a file _kvtierd of a folder in $fpath.",
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    """Print the file that ships with the package."""
    print(
        files("kvtierd").joinpath("shipped", f"completion.{args.shell}").read_text(encoding="utf-8"), end=""
    )
    return ExitCode.OK

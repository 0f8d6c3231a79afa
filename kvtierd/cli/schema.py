"""``kvtierd schema``."""

from __future__ import annotations

import argparse
import json

from kvtierd.cli.main import Subparsers
from kvtierd.errors import ExitCode


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments (none)."""
    subparsers.add_parser(
        "schema",
        help="print the JSON Schema of the tier file",
        description="Print the JSON Schema of the tier file, for editors. `kvtierd check` is more precise.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema (draft 2020-12)."""
    from kvtierd.config.schema import TierFile

    del args
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TierFile.model_json_schema()}
    print(json.dumps(schema, indent=2))
    return ExitCode.OK

"""``kvtierd schema``."""

from __future__ import annotations

import argparse
import json
from typing import Any

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
    """Print the schema."""
    del args
    print(json.dumps(schema_of_the_tier_file(), indent=2))
    return ExitCode.OK


def schema_of_the_tier_file() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12)."""
    from kvtierd.config.schema import TierFile

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TierFile.model_json_schema()}

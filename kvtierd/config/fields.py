"""What all sections of the tier file are made of: their base, and names, paths, sizes and durations.

The spelling of sizes and durations is in :mod:`kvtierd.config.units`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from kvtierd.config.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

Problem = tuple[tuple[str | int, ...], str]
"""Path of the offending key and what is wrong with it."""


class Section(BaseModel):
    """A mapping of the tier file: strict types, no unknown keys, frozen once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=False)


def _to_path(value: object) -> object:
    if not isinstance(value, (str, Path)) or not str(value).startswith("/") or "\0" in str(value):
        raise ValueError("write an absolute path")
    return Path(value)


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
AbsolutePath = Annotated[
    Path,
    BeforeValidator(_to_path),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": "^/", "format": "path"}),
]


def _parse_limit(value: object) -> int | str:
    if isinstance(value, str) and value == "unlimited":
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or unlimited") from None


def _format_limit(value: int | str) -> str:
    return value if isinstance(value, str) else format_size(value)


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": SIZE_PATTERN, "examples": ["8GiB"]},
    ]
}

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema(_SIZE_SCHEMA),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["5s"]}),
]
Limit = Annotated[
    int | Literal["unlimited"],
    PlainValidator(_parse_limit),
    PlainSerializer(_format_limit, when_used="json"),
    WithJsonSchema({"anyOf": [{"const": "unlimited"}, *_SIZE_SCHEMA["anyOf"]]}),
]

"""Sizes, durations and limits as pydantic field types; their spelling is in :mod:`kvtierd.config.units`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from kvtierd.config.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


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

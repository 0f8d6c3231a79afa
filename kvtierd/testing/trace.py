"""Request traces: JSON lines with a timestamp and the ids of the blocks that make up each prompt.

One object a line; ``timestamp`` (milliseconds) and ``hash_ids`` (a list of integers or strings, first block
first) are read, other keys are ignored. An id names a whole prefix: the same id never follows two different
ones. That is the form of the public Mooncake traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvtierd.errors import KvtierdError

Id = int | str


class BadTrace(KvtierdError):
    """A line of a trace cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when (seconds) and for which blocks, first block first."""

    at: float
    blocks: tuple[Id, ...]


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: tuple[Id, ...]


def read_trace(lines: Iterable[str | bytes], name: str = "trace") -> list[Asked]:
    """Read a trace; empty lines are skipped.

    Raises:
        BadTrace: a line is no such object, goes back in time, names a block twice or after another parent.
    """
    decode = msgspec.json.Decoder(_Line).decode
    requests: list[Asked] = []
    parents: dict[Id, Id | None] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
            _check(line, requests[-1].at * 1000 if requests else 0.0, parents)
        except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
            raise BadTrace(f"{name}, line {number}: {error}") from None
        requests.append(Asked(line.timestamp / 1000, line.hash_ids))
    if not requests:
        raise BadTrace(f"{name}: no request in it")
    return requests


def _check(line: _Line, before: float, parents: dict[Id, Id | None]) -> None:
    if line.timestamp < before - 1e-6:
        raise ValueError(f"timestamp {line.timestamp:g} is before {before:g}, that of an earlier line")
    if len(set(line.hash_ids)) != len(line.hash_ids):
        raise ValueError("hash_ids names a block twice")
    parent: Id | None = None
    for block in line.hash_ids:
        known = parents.setdefault(block, parent)
        if known != parent:
            raise ValueError(f"block {block!r} follows {parent!r} here and {known!r} before: not prefix ids")
        parent = block

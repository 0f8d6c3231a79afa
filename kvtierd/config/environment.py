"""Overrides of single values of the tier file by variables ``KVTIERD__SECTION__KEY``.

A variable of that prefix that names nothing is refused. Variables with one underscore are left alone, since
Kubernetes sets such ones for a Service named ``kvtierd``, except where they plainly mean a key of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtierd.config.document import KeyPath, parse_scalar
from kvtierd.config.keys import leaf_patterns

PREFIX = "KVTIERD__"

EnvProblem = tuple[str, str]
"""The variable's name and what is wrong with it."""


def apply_environment(
    value: dict[str, Any], environ: Mapping[str, str]
) -> tuple[dict[KeyPath, str], list[EnvProblem]]:
    """Set the overrides of ``environ`` in ``value`` in place.

    Returns:
        The variable that set each path, and what could not be set. Whether a key exists is left to
        the schema.
    """
    origins: dict[KeyPath, str] = {}
    problems = list(_near_misses(environ))
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        parts = name[len(PREFIX) :].split("__")
        if name != name.upper() or not all(parts):
            problems.append((name, "write it as KVTIERD__SECTION__KEY, upper case"))
            continue
        path = tuple(int(part) if part.isascii() and part.isdigit() else part.lower() for part in parts)
        try:
            _set(value, path, parse_scalar(environ[name]))
        except LookupError as error:
            problems.append((name, str(error.args[0])))
        else:
            origins[path] = name
    return origins, problems


def _set(value: dict[str, Any], path: KeyPath, leaf: Any) -> None:
    where: Any = value
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        name = ".".join(map(str, path[:depth]))
        if isinstance(where, list):
            if not isinstance(part, int) or part >= len(where):
                raise LookupError(
                    f"{name} has {len(where)} entries, counted from 0; {part!r} is none of them"
                )
        elif not isinstance(where, dict) or isinstance(part, int):
            raise LookupError(f"{name or 'the tier file'} has no entry {part!r}")
        elif not last and part not in where:
            where[part] = _missing_section(path[: depth + 1])
        if last:
            where[part] = leaf
        else:
            where = where[part]


def _missing_section(path: KeyPath) -> Any:
    """A section that the file leaves out; an override within the default audience needs that audience."""
    return [{"name": "default"}] if path == ("events", "audiences") else {}


def _near_misses(environ: Mapping[str, str]) -> Iterator[EnvProblem]:
    known = {"_".join(path).upper(): path for path in leaf_patterns()}
    for name in sorted(environ):
        if not name.startswith("KVTIERD_") or name.startswith(PREFIX):
            continue
        words = name[len("KVTIERD_") :].split("_")
        digits = [word for word in words if word.isascii() and word.isdigit()]
        path = known.get("_".join("*" if word in digits else word for word in words if word))
        if path is not None:
            meant = PREFIX + "__".join(digits.pop(0) if part == "*" else part.upper() for part in path)
            yield name, f"has no effect; write {meant}"

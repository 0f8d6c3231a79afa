"""From a tier file and the environment to a checked :class:`TierFile`, with where each value came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvtierd.config.audiences import Audience, topic_problems
from kvtierd.config.document import Document, DocumentError, KeyPath, parse_document
from kvtierd.config.endpoints import parse_endpoint
from kvtierd.config.environment import apply_environment
from kvtierd.config.keys import hint, known_keys, nearest
from kvtierd.config.plugins import unknown_type
from kvtierd.config.schema import CpuTier, FsTier, ObjectTier, PluginTier, TierFile
from kvtierd.config.units import format_size
from kvtierd.errors import ConfigError

MAX_FILE_BYTES = 1 << 20

_PLAIN_WORDS = {
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "string_type": "write a string (in quotes if it looks like a number)",
    "model_type": "write a section: keys with values",
    "model_attributes_type": "write a section: keys with values",
    "tuple_type": "write a list",
}
_NAME = "write at most 63 of a-z, 0-9, - and _, a letter or digit first"
_BOUNDS = {
    "greater_than_equal": ("ge", "write at least {}"),
    "less_than_equal": ("le", "write at most {}"),
    "too_short": ("min_length", "write at least {} in this list"),
    "too_long": ("max_length", "write at most {} in this list"),
    "string_too_short": ("min_length", "write at least {} characters"),
    "string_too_long": ("max_length", "write at most {} characters"),
}
"""By pydantic's type of error: where it keeps the bound, and what to say of it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked tier file.

    ``origins`` has, for the dotted path of each value in force (``tiers.1.max_bytes``), where it came from:
    ``FILE:LINE``, ``env NAME`` or ``default``. ``warnings`` are for people and stop nothing.
    """

    path: Path
    tier_file: TierFile
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load_tier_file(path: str | Path, environ: Mapping[str, str]) -> Loaded:
    """Read, override from ``environ`` and check the tier file at ``path``.

    Raises:
        ConfigError: it cannot be read or used; one line for each thing that is wrong.
    """
    path = Path(path)
    document = _read(path)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}:1: a tier file is a mapping of keys and starts with version: 1")
    overrides, env_problems = apply_environment(document.value, environ)
    report = _Report(path, document, overrides)
    for key_path, line, message in document.problems:
        report.add_at(line, key_path, message)
    for name, message in env_problems:
        report.add_variable(name, message)
    tier_file = _validate(document.value, report)
    if tier_file is not None:
        for key_path, message in topic_problems(tier_file.events, environ):
            report.add(key_path, message)
    if tier_file is None or report.lines:
        raise ConfigError(report.text())
    origins = {
        ".".join(map(str, leaf)): report.origin(leaf) for leaf, _ in leaves(tier_file.model_dump(mode="json"))
    }
    return Loaded(path, tier_file, origins, tuple(preflight(tier_file)))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and value of everything in ``value`` that is no mapping or list."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def preflight(tier_file: TierFile) -> Iterator[str]:
    """Yield what is allowed and probably not meant. No I/O."""
    for tier in tier_file.tiers:
        if isinstance(tier, CpuTier):
            continue
        if isinstance(tier.max_bytes, int) and tier.max_bytes < tier_file.pool.bytes:
            yield f"tier {tier.name!r}: max_bytes is less than pool.bytes: it holds less than the CPU tier"
        if isinstance(tier, PluginTier) and tier.max_bytes == "unlimited":
            yield f"tier {tier.name!r}: max_bytes is unlimited: the daemon will evict nothing from it"
        if isinstance(tier, FsTier) and tier.max_bytes == "unlimited":
            yield f"tier {tier.name!r}: max_bytes is unlimited: only the filesystem's size bounds it"
        if (
            isinstance(tier, ObjectTier)
            and tier.url.startswith("memory://")
            and tier.max_bytes == "unlimited"
        ):
            yield f"tier {tier.name!r}: max_bytes is unlimited and memory:// keeps blocks in this process"
    for audience in tier_file.events.audiences:
        yield from _open_doors(audience)
    if not tier_file.events.enabled:
        yield "events.enabled is false: nothing is published, whatever the tiers' own events keys say"


def _open_doors(audience: Audience) -> Iterator[str]:
    carry = "carry" if audience.publishes_tokens else "do not carry"
    for key, where in audience.endpoints():
        if key != "connect" and parse_endpoint(where).is_wildcard and audience.curve is None:
            yield (
                f"audience {audience.name!r}: {key}: {where} takes anybody who can reach this pod; events "
                f"{carry} the prompts' token ids"
            )


def _read(path: Path) -> Document:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes: this is no tier file")
        return parse_document(raw.decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the tier file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except DocumentError as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from None


class _Report:
    """Collects problems with where they are, and answers where a value came from."""

    def __init__(self, path: Path, document: Document, overrides: Mapping[KeyPath, str]) -> None:
        self._path = path
        self._lines = document.lines
        self._overrides = overrides
        self._unreadable = {key_path for key_path, _, _ in document.problems}
        self.lines: list[tuple[int, str]] = []

    def origin(self, key_path: KeyPath) -> str:
        if key_path in self._overrides:
            return f"env {self._overrides[key_path]}"
        return f"{self._path}:{self._lines[key_path]}" if key_path in self._lines else "default"

    def add_at(self, line: int, key_path: KeyPath, message: str) -> None:
        self.lines.append((line, f"{self._path}:{line}: {_dotted(key_path)}{message}"))

    def add_variable(self, name: str, message: str, key_path: KeyPath = ()) -> None:
        self.lines.append((1 << 30, f"env {name}: {_dotted(key_path)}{message}"))

    def add(self, key_path: KeyPath, message: str) -> None:
        """Add a problem at a path: its own place, else that of the section around it."""
        if key_path in self._unreadable:
            return  # said already, and better
        if key_path not in self._lines:
            for path, name in self._overrides.items():
                if path[: len(key_path)] == key_path:
                    self.add_variable(name, message, key_path)
                    return
        for length in range(len(key_path), -1, -1):
            if key_path[:length] in self._overrides:
                self.add_variable(self._overrides[key_path[:length]], message, key_path)
                return
            if key_path[:length] in self._lines:
                self.add_at(self._lines[key_path[:length]], key_path, message)
                return

    def text(self) -> str:
        return "\n".join(line for _, line in sorted(self.lines))


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) + ": " if path else ""


def _validate(value: dict[str, Any], report: _Report) -> TierFile | None:
    try:
        return TierFile.model_validate(value)
    except ValidationError as failure:
        errors = list(_causes(failure.errors(include_url=False)))
        others = [error for error in errors if error["loc"][:2] != ("tiers", 0)]
        if len(others) < len(errors) and _first_tier_is_stored(value):
            report.add(("tiers", 0, "type"), "the first tier must be the primary one, of type cpu")
            errors = others
        for error in errors:
            for path, message in _explain(error):
                report.add(path, message)
        return None


def _causes(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Yield the errors less those that only follow from others.

    A list whose entries are wrong is also too short to pydantic, and a key that was misspelt is also missing.
    """
    meant = set()
    for error in errors:
        if error["type"] == "extra_forbidden":
            path, tier_type = _without_tag(error["loc"])
            meant.add((*path[:-1], nearest(str(path[-1]), known_keys(path[:-1], tier_type))))
    for error in errors:
        follows = error["type"] == "missing" and _without_tag(error["loc"])[0] in meant
        if error["type"] == "too_short" and isinstance(error["input"], (list, tuple)):
            follows = len(error["input"]) >= error["ctx"]["min_length"]
        if not follows:
            yield error


def _first_tier_is_stored(value: dict[str, Any]) -> bool:
    """Say whether the first tier is one that belongs below the pool; what else is wrong with it can wait."""
    tiers = value.get("tiers")
    first = tiers[0] if isinstance(tiers, list) and tiers else None
    return isinstance(first, dict) and first.get("type") in ("fs", "object")


def _explain(error: ErrorDetails) -> Iterator[tuple[KeyPath, str]]:
    """Turn one of pydantic's errors into paths of the tier file and messages that say what to write."""
    path, tier_type = _without_tag(error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "tier_file":
        yield from context["problems"]
    elif kind == "extra_forbidden":
        yield path, _unknown_key(path, tier_type)
    elif kind == "missing":
        more = ': write a size, or "unlimited"' if path[-1] == "max_bytes" else ""
        yield path, f"is required{more}"
    elif kind in ("union_tag_not_found", "union_tag_invalid"):
        got = error["input"].get("type") if isinstance(error["input"], dict) else None
        yield (*path, "type"), unknown_type(got) if isinstance(got, str) else "write type: cpu, fs or object"
    else:
        got = error["input"]
        hidden = isinstance(got, (dict, list, tuple)) or _may_be_secret(path, got)
        shown = "" if hidden else f" (got {_shown(got)})"
        yield path, _in_words(path, kind, error["msg"], context) + shown


def _in_words(path: KeyPath, kind: str, original: str, context: Mapping[str, Any]) -> str:
    """Return what to write instead of a value; pydantic's own words where we have none."""
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"write {context['expected']}"
    if kind == "string_pattern_mismatch":
        return _NAME if path[-1] == "name" else f"write what matches {context['pattern']}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        is_size = str(path[-1]).endswith("bytes") and isinstance(bound, int)
        text = words.format(format_size(bound) if is_size else bound)
        return text.removesuffix("s") if bound == 1 and text.endswith("characters") else text
    return _PLAIN_WORDS.get(kind, original)


def _may_be_secret(path: KeyPath, got: object) -> bool:
    """Say whether somebody may have pasted a key here, which then must not be repeated."""
    return "credentials" in path or (path[-1:] in (("url",), ("endpoint",)) and "@" in str(got))


def _unknown_key(path: KeyPath, tier_type: str | None) -> str:
    key = str(path[-1])
    if key == "locality" and tier_type == "cpu":
        return "a cpu tier has no locality: only fs and object tiers may have one"
    return f"unknown key; {hint(key, known_keys(path[:-1], tier_type))}"


def _without_tag(loc: KeyPath) -> tuple[KeyPath, str | None]:
    """Drop the tier's type, which pydantic puts into the location of errors in a tier."""
    if len(loc) > 2 and loc[0] == "tiers" and loc[2] in ("cpu", "fs", "object", "plugin"):
        return (*loc[:2], *loc[3:]), str(loc[2])
    return loc, None


def _shown(value: object) -> str:
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if isinstance(value, bool) or value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

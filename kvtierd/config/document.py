"""YAML text to plain values, with the line of every key and value.

Scalars follow YAML 1.2's core: only ``true`` and ``false`` are booleans, so ``yes``, ``on`` and ``True`` stay
strings and the strict schema refuses them; ``1:30`` is no number. Duplicate keys, tags and aliases to
a node around them are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_Base: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Loader(_Base):  # type: ignore[misc]  # chosen at run time
    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _name, _pattern, _first in (
    ("bool", r"^(true|false)$", "tf"),
    ("null", r"^(null|~|)$", "n~"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?$", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern, re.ASCII), [*_first])
_Loader.yaml_implicit_resolvers[""] = [(_TAG + "null", re.compile(r"^$"))]


class DocumentError(ValueError):
    """The text is not one YAML document; ``line`` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Document:
    """A parsed text: its value, the line of each path in it, and what is wrong (path, line, message)."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[KeyPath, int, str]] = field(default_factory=list)


def parse_document(text: str) -> Document:
    """Parse ``text``.

    Raises:
        DocumentError: the syntax is wrong, or there are several documents.
    """
    document = Document()
    node = _compose(text)
    if node is not None:
        document.value = _Builder(document).build(node, (), node.start_mark.line + 1)
    return document


def parse_scalar(text: str) -> Any:
    """Return what ``text`` means as a YAML scalar; the text itself where it is none (``[::1]:9557``)."""
    try:
        document = parse_document(text)
    except DocumentError:
        return text
    if document.problems or isinstance(document.value, (dict, list)) or not text:
        return text
    return document.value


def _compose(text: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(mark.line + 1 if mark else 1, reason) from None
    except yaml.YAMLError as error:
        raise DocumentError(1, " ".join(str(error).split())) from None
    except RecursionError:
        raise DocumentError(1, "nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Builder:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: KeyPath, line: int) -> Any:
        self._document.lines[path] = line
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            return self._refuse(path, node, "an alias to something that contains it")
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, path)
        else:
            value = [
                self.build(child, (*path, index), child.start_mark.line + 1)
                for index, child in enumerate(node.value)
            ]
        self._open.discard(id(node))
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, child in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(path, key_node, "a key must be a plain word")
            elif key in first:
                self._refuse((*path, key), key_node, f"duplicate key, first written on line {first[key]}")
            else:
                first[key] = line
                value[key] = self.build(child, (*path, key), line)
        return value

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool" if text in ("true", "false"):
                return text == "true"
            case "int" | "float" as kind:
                try:
                    return int(text) if kind == "int" else float(text)
                except ValueError:
                    pass
        return self._refuse(path, node, f"cannot read {text[:60]!r} as {node.tag.removeprefix(_TAG)}")

    def _refuse(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        self._document.problems.append((path, node.start_mark.line + 1, message))

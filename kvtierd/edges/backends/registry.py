"""From the type of an added tier to its backend; all that a package can get wrong is said in its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from kvtierd.config.plugins import Plugin, installed, unknown_type
from kvtierd.edges.backends.base import Backend
from kvtierd.errors import ConfigError, KvtierdError

Make = Callable[[str, Mapping[str, Any]], Backend]

_VERBS = [name for name in vars(Backend) if not name.startswith("_")]


def load(tier: str, kind: str) -> tuple[Plugin, Make]:
    """Import the package that adds a type.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    plugin = installed().get(kind)
    if plugin is None:
        raise ConfigError(f"tier {tier!r}: {unknown_type(kind)}")
    try:
        make = plugin.entry_point.load()
    except Exception as error:
        raise _blame(tier, plugin, f"cannot be imported: {_text(error)}") from error
    if not callable(make):
        raise _blame(tier, plugin, "names something that cannot be called")
    return plugin, cast("Make", make)


def make_added(tier: str, kind: str, options: Mapping[str, Any]) -> Backend:
    """Return the backend of an added type, not opened yet.

    Raises:
        ConfigError: the package cannot be imported, refuses the options, or makes something that lacks verbs
            of a backend.
    """
    plugin, make = load(tier, kind)
    try:
        backend = make(tier, options)
    except KvtierdError as error:
        raise _blame(tier, plugin, f"refuses the tier's options: {error}") from error
    except Exception as error:
        raise _blame(tier, plugin, f"refuses the tier's options: {_text(error)}") from error
    missing = [verb for verb in _VERBS if not callable(getattr(backend, verb, None))]
    if missing:
        raise _blame(tier, plugin, f"makes no backend: {type(backend).__name__} lacks {', '.join(missing)}")
    return backend


def _blame(tier: str, plugin: Plugin, what: str) -> ConfigError:
    return ConfigError(f"tier {tier!r}: type {plugin.type!r} of {plugin.origin} {what}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

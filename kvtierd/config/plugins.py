"""Which tier types there are: the built-in ones and those that installed packages add.

A package adds a type by an entry point of the group ``kvtierd.backends``. Its name is the ``type`` in the
tier file; its value names a callable ``make(name: str, options: Mapping[str, Any]) -> Backend`` that returns
a backend (:mod:`kvtierd.edges.backends.base`) without touching its storage yet. Nothing of a package is
imported here. A package cannot replace a built-in type.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import metadata

from kvtierd.errors import ConfigError

GROUP = "kvtierd.backends"
BUILT_IN = ("cpu", "fs", "object")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One added tier type: the distribution that brings it, and its entry point."""

    type: str
    distribution: str
    entry_point: metadata.EntryPoint

    @property
    def origin(self) -> str:
        """Where the type comes from, for people."""
        return f"{self.distribution} ({self.entry_point.value})"


def installed() -> dict[str, Plugin]:
    """Return the added types by name.

    Raises:
        ConfigError: two distributions add the same one.
    """
    found: dict[str, Plugin] = {}
    for entry_point in metadata.entry_points(group=GROUP):
        if entry_point.name in BUILT_IN:
            continue
        dist = entry_point.dist
        distribution = f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"
        plugin = Plugin(entry_point.name, distribution, entry_point)
        other = found.setdefault(plugin.type, plugin)
        if other.origin != plugin.origin:
            raise ConfigError(
                f"tier type {plugin.type!r} is added by {other.origin} and by {plugin.origin}:"
                " uninstall one of them"
            )
    return found


def unknown_type(name: str) -> str:
    """Return what to say of a tier type that does not exist: the nearest one and all there are."""
    added = sorted(installed())
    close = difflib.get_close_matches(name.lower(), [*BUILT_IN, *added], n=1, cutoff=0.6)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    plugins = f"; installed packages add {', '.join(added)}" if added else "; no installed package adds one"
    return f"no tier type is named {name!r}; {nearest}built in are cpu, fs and object{plugins}"

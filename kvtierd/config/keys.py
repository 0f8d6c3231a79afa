"""Which keys exist where in a tier file, and the one that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kvtierd.config import access, schema
from kvtierd.config.audiences import Audience, Curve, Events
from kvtierd.config.document import KeyPath
from kvtierd.config.fields import Section
from kvtierd.config.relay import Relay

_TIERS: dict[str, type[Section]] = {
    "cpu": schema.CpuTier,
    "fs": schema.FsTier,
    "object": schema.ObjectTier,
    "plugin": schema.PluginTier,
}
_SECTIONS: dict[tuple[str, ...], tuple[type[Section], ...]] = {
    (): (schema.TierFile,),
    ("pool",): (schema.Pool,),
    ("tiers", "*"): tuple(_TIERS.values()),
    ("tiers", "*", "credentials"): (schema.Credentials,),
    ("events",): (Events,),
    ("events", "audiences", "*"): (Audience,),
    ("events", "audiences", "*", "curve"): (Curve,),
    ("events", "relay", "*"): (Relay,),
    ("admin",): (schema.Admin,),
    ("log",): (schema.Log,),
    ("traces",): (schema.Traces,),
    ("access",): (access.Access,),
    ("access", "engine"): (access.Peers,),
    ("access", "control"): (access.Peers,),
    ("engine",): (access.Engine,),
}
_OTHER_NAMES = {
    "root_dir": "path",
    "root": "path",
    "directory": "path",
    "size": "bytes",
    "pool_bytes": "bytes",
    "capacity": "max_bytes",
    "max_size": "max_bytes",
    "medium": "type",
    "endpoint": "bind",
    "replay_endpoint": "replay",
    "port": "listen",
    "mlock": "lock",
    "hugepages": "huge_pages",
}
"""What other products call our keys, so that a hint is also found for those."""


def known_keys(path: KeyPath, tier_type: str | None = None) -> list[str]:
    """Return the keys of the section at ``path``; of one type of tier where that is given."""
    pattern = tuple("*" if isinstance(part, int) else part for part in path)
    models = _SECTIONS.get(pattern, ())
    if pattern == ("tiers", "*") and tier_type in _TIERS:
        models = (_TIERS[tier_type],)
    return list(dict.fromkeys(key for model in models for key in model.model_fields))


def nearest(key: str, known: list[str]) -> str | None:
    """Return the known key that somebody who wrote ``key`` probably meant."""
    names = {**{other: key for other, key in _OTHER_NAMES.items() if key in known}, **{k: k for k in known}}
    close = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def hint(key: str, known: list[str]) -> str:
    """Return the end of an error message about an unknown key: the nearest known one, or all of them."""
    meant = nearest(key, known)
    return f"did you mean {meant!r}?" if meant else f"known keys here: {', '.join(known)}"


def leaf_patterns() -> Iterator[tuple[str, ...]]:
    """Yield the path of every key that holds a value, list indexes as ``*``."""
    for section, models in _SECTIONS.items():
        for model in models:
            for key in model.model_fields:
                path = (*section, key)
                if path not in _SECTIONS and (*path, "*") not in _SECTIONS:
                    yield path

"""What one request asks of the tiers, in its ``kv_transfer_params``.

``{"kvtierd": {"load_from": [...], "store_to": [...], "max_tokens": n}}``, every key optional: tiers (a name,
``medium=STORAGE``, ``locality=LOCAL``) that its blocks may be loaded from and stored to beside the pool, and
how many leading tokens take part at all. vLLM's own ``kv_load_tiers`` (a list of ``{"medium": ...,
"locality": ...}``) is understood as ``load_from``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtierd.core.model import Locality, Medium, Scope

KEY = "kvtierd"
VLLM_KEY = "kv_load_tiers"
_KNOWN = ("load_from", "store_to", "max_tokens")


@dataclass(frozen=True, slots=True)
class RequestScope:
    """``scope`` for the daemon, ``None``: everything; ``max_tokens``: a block that ends later takes no part.

    ``problem``: what is wrong with the parameters; such a request is served without the cache.
    """

    scope: Scope | None = None
    max_tokens: int | None = None
    problem: str = ""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestScope:
        """Read a request's parameters; a bad value is a ``problem``, never an exception."""
        if not params:
            return cls()
        try:
            return cls._parse(params)
        except ValueError as error:
            return cls(problem=str(error))

    @classmethod
    def _parse(cls, params: Mapping[str, Any]) -> RequestScope:
        own = params.get(KEY)
        if own is None:
            own = {}
        if not isinstance(own, Mapping):
            raise ValueError(f"kv_transfer_params[{KEY!r}] must be a mapping, not {type(own).__name__}")
        if unknown := sorted(str(name) for name in own if name not in _KNOWN):
            raise ValueError(f"{KEY}.{unknown[0]}: unknown; known: {', '.join(_KNOWN)}")
        load_from = _patterns("load_from", own.get("load_from"))
        if load_from is None and VLLM_KEY in params:
            load_from = _matchers(params[VLLM_KEY])
        store_to = _patterns("store_to", own.get("store_to"))
        scope = None
        if load_from is not None or store_to is not None:
            scope = Scope(load_from=load_from, store_to=store_to)
        return cls(scope, _cap(own.get("max_tokens")))


def _patterns(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ValueError(
            f"{KEY}.{name} must be a list of tier names, medium=... or locality=..., not {value!r}"
        )
    return tuple(value)


def _cap(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{KEY}.max_tokens must be a number of tokens, not {value!r}")
    return value


def _matchers(value: object) -> tuple[str, ...] | None:
    """Translate vLLM's tier matchers; the pool always takes part, so one that means only it adds nothing."""
    if not isinstance(value, list):
        raise ValueError(f"{VLLM_KEY} must be a list of mappings, not {value!r}")
    patterns = []
    for entry in value:
        if not isinstance(entry, Mapping) or entry.keys() - {"medium", "locality"}:
            raise ValueError(f"{VLLM_KEY}: each entry has the keys medium and locality, not {entry!r}")
        medium = _member("medium", entry.get("medium"), Medium)
        locality = _member("locality", entry.get("locality"), Locality)
        if medium is None and locality is None:
            return None
        if medium != Medium.CPU:
            patterns.append(f"locality={locality}" if locality is not None else f"medium={medium}")
    return tuple(patterns)


def _member(name: str, value: object, kind: type[Medium] | type[Locality]) -> str | None:
    if value is None:
        return None
    names = [item.value for item in kind]
    if not isinstance(value, str) or value.upper() not in names:
        raise ValueError(f"{VLLM_KEY}: {name} is one of {', '.join(names)}, not {value!r}")
    return value.upper()

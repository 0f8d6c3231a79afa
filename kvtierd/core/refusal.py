"""Why a request is refused before anything changes: what the codec cannot see is wrong with it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from kvtierd.core import stimuli
from kvtierd.core.effects import ErrorCode

EXTRA_KEYS_DEPTH = 8
"""Levels of containers in a block's ``extra_keys``; vLLM's have three."""


class Refusal(Exception):
    """Carries a coded error from a check to the one place that answers."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_tiers(wanted: Iterable[str], known: Sequence[str]) -> None:
    """Check names of tiers.

    Raises:
        Refusal: one is none; the message names the nearest and all there are.
    """
    for name in wanted:
        if name not in known:
            raise Refusal(ErrorCode.UNKNOWN_TIER, unknown_tier(name, known))


def unknown_tier(name: str, known: Sequence[str]) -> str:
    """Return what to say of a tier that does not exist."""
    name = name[:64]  # the sender may have made it as long as a message
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"no tier is named {name!r}; {meant}the tiers are {', '.join(known)}"


def check_meta(request: stimuli.PrepareStore) -> None:
    """Check the metadata of a store.

    Raises:
        Refusal: it is not parallel to the keys, or could not be told.
    """
    if request.meta and len(request.meta) != len(request.keys):
        raise Refusal(ErrorCode.BAD_REQUEST, f"{len(request.meta)} meta for {len(request.keys)} keys")
    for meta in request.meta:
        if meta is None:
            continue
        if meta.parent in meta.hashes:
            raise Refusal(ErrorCode.BAD_REQUEST, f"block {meta.hashes[0]!r} names itself as its parent")
        if meta.extra_keys is not None and _nested_deeper(meta.extra_keys, EXTRA_KEYS_DEPTH):
            message = f"extra_keys are nested deeper than {EXTRA_KEYS_DEPTH} levels"
            raise Refusal(ErrorCode.BAD_REQUEST, message)


def _nested_deeper(value: object, levels: int) -> bool:
    """Whether containers are nested deeper: what can just be decoded cannot always be encoded again."""
    if isinstance(value, dict):
        items: Iterable[object] = itertools.chain(value, value.values())
    elif isinstance(value, list | tuple):
        items = value
    else:
        return False
    return not levels or any(_nested_deeper(item, levels - 1) for item in items)

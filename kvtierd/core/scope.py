"""Per-request scope: which secondary tiers a pattern of a :class:`kvtierd.core.model.Scope` means.

A pattern is a tier's name, ``medium=STORAGE`` or ``locality=LOCAL``. The CPU tier always takes part; naming
it is allowed and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.model import Locality, Medium
from kvtierd.core.refusal import unknown_tier
from kvtierd.core.tier import Tier

_VALUES = {"medium": {item.value for item in Medium}, "locality": {item.value for item in Locality}}


def problem(pattern: str, tiers: Sequence[Tier]) -> str | None:
    """Return what is wrong with a pattern, or ``None``."""
    label, equals, value = pattern.partition("=")
    if not equals:
        if any(tier.name == pattern for tier in tiers):
            return None
        return unknown_tier(pattern, [tier.name for tier in tiers])
    if label not in _VALUES:
        return f"{pattern!r}: write a tier's name, medium=... or locality=..."
    if value not in _VALUES[label]:
        return f"{pattern!r}: {label} is one of {', '.join(sorted(_VALUES[label]))}"
    return None


def select(patterns: tuple[str, ...] | None, tiers: Sequence[Tier]) -> tuple[str, ...] | None:
    """Return the names of the tiers that some pattern means; ``None`` stays "all"."""
    if patterns is None:
        return None
    return tuple(tier.name for tier in tiers if any(_means(pattern, tier) for pattern in patterns))


def _means(pattern: str, tier: Tier) -> bool:
    label, equals, value = pattern.partition("=")
    if not equals:
        return tier.name == pattern
    if label == "medium":
        return tier.spec.medium.value == value
    return tier.spec.locality is not None and tier.spec.locality.value == value

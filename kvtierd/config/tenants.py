"""Section ``tenants``: who is sure of how much of which tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field, StringConstraints

from kvtierd.config.fields import Name, Problem, Section, Size
from kvtierd.core.tenants import NAME_LENGTH, NAMED

SPARE = 8
"""A storage tier keeps at most one byte in so many for other things than blocks."""


class Tenant(Section):
    """One tenant by the name that its engines give; ``other``: all that are not named, together.

    ``shares``: bytes of tiers, by the tiers' names, that it is sure of. What is not in there is 0: it then
    has what is free, and loses it first.
    """

    name: Annotated[
        str, StringConstraints(min_length=1, max_length=NAME_LENGTH, pattern=r"^[^\x00-\x1f\x7f]+$")
    ]
    shares: Annotated[dict[Name, Size], Field(default_factory=dict)]


def shares_of(tenants: Sequence[Tenant], tier: str) -> dict[str, int]:
    """Return the shares of one tier by tenant; empty where nobody has any."""
    return {tenant.name: tenant.shares[tier] for tenant in tenants if tier in tenant.shares}


def tenant_problems(tenants: Sequence[Tenant], room: Mapping[str, int | None]) -> Iterator[Problem]:
    """Yield what is wrong between tenants; ``room``: bytes for blocks in each tier, None without a limit."""
    if len(tenants) > NAMED:
        yield ("tenants",), f"has {len(tenants)} tenants; at most {NAMED} can have an account of their own"
    for index, tenant in enumerate(tenants):
        if any(tenant.name == other.name for other in tenants[:index]):
            yield ("tenants", index, "name"), f"another tenant is already named {tenant.name!r}"
        for tier in tenant.shares:
            path = ("tenants", index, "shares", tier)
            if tier not in room:
                yield path, f"no tier is named {tier!r}; the tiers are {', '.join(room)}"
            elif room[tier] is None:
                yield path, "has no effect: the tier has no max_bytes, so nothing is ever evicted for room"
    for tier, size in room.items():
        total = sum(shares_of(tenants, tier).values())
        if size is not None and total > size:
            yield ("tenants",), f"shares of {tier!r} add up to {total} bytes; it has {size} for blocks"

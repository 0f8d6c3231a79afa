"""The metrics of tenants: those of the tier file, or the first that came, and ``other`` for all the rest."""

from __future__ import annotations

from collections.abc import Iterable

from kvtierd.edges.metrics.family import Figures, Read, Reading, counter, gauge, number

LABELS = ("tenant", "tier")


def _of_each(name: str) -> Read:
    """Return a reader of one figure of every tenant in every tier."""

    def read(figures: Figures) -> Iterable[Reading]:
        known = {row["tenant"]: row["tiers"] for row in figures.status.get("tenants", ())}
        for tenant in known or figures.plan.tenants:
            tiers = known.get(tenant, {})
            for tier, _ in figures.each_tier():
                yield (tenant, tier), number(tiers.get(tier, {}).get(name))

    return read


FAMILIES = (
    gauge(
        "tenant_used_bytes", "Bytes that a tenant's blocks take in a tier.", LABELS, _of_each("used_bytes")
    ),
    gauge("tenant_blocks", "A tenant's blocks in a tier.", LABELS, _of_each("blocks")),
    gauge(
        "tenant_share_bytes",
        "Bytes of a tier that a tenant is sure of, from the tier file.",
        LABELS,
        _of_each("share_bytes"),
    ),
    counter(
        "tenant_evicted_blocks",
        "A tenant's blocks that gave way to others (its own included) or to a full storage.",
        LABELS,
        _of_each("evicted"),
    ),
)

"""By which names series exist: read off the tier file, so that all of them are there from the start."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvtierd.config.audiences import Audience
from kvtierd.config.schema import CpuTier, Tier, TierFile
from kvtierd.core.model import Medium
from kvtierd.core.tenants import OTHER, Tenants
from kvtierd.wire.projection import DEVICE


@dataclass(frozen=True, slots=True)
class AudienceNames:
    """``label``: as in the status (one for each rank port). ``media``: those on its wire."""

    label: str
    media: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The label values that a tier file gives."""

    tiers: tuple[dict[str, str], ...]
    audiences: tuple[AudienceNames, ...]
    relays: int
    config: dict[str, str]
    tenants: tuple[str, ...] = (OTHER,)


def make_plan(tier_file: TierFile) -> Plan:
    """Return the label values of a tier file."""
    events = tier_file.events
    return Plan(
        tiers=tuple(_tier(tier) for tier in tier_file.tiers),
        audiences=tuple(
            AudienceNames(
                audience.name if not rank else f"{audience.name}.{rank}", _media(tier_file, audience)
            )
            for audience in (events.audiences if events.enabled else ())
            for rank in range(audience.rank_ports or 1)
        ),
        relays=len(events.relay) if events.enabled else 0,
        tenants=Tenants([tenant.name for tenant in tier_file.tenants]).names,
        config={
            "digest": hashlib.sha256(tier_file.model_dump_json().encode()).hexdigest()[:12],
            "pool_backing": tier_file.pool.backing,
            "pool_lock": tier_file.pool.lock,
            "pool_pin": tier_file.pool.pin,
            "pool_huge_pages": "on" if tier_file.pool.huge_pages else "off",
        },
    )


def _tier(tier: Tier) -> dict[str, str]:
    locality = getattr(tier, "locality", None)
    return {
        "tier": tier.name,
        "type": tier.type,
        "medium": (Medium.CPU if isinstance(tier, CpuTier) else Medium.STORAGE).value,
        "locality": "" if locality is None else locality.value,
        "policy": tier.policy,
    }


def _media(tier_file: TierFile, audience: Audience) -> tuple[str, ...]:
    """Return the media that an audience can hear of, by their names on its wire."""
    media = {DEVICE: DEVICE} if tier_file.events.relay else {}
    for tier in tier_file.tiers:
        if tier.events:
            medium = _tier(tier)["medium"]
            media[audience.medium_names.get(tier.type, medium)] = medium
    return tuple(
        sorted(name for name, medium in media.items() if audience.media is None or medium in audience.media)
    )

"""Makes a daemon's larger rooms from its tier file."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtierd.config.schema import TierFile
from kvtierd.config.tenants import shares_of
from kvtierd.core import stimuli
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import Layout, Medium
from kvtierd.core.policies import POLICIES
from kvtierd.core.tier import TierSpec
from kvtierd.edges import pinning
from kvtierd.edges.admin import AdminServer, metrics_route
from kvtierd.edges.announcer import Announcer
from kvtierd.edges.backends.base import Backend
from kvtierd.edges.backends.factory import holds_blocks, make_backend, make_spec
from kvtierd.edges.engine import Limits
from kvtierd.edges.hub import EventHub
from kvtierd.edges.journal import TAIL, Journal
from kvtierd.edges.kept_pool import KeptPool
from kvtierd.edges.merge import MergedStream
from kvtierd.edges.movers import Mover
from kvtierd.edges.opening import Opening, Openings
from kvtierd.edges.peers import Allowed
from kvtierd.edges.pool import Found, Pool
from kvtierd.edges.presence import SharedPresence
from kvtierd.edges.status_page import page_routes
from kvtierd.edges.traces import open_traces
from kvtierd.edges.trail import Trail
from kvtierd.edges.unix_socket import CannotCreate, Permissions, make_folder
from kvtierd.logs.events import event
from kvtierd.report import Report
from kvtierd.wire.announced import TierLabel

log = logging.getLogger(__name__)


def make_backends(tier_file: TierFile) -> dict[str, Backend]:
    """Return the secondaries' storage by tier name, untouched.

    Raises:
        ConfigError: a type is a package's, and that cannot be used.
    """
    return {tier.name: make_backend(tier) for tier in tier_file.secondaries}


def make_openings(
    tier_file: TierFile, backends: Mapping[str, Backend], loop: asyncio.AbstractEventLoop
) -> Openings:
    """Return what makes the secondaries' storage usable."""
    return Openings(
        {
            tier.name: Opening(
                tier.name, backends[tier.name], loop, functools.partial(holds_blocks, tier), tier.deadline
            )
            for tier in tier_file.secondaries
        }
    )


def make_admin(address: str, report: Report) -> AdminServer:
    """Return the server of probes, status, metrics and the status page."""
    routes = {"/metrics": metrics_route(report.figures), **page_routes(report.page)}
    return AdminServer(address, report.health, report.status, routes)


def make_trail(tier_file: TierFile) -> Trail:
    """Return what tells of turns. Spans take a while to set up: call it off the loop."""
    return Trail(open_traces() if tier_file.traces.enabled else None)


def make_ladder(tier_file: TierFile, pool: Pool, backends: Mapping[str, Backend]) -> Ladder:
    """Return the core for a pool and the secondaries' storage."""
    primary = tier_file.primary
    tenants = tier_file.tenants
    specs = [
        make_spec(tier, backends[tier.name], pool.bytes, shares_of(tenants, tier.name))
        for tier in tier_file.secondaries
    ]
    return Ladder(
        pool_id=pool.pool_id,
        pool_bytes=pool.bytes,
        primary=TierSpec(
            name=primary.name,
            medium=Medium.CPU,
            events=primary.events,
            policy=POLICIES[primary.policy],
            shares=shares_of(tenants, primary.name),
        ),
        secondaries=specs,
        job_ttl=tier_file.engine.job_ttl,
        lease_ttl=tier_file.engine.lease_ttl,
        max_leases=tier_file.engine.max_leases,
        tenants=[tenant.name for tenant in tenants],
        presence=shown(tier_file, pool),
    )


def shown(tier_file: TierFile, pool: Pool) -> SharedPresence | None:
    """Return what engines see of the tiers without asking.

    Nothing where others write, too, unseen by us, or where the kernel would let engines change it.
    """
    shared = any(getattr(tier, "shared", False) for tier in tier_file.secondaries)
    return pool.presence if pool.presence.safe and not shared else None


def socket_rules(tier_file: TierFile, control: bool) -> dict[str, Any]:
    """Return what the tier file says of one of the Unix sockets, for :class:`EngineServer`."""
    engine, access = tier_file.engine, tier_file.access
    peers = access.control if control else access.engine
    return {
        "limits": Limits(
            max_frame_bytes=engine.max_frame_bytes,
            max_connections=engine.max_connections,
            max_requests=engine.max_requests,
            max_buffered=engine.max_buffered,
            hello_timeout=engine.hello_timeout,
            frame_timeout=engine.frame_timeout,
        ),
        "permissions": Permissions(access.mode_bits(control=control), access.group),
        "allowed": Allowed(peers.uids, peers.gids, os.geteuid()),
    }


def make_movers(
    tier_file: TierFile,
    pool: Pool,
    backends: Mapping[str, Backend],
    loop: asyncio.AbstractEventLoop,
    turn: Callable[[Sequence[stimuli.Stimulus]], None],
) -> dict[str, Mover]:
    """Return the secondaries' threads by tier name; what becomes of their work is fed to ``turn``."""
    return {
        tier.name: Mover(
            tier.name,
            backends[tier.name],
            pool.slot_view,
            lambda finished: turn([finished]),
            loop,
            stalled=lambda op: turn([stimuli.Stalled(op)]),
            probed=lambda probed: turn([probed]),
            readers=tier.readers,
            writers=tier.writers,
            deadline=tier.deadline,
        )
        for tier in tier_file.secondaries
    }


def make_hub(tier_file: TierFile, fresh: bool) -> EventHub:
    """Return the event hub; ``fresh``: no tier held blocks before. Reads files: call it off the loop."""
    try:
        make_folder("state_dir", tier_file.state_dir)
    except CannotCreate as error:  # numbers start from the clock then, and nothing survives a crash
        log.warning("%s", error, extra=event("state_not_written", reason=str(error)))
    return EventHub(
        tier_file.events,
        tiers={tier.name: tier.type for tier in tier_file.tiers if tier.events},
        state_dir=tier_file.state_dir,
        clock=time.time,
        endpoints_file=tier_file.runtime_dir / "events.json",
        fresh=fresh,
    )


def make_announcer(
    tier_file: TierFile,
    stream: MergedStream,
    ladder: Ladder,
    loop: asyncio.AbstractEventLoop,
    *,
    fresh: bool,
    pool_survived: bool,
) -> Announcer:
    """Return what tells the stream of the ladder's events and keeps the announced journal."""
    specs = [tier.spec for tier in (ladder.stack.primary, *ladder.stack.secondaries)]
    journal = Journal(
        tier_file.state_dir,
        background=functools.partial(loop.run_in_executor, None),
        tail=TAIL + max((audience.coalesce or 0.0 for audience in tier_file.events.audiences), default=0.0),
    )
    labels = [TierLabel(spec.name, spec.medium, spec.locality) for spec in specs if spec.events]
    return Announcer(stream, journal, labels, fresh=fresh, pool_survived=pool_survived, early=True)


def describe(ladder: Ladder, movers: Mapping[str, Mover], namespace: str) -> None:
    """Leave a readable record of a namespace beside its blocks, best effort; log what sets it apart."""
    spaces = ladder.stack.primary.spaces
    layout = spaces[namespace].layout
    is_first = sum(session.namespace == namespace for session in ladder.sessions.open.values()) == 1
    for other in (space.layout for space in spaces.values() if is_first):
        if (other.model, other.tenant) == (layout.model, layout.tenant) and other != layout:
            _say_what_differs(layout, other)
    for mover in movers.values():
        mover.describe(namespace, layout)


def _say_what_differs(layout: Layout, other: Layout) -> None:
    names = layout.differences(other)
    if set(names) <= {"hash_algorithm", "hash_seed"}:
        log.warning(
            "model %r: blocks hashed with %r, seed %r share nothing with those of %r, seed %r:"
            " give all engines one hash seed (PYTHONHASHSEED)",
            layout.model,
            layout.hash_algorithm,
            layout.hash_seed,
            other.hash_algorithm,
            other.hash_seed,
            extra=event("hash_seeds_differ", model=layout.model),
        )
        return
    log.info(
        "model %r: an engine shares nothing with the blocks of another one, for they differ in %s",
        layout.model,
        "; ".join(f"{name}: {getattr(layout, name)!r}, not {getattr(other, name)!r}" for name in names),
        extra=event("layouts_differ", model=layout.model, fields=names),
    )


def take_pool(tier_file: TierFile, owner: int, pool_id: str, *, recorded: bool) -> KeptPool:
    """Return the pool that another daemon hands over, pinned. May take seconds: call it off the loop.

    Raises:
        PoolError: it cannot be used.
    """
    found = Found(owner, pool_id)
    kept = KeptPool.take(tier_file.pool, tier_file.runtime_dir, found, recorded=recorded)
    try:
        pinning.pin(kept.pool, tier_file.pool.pin)
    except BaseException:
        kept.close(keep=True)
        raise
    return kept

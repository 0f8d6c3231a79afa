"""Other audiences for a hub that runs: who stays notices nothing, who changes misses nothing.

What readers know at the beginning is the seed of every new stream; what is told from then on waits for it. So
readers of an audience that changed, be it in its view, hear exactly the difference, once they had time to
connect again. Readers of one that is new find a number missing, should they be from an earlier time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvtierd.config.audiences import Events
from kvtierd.core.model import TierEvent
from kvtierd.edges.addresses import CannotBind
from kvtierd.edges.curve import CurveKeys, Doorkeeper
from kvtierd.edges.outlet import OutletPlan
from kvtierd.edges.publisher import REJOIN, Publisher, StreamPlan
from kvtierd.errors import ConfigError

if TYPE_CHECKING:
    from kvtierd.edges.hub import EventHub

CHANGE_GRACE = 0.5
"""Seconds that an audience which goes has for its last batches."""
SEED_SLICE = 512


async def change(hub: EventHub, events: Events, known: Callable[[], list[TierEvent]]) -> None:
    """Do what :meth:`kvtierd.edges.hub.EventHub.change` says."""
    from kvtierd.edges.hub import load_keys

    assert hub._loop is not None
    keys = await hub._loop.run_in_executor(None, load_keys, events)
    wanted = hub.plans(events, keys)
    before = {outlet.plan.label: (publisher.plan, outlet.plan) for publisher, outlet in hub._outlets()}
    seeds, hub._missed = known(), []
    try:
        await _retire(hub, {label for label, plan in before.items() if wanted.get(label) != plan})
        try:
            await _join(hub, wanted, keys, seeds, known_before=before.keys())
        except ConfigError:
            await _join(hub, before, hub._keys, seeds, known_before=before.keys())
            raise
        hub._keys = keys
    finally:
        hub._missed = None
        order = list(wanted)
        hub._publishers.sort(
            key=lambda publisher: min(
                (order.index(o.plan.label) for o in publisher.outlets if o.plan.label in order), default=0
            )
        )
        hub._write_endpoints()


async def _retire(hub: EventHub, labels: Collection[str]) -> None:
    assert hub._loop is not None
    for publisher in list(hub._publishers):
        gone = [outlet for outlet in publisher.outlets if outlet.plan.label in labels]
        if len(gone) < len(publisher.outlets):
            for outlet in gone:
                await publisher.drop(outlet, CHANGE_GRACE)
            continue
        hub._publishers.remove(publisher)
        await publisher.finish(CHANGE_GRACE, CHANGE_GRACE)
        publisher.close(CHANGE_GRACE)
        await hub._loop.run_in_executor(None, publisher.release)


async def _join(
    hub: EventHub,
    wanted: Mapping[str, tuple[StreamPlan, OutletPlan]],
    keys: Mapping[str, CurveKeys],
    seeds: Sequence[TierEvent],
    *,
    known_before: Collection[str],
) -> None:
    """Begin to serve those that are not served; they know ``seeds`` and hear what was missed since."""
    assert hub._loop is not None
    assert hub._context is not None
    assert hub._missed is not None
    served = {outlet.plan.label for _, outlet in hub._outlets()}
    new = {label: plan for label, plan in wanted.items() if label not in served}
    made = await hub._loop.run_in_executor(None, hub.make, new)
    if keys and hub._door is None:
        hub._door = Doorkeeper(hub._context, hub._loop, keys)
    elif hub._door is not None:
        hub._door.let_in(keys)
    try:
        for publisher in made:
            for at in range(0, len(seeds), SEED_SLICE):
                publisher.seed(seeds[at : at + SEED_SLICE])
                await asyncio.sleep(0)
            await hub._loop.run_in_executor(None, publisher.settle)
            if not any(outlet.plan.label in known_before for outlet in publisher.outlets):
                publisher.skip_number()
            await _open(hub, publisher)
    except BaseException:
        for publisher in made:
            publisher.abandon()
            await hub._loop.run_in_executor(None, publisher.release)
        raise
    if made:
        await asyncio.sleep(REJOIN)  # readers of a socket that was closed connect again
    hub._publishers += made
    for publisher in made:
        publisher.publish(hub._missed)


async def _open(hub: EventHub, publisher: Publisher) -> None:
    """Start a publisher whose addresses may be free only in a moment."""
    assert hub._loop is not None
    assert hub._context is not None
    until = hub._loop.time() + CHANGE_GRACE + 1.0
    while True:
        try:
            publisher.start(hub._loop, hub._context)
        except CannotBind:
            publisher.abandon()
            if hub._loop.time() > until:
                raise
            await asyncio.sleep(0.02)
        else:
            return

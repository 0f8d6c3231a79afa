"""How a daemon ends: what is under way is finished within the grace, then everything is closed in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from kvtierd.core import stimuli
from kvtierd.logs.events import event

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon

log = logging.getLogger(__name__)

LAST_SECONDS = 1.0
"""Beyond the grace, for files of our own to be closed."""


async def drain(daemon: Daemon) -> None:
    """Finish what is under way within the grace period, then say that the pool is gone."""
    if daemon.state != "aborting":
        daemon.state = "stopping"
    if not daemon._gone:
        daemon.life.stopping()
    grace = daemon.tier_file.engine.shutdown_grace
    deadline = daemon._loop.time() + grace
    await daemon._takeover.close()
    if daemon._engine is not None:
        await daemon._engine.stop_listening()
    if daemon._failure is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline - grace / 2):
                write_down(daemon)
                await written(daemon)
        daemon.turn([stimuli.Stop(keep_pool=keeps(daemon))])
    for mover in daemon._movers.values():
        if not await mover.close(max(0.1, deadline - daemon._loop.time() - grace / 4)):
            daemon._stuck = True  # a thread may still touch its slots: leave its backend and the pool alone
    await end_stream(daemon, deadline, keep=keeps(daemon))
    for server in (daemon._engine, daemon._control):
        if server is not None:
            await server.stop_listening()
            server.close()
    if daemon._admin is not None:
        await daemon._admin.close()
    await daemon._loop.run_in_executor(None, daemon._trail.close)
    log.info("stopped", extra=event("stopped"))


async def end_stream(daemon: Daemon, deadline: float, *, keep: bool) -> None:
    """Get out what is on its way to readers; ``keep``: they keep what they know while the daemon is away."""
    if daemon._hub is None or daemon._announcer is None:
        return
    daemon._announcer.finish()
    if daemon._merged is not None:
        daemon._merged.close(keep=keep)
    try:
        async with asyncio.timeout_at(max(deadline, daemon._loop.time()) + LAST_SECONDS):
            await daemon._hub.close(max(0.1, deadline - daemon._loop.time()))
            flushed = daemon._failure is None and daemon._loop.time() < deadline
            await daemon._loop.run_in_executor(None, daemon._announcer.close, flushed)
    except TimeoutError:
        log.warning(
            "state_dir %s does not answer; it is left as it is",
            daemon.tier_file.state_dir,
            extra=event("storage_not_closed", path=str(daemon.tier_file.state_dir)),
        )


def keeps(daemon: Daemon) -> bool:
    """Whether the pool stays, and readers keep what they know, while the daemon is away."""
    whole = daemon._failure is None and daemon._kept is not None and daemon._kept.whole
    return whole and daemon.tier_file.events.on_stop == "keep"


def write_down(daemon: Daemon) -> None:
    """Begin to write what only the pool holds, where it does not outlive the daemon."""
    if not keeps(daemon):
        daemon.turn([stimuli.Drain()])


async def written(daemon: Daemon) -> None:
    """Wait until nothing is on its way to a secondary."""
    assert daemon._ladder is not None
    tiers = daemon._ladder.stack.secondaries
    while daemon.state != "aborting" and any(
        tier.in_flight or (tier.wanted and not tier.gate.outage) for tier in tiers
    ):
        daemon._turned.clear()
        await daemon._turned.wait()


def close(daemon: Daemon) -> None:
    """Give everything back that a start took, as far as no thread may still touch it."""
    daemon.reloader.close()
    daemon.watch.stop()
    if daemon._liveness is not None:
        daemon._liveness.close()
    if daemon._openings is not None:
        daemon._openings.stop()
    if daemon._stuck or (daemon._gone and daemon._kept is None):
        return
    if daemon._gone:
        assert daemon._kept is not None
        daemon._kept.close(keep=True)
        return
    if daemon._openings is not None:
        daemon._openings.close()
    if daemon._kept is not None:
        unused = daemon._engine is None and daemon._failure is None
        daemon._kept.close(keep=keeps(daemon) or (unused and daemon._kept.survived))

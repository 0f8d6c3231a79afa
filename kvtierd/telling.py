"""How a daemon's event stream begins: its sockets with the others, its voice once readers' knowledge is read.

Engines are served meanwhile; what turns publish waits in the announcer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtierd import assembly
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import Block, BlockId, TierEvent
from kvtierd.edges.merge import MergedStream

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon


async def open_stream(daemon: Daemon, ladder: Ladder, *, fresh: bool) -> None:
    """Open the stream's sockets; ``fresh``: no tier held blocks before.

    Raises:
        ConfigError: one of them cannot be opened.
    """
    config, loop = daemon.tier_file, daemon._loop
    survived = daemon._kept is not None and daemon._kept.survived
    daemon._hub = await loop.run_in_executor(None, assembly.make_hub, config, fresh)
    daemon._hub.open(loop)
    daemon._merged = MergedStream(daemon._hub, config.events.relay, config.state_dir)
    daemon._merged.open(loop)
    daemon._announcer = assembly.make_announcer(
        config, daemon._merged, ladder, loop, fresh=fresh, pool_survived=survived
    )


async def begin_stream(daemon: Daemon, restored: Sequence[TierEvent]) -> None:
    """Read what readers know, which may take seconds, and tell them what they do not.

    ``restored``: the stores of what survived in the pool.
    """
    hub, merged, announcer, ladder = daemon._hub, daemon._merged, daemon._announcer, daemon._ladder
    if hub is None or merged is None or announcer is None or ladder is None:
        return
    stack = ladder.stack

    def known(tier: str, block_id: BlockId) -> Block | None:
        """Return a tier's description of a block; called in another thread, it only reads."""
        holding = stack.primary if tier == stack.primary.name else stack.by_name.get(tier)
        node = None if holding is None else holding.resident(block_id)
        return None if node is None else node.block

    await daemon._loop.run_in_executor(None, merged.load)
    await daemon._loop.run_in_executor(None, announcer.load, restored, [stack.primary.name], known)
    hub.begin()
    announcer.start(daemon._loop)
    merged.start()

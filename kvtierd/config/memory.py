"""What a daemon may take besides its pool, from its tier file: every part has a bound (``MEMORY.md``)."""

from __future__ import annotations

from kvtierd.config.schema import TierFile

PROCESS_BYTES = 96 << 20
"""Interpreter, libraries, threads: 50 MiB measured at rest."""
ENTRY_BYTES = 1024
"""One block in one tier: its entry in the index and what the event stream keeps of it; 880 measured."""
TOKEN_BYTES = 8
"""One token id of a block's metadata, packed and kept once for all tiers; 6 measured with 16 a block."""
SOCKETS = 2


def bounds(tier_file: TierFile) -> dict[str, int]:
    """Return the bound in bytes of each part that does not depend on how many blocks there are."""
    engine, events = tier_file.engine, tier_file.events
    streams = sum(audience.rank_ports or 1 for audience in events.audiences) if events.enabled else 0
    return {
        "process": PROCESS_BYTES,
        "connections": SOCKETS * (engine.max_buffered + engine.max_frame_bytes),
        "rings": streams * events.ring_bytes,
        "transfers": sum(tier.inflight_bytes for tier in tier_file.secondaries),
    }


def index_bytes(entries: int, tokens: int = 0) -> int:
    """Return what the index of so many blocks (each counted in every tier that has it) takes, roughly."""
    return entries * ENTRY_BYTES + tokens * TOKEN_BYTES

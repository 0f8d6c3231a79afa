"""What happened to a block lately: the last stimuli in short, and all that the ladder knows of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtierd.core.ladder import Ladder
from kvtierd.core.model import BlockId, BlockKey, group_of, hash_of
from kvtierd.core.residency import Node
from kvtierd.core.stimuli import Asked, Finished, Stimulus

ENTRIES = 512
KEYS = 64
"""What is kept of each; a story of larger requests is told in part."""
LAST = 24


class _Entry(NamedTuple):
    at: float
    what: str
    where: int
    keys: tuple[BlockKey, ...]
    detail: str


class Story:
    """The last stimuli of one ladder. It holds names, no bytes and no tokens."""

    def __init__(self, entries: int = ENTRIES, keys: int = KEYS) -> None:
        self._entries: deque[_Entry] = deque(maxlen=entries)
        self._keys = keys

    def note(self, stimulus: Stimulus, now: float) -> None:
        """Remember one stimulus."""
        if isinstance(stimulus, Asked):
            request = stimulus.request
            keys: tuple[BlockKey, ...] = getattr(request, "keys", getattr(request, "failed", ()))
            number = getattr(request, "job", 0) or getattr(request, "lease", 0)
            detail = f"{len(keys)} keys" + (f", number {number}" if number else "")
            entry = _Entry(now, type(request).__name__, stimulus.session, keys[: self._keys], detail)
        elif isinstance(stimulus, Finished):
            outcomes = stimulus.outcomes[: self._keys]
            keys = tuple(outcome.id.key for outcome in outcomes)
            detail = ", ".join(sorted({outcome.status.value for outcome in outcomes}))
            entry = _Entry(now, "Finished", stimulus.op, keys, detail)
        else:
            entry = _Entry(now, type(stimulus).__name__, 0, (), "")
        self._entries.append(entry)

    def tell(self, ladder: Ladder, block_id: BlockId | None) -> Iterator[str]:
        """Yield lines: where the block is and who holds it, what named it, and what happened last."""
        if block_id is not None:
            name, group = hash_of(block_id.key).hex(), group_of(block_id.key)
            yield f"block {name}, group {group}, namespace {block_id.namespace}"
            yield from _whereabouts(ladder, block_id)
            for entry in self._entries:
                if block_id.key in entry.keys:
                    yield "  " + _shown(entry)
        yield "the last that happened:"
        for entry in list(self._entries)[-LAST:]:
            yield "  " + _shown(entry)


def _shown(entry: _Entry) -> str:
    return f"{entry.at:.6f} {entry.what} {entry.where} {entry.detail}".rstrip()


def _whereabouts(ladder: Ladder, block_id: BlockId) -> Iterator[str]:
    stack, sessions = ladder.stack, ladder.sessions
    found: list[tuple[str, Node | None]] = [(stack.primary.name, stack.primary.get(block_id))]
    found += [(tier.name, tier.blocks.get(block_id)) for tier in stack.secondaries]
    yield from (f"  in {tier}: {node}" for tier, node in found if node is not None)
    holders: list[tuple[str, int, Sequence[Node]]] = [
        ("job", job.number, list(job.nodes.values())) for job in sessions.jobs.values()
    ]
    holders += [("lease", lease.number, lease.nodes) for lease in sessions.leases.values()]
    holders += [("quarantine", held.number, held.nodes) for held in sessions.quarantines.values()]
    holders += [(f"{of.kind} operation", op, [*of.pooled, *of.stored]) for op, of in stack.operations.items()]
    for what, number, nodes in holders:
        for node in nodes:
            if node.block.id == block_id:
                yield f"  held by {what} {number}: {node}"

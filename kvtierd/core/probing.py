"""Unknown keys of shared tiers: looked for in the background, remembered for a while when not there.

Other daemons write to a shared tier, so its index here is not the whole truth. The engine's path never waits
for a look at the storage: a lookup that may promote says PENDING while one is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtierd.core.effects import Probe
from kvtierd.core.model import BlockId, State
from kvtierd.core.residency import StoredNode
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import FoundBlock
from kvtierd.core.tier import SecondaryTier

ABSENT_SECONDS = 5.0
ABSENT_LIMIT = 1 << 16
IN_FLIGHT_LIMIT = 1 << 13


class Probing:
    """Probes of the shared tiers and the negative cache over them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._tiers = [tier for tier in stack.secondaries if tier.spec.shared]
        self._absent: dict[str, OrderedDict[BlockId, float]] = {
            tier.name: OrderedDict() for tier in self._tiers
        }
        self._batch: dict[str, list[BlockId]] = {tier.name: [] for tier in self._tiers}
        self._ops: dict[int, tuple[BlockId, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def wonder(self, block_id: BlockId, scope: tuple[str, ...] | None = None) -> bool:
        """Whether some shared tier (of those named) is asked for the block; :meth:`flush` sends it."""
        asked = False
        for tier in self._tiers:
            if scope is not None and tier.name not in scope:
                continue
            if block_id in tier.asked:
                asked = True
            elif self._worth_asking(tier, block_id) and len(tier.asked) < IN_FLIGHT_LIMIT:
                tier.asked[block_id] = 0
                self._batch[tier.name].append(block_id)
                asked = True
        return asked

    def _worth_asking(self, tier: SecondaryTier, block_id: BlockId) -> bool:
        if tier.scanning or tier.busy(block_id) or not tier.gate.may_read(self._stack.now):
            return False
        if block_id in tier.stuck:  # it is there, and was to be deleted
            return False
        absent_until = self._absent[tier.name].get(block_id)
        return absent_until is None or absent_until <= self._stack.now

    def flush(self) -> None:
        """Send the noted probes, one effect for each tier."""
        for tier in self._tiers:
            if batch := tuple(self._batch[tier.name]):
                self._batch[tier.name] = []
                op = self._stack.begin(Operation("probe", tier))
                self._ops[op] = batch
                tier.asked.update(dict.fromkeys(batch, op))
                self._stack.effects.append(Probe(op, tier.name, batch))
                tier.gate.reads.started()

    def probed(self, op: int, tier: SecondaryTier, found: Sequence[FoundBlock], *, failed: bool) -> None:
        """Take a probe's result: index and announce what is there, remember what is not."""
        asked = self._ops.pop(op, ())
        ids = self._forget(op, asked, tier)
        tier.gate.reads.ended(self._stack.now, "the tier does not answer probes" if failed else None)
        tier.counters["probed"] += len(asked)
        for item in found:
            block_id = item.block.id
            if block_id in ids and tier.blocks.get(block_id) is None and block_id not in tier.stuck:
                node = StoredNode(item.block, State.RESIDENT, size=item.stored_bytes)
                tier.add(node)
                tier.show(node, self._stack.now)
                tier.counters["probe_found"] += 1
        if not failed:
            self._remember(tier, ids, {item.block.id for item in found})

    def give_up(self, op: int, tier: SecondaryTier) -> None:
        """Stop waiting for a stalled probe; what it says later is too old to count."""
        self._forget(op, self._ops.get(op, ()), tier)

    @staticmethod
    def _forget(op: int, asked: Sequence[BlockId], tier: SecondaryTier) -> dict[BlockId, None]:
        """Take the probe's blocks out of ``asked``; return those that did not leave the tier meanwhile."""
        ids = {block_id: None for block_id in asked if tier.asked.get(block_id) == op}
        for block_id in ids:
            del tier.asked[block_id]
        return ids

    def _remember(self, tier: SecondaryTier, ids: Iterable[BlockId], present: set[BlockId]) -> None:
        absent = self._absent[tier.name]
        for block_id in ids:
            if block_id not in present:
                absent[block_id] = self._stack.now + ABSENT_SECONDS
                absent.move_to_end(block_id)
        while absent and (len(absent) > ABSENT_LIMIT or next(iter(absent.values())) <= self._stack.now):
            absent.popitem(last=False)

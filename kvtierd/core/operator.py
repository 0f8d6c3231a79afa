"""What an operator asks of the tiers: to remove what he chose at once, or to make room in one of them.

Neither belongs to a session. Removals go out as events of their tiers, block by block, as all others do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvtierd.core.effects import ErrorCode, LadderReply, Refused, Removed
from kvtierd.core.model import BlockId, Departure, Layout, State
from kvtierd.core.refusal import Refusal, check_tiers
from kvtierd.core.resets import Resets
from kvtierd.core.residency import PoolNode, ResidentSet, StoredNode, leaf_first, size_of
from kvtierd.core.stack import Removals, Stack
from kvtierd.core.stimuli import OperatorEvict, OperatorRequest, OperatorReset
from kvtierd.core.tier import PoolSpace, PrimaryTier, SecondaryTier

EVICT_SLICE = 256
"""Blocks that one turn evicts for an operator: engines are served in between."""
FULL_NAMESPACE = 32


AnyNode = PoolNode | StoredNode


@dataclass(slots=True)
class _Evicting:
    session: int
    request: OperatorEvict
    tier: PrimaryTier | SecondaryTier
    namespaces: tuple[str, ...] | None
    candidates: Iterator[tuple[AnyNode, int]]
    """What may go next, and the bytes that it takes."""
    gone: Removals = field(default_factory=Removals)

    @property
    def done(self) -> bool:
        blocks, size = self.gone.blocks[self.tier.name], self.gone.bytes[self.tier.name]
        wanted = self.request
        return (wanted.blocks is not None and blocks >= wanted.blocks) or (
            wanted.bytes is not None and size >= wanted.bytes
        )


class Operator:
    """Answers the requests of the control socket that are about blocks."""

    def __init__(self, stack: Stack, resets: Resets) -> None:
        self._stack = stack
        self._resets = resets
        self._evicting: list[_Evicting] = []

    @property
    def busy(self) -> bool:
        """Whether there is something to go on with (:meth:`go_on`) in the next turn."""
        return bool(self._evicting)

    def ordered(self, session: int, request: OperatorRequest) -> None:
        """Take a request; it is answered now or later, always once."""
        try:
            if isinstance(request, OperatorReset):
                self._reset(session, request)
            else:
                self._evict(session, request)
        except Refusal as refusal:
            self._stack.answer(session, Refused(id=request.id, code=refusal.code, message=str(refusal)))

    def go_on(self) -> None:
        """Evict the next slice of what was begun."""
        for evicting in list(self._evicting):
            self._slice(evicting)

    def finish_all(self) -> None:
        """Answer what waits with what was done of it: the daemon stops."""
        for evicting in self._evicting:
            self._answer(evicting)
        self._evicting.clear()

    # -- reset --------------------------------------------------------------------------------------

    def _reset(self, session: int, request: OperatorReset) -> None:
        tiers = self._stack.names if request.tiers is None else request.tiers
        check_tiers(tiers, self._stack.names)
        every = request.namespaces is None and request.model is None and request.tenant is None
        self._refuse_guess_in_scan(request, tiers, every=every)
        known = self._known()
        chosen, unknown = _choose(request, known)
        if request.namespaces is not None and not chosen:
            _refuse_unknown(request.namespaces, known)

        def answer(gone: Removals) -> LadderReply:
            return Removed(
                id=request.id,
                blocks=dict(gone.blocks),
                bytes=dict(gone.bytes),
                namespaces=tuple(chosen),
                unknown=tuple(unknown),
            )

        namespaces = None if every else frozenset(chosen) | _in_full(request.namespaces)
        if request.dry_run:
            self._stack.answer(session, answer(self._weigh(namespaces, tiers)))
        else:
            self._resets.begin(session, namespaces, tiers, answer)

    def _refuse_guess_in_scan(self, request: OperatorReset, tiers: Iterable[str], *, every: bool) -> None:
        """Refuse what could miss namespaces that a scan has not come across."""
        if every or (request.namespaces and len(_in_full(request.namespaces)) == len(request.namespaces)):
            return
        scanning = [tier.name for tier in self._stack.secondaries if tier.scanning and tier.name in tiers]
        if scanning:
            raise Refusal(
                ErrorCode.BUSY,
                f"tier {', '.join(scanning)} is being indexed and may hold more namespaces than are known: "
                "try again when that is done, name namespaces in full, or reset all",
            )

    def _known(self) -> dict[str, Layout | None]:
        """Return all namespaces that some tier holds blocks of; those of the pool with their layout."""
        known: dict[str, Layout | None] = {
            namespace: space.layout for namespace, space in self._stack.primary.spaces.items()
        }
        for tier in self._stack.secondaries:
            for namespace in tier.blocks.namespaces():
                known.setdefault(namespace, None)
        return known

    def _weigh(self, namespaces: frozenset[str] | None, tiers: Iterable[str]) -> Removals:
        """Return what a reset would remove."""
        found = Removals()
        for name, blocks, slot_bytes in self._sets():
            for node in blocks if name in tiers else ():
                within = namespaces is None or node.block.namespace in namespaces
                if within and node.state is State.RESIDENT:
                    found.note(name, size_of(node, slot_bytes))
        return found

    def _sets(self) -> Iterator[tuple[str, Iterable[AnyNode], int]]:
        for space in self._stack.primary.spaces.values():
            yield self._stack.primary.name, space.blocks, space.geometry.slot_bytes
        for tier in self._stack.secondaries:
            yield tier.name, tier.blocks, 0

    # -- evict --------------------------------------------------------------------------------------

    def _evict(self, session: int, request: OperatorEvict) -> None:
        check_tiers([request.tier], self._stack.names)
        if request.blocks is None and request.bytes is None and request.namespace is None:
            raise Refusal(ErrorCode.BAD_REQUEST, "evict needs a number of blocks or bytes, or a namespace")
        namespaces = None
        if request.namespace is not None:
            known = self._known()
            namespaces = tuple(name for name in known if name.startswith(request.namespace))
            if not namespaces:
                _refuse_unknown((request.namespace,), known)
        tier = self._stack.by_name.get(request.tier, self._stack.primary)
        evicting = _Evicting(session, request, tier, namespaces, iter(()))
        evicting.candidates = self._candidates(evicting)
        if request.dry_run:
            self._estimate(evicting)
        else:
            self._evicting.append(evicting)
            self._slice(evicting)

    def _estimate(self, evicting: _Evicting) -> None:
        """Answer with the most that could go: which blocks may go next changes with each that goes."""
        for node, size in self._inside(evicting):
            if evicting.done:
                break
            if not node.pins and node.state is State.RESIDENT:
                evicting.gone.note(evicting.tier.name, size)
        self._answer(evicting)

    def _slice(self, evicting: _Evicting) -> None:
        ids: list[BlockId] = []
        for node, size in itertools.islice(evicting.candidates, EVICT_SLICE):
            evicting.gone.note(evicting.tier.name, size)
            if isinstance(node, PoolNode):
                self._stack.primary.forget(node, Departure.CLEARED)
            else:
                assert isinstance(evicting.tier, SecondaryTier), evicting
                self._stack.retire(evicting.tier, node, Departure.CLEARED)
                evicting.tier.unwant(node.block.id)
            ids.append(node.block.id)
        if isinstance(evicting.tier, SecondaryTier):
            self._stack.start_delete(evicting.tier, ids)
        if len(ids) < EVICT_SLICE:
            self._evicting.remove(evicting)
            self._answer(evicting)

    def _answer(self, evicting: _Evicting) -> None:
        left = 0
        if evicting.request.namespace is not None and not evicting.done and not evicting.request.dry_run:
            left = sum(1 for _ in self._inside(evicting))
        reply = Removed(
            id=evicting.request.id,
            blocks=dict(evicting.gone.blocks),
            bytes=dict(evicting.gone.bytes),
            namespaces=evicting.namespaces or (),
            left=left,
        )
        self._stack.answer(evicting.session, reply)

    def _candidates(self, evicting: _Evicting) -> Iterator[tuple[AnyNode, int]]:
        """Yield one block after the other that may go; each has to be taken out before the next."""
        if evicting.namespaces is None:
            yield from self._victims(evicting)
            return
        for node, size in self._ordered(evicting):
            if evicting.done:
                return
            if node.state is State.RESIDENT and ResidentSet.evictable(node):
                yield node, size

    def _victims(self, evicting: _Evicting) -> Iterator[tuple[AnyNode, int]]:
        """Yield what the tier's policy lets go first; of the pool's layouts the fullest one first."""
        while not evicting.done:
            if isinstance(evicting.tier, SecondaryTier):
                victim = evicting.tier.blocks.victim()
                if victim is None:
                    return
                yield victim, victim.size
                continue
            spaces = sorted(evicting.tier.spaces.values(), key=lambda space: -len(space.blocks))
            found = next(filter(None, map(_victim_of, spaces)), None)
            if found is None:
                return
            yield found

    def _ordered(self, evicting: _Evicting) -> list[tuple[AnyNode, int]]:
        sizes = dict(self._inside(evicting))
        return [(node, sizes[node]) for node in leaf_first(sizes)]

    def _inside(self, evicting: _Evicting) -> Iterator[tuple[AnyNode, int]]:
        for name, blocks, slot_bytes in self._sets():
            for node in blocks if name == evicting.tier.name else ():
                if evicting.namespaces is None or node.block.namespace in evicting.namespaces:
                    yield node, size_of(node, slot_bytes)


def _victim_of(space: PoolSpace) -> tuple[AnyNode, int] | None:
    victim = space.blocks.victim()
    return None if victim is None else (victim, space.geometry.slot_bytes)


def _choose(request: OperatorReset, known: dict[str, Layout | None]) -> tuple[list[str], list[str]]:
    """Return the namespaces that fit, and those of which it cannot be said."""
    chosen, unknown = [], []
    by_layout = request.model is not None or request.tenant is not None
    for namespace, layout in known.items():
        if request.namespaces is not None and not namespace.startswith(request.namespaces):
            continue
        if by_layout and layout is None:
            unknown.append(namespace)
        elif layout is None or (
            request.model in (None, layout.model) and request.tenant in (None, layout.tenant)
        ):
            chosen.append(namespace)
    return chosen, unknown


def _in_full(namespaces: tuple[str, ...] | None) -> frozenset[str]:
    return frozenset(name for name in namespaces or () if len(name) == FULL_NAMESPACE)


def _refuse_unknown(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a namespace that nobody has, unless it is written in full: it may be gone by now."""
    missing = [name for name in wanted if len(name) != FULL_NAMESPACE]
    if missing:
        names = ", ".join(sorted(known)) or "none"
        raise Refusal(
            ErrorCode.BAD_REQUEST, f"no namespace begins with {missing[0]!r}; there are: {names[:1000]}"
        )

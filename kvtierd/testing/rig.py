"""A ladder on a bench: verbs as functions, secondaries as dictionaries, every effect in plain sight.

For tests of the core without an event loop. Work effects are carried out at once, or kept in ``held`` while
``hold`` is set and run by :meth:`LadderRig.run_held`, so a test decides what overtakes what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvtierd.core import effects, stimuli
from kvtierd.core.geometry import UNIT
from kvtierd.core.invariants import validate
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import (
    Block,
    BlockId,
    BlockKey,
    BlockMeta,
    EventKind,
    Group,
    Layout,
    Locality,
    Medium,
    TierEvent,
    block_key,
    event_hash,
)
from kvtierd.core.presence import Presence
from kvtierd.core.stimuli import Finished, FoundBlock, Outcome, Probed, Status
from kvtierd.core.tier import TierSpec

ReplyT = TypeVar("ReplyT", bound=effects.Reply)
Residency = tuple[str, BlockKey]

LAYOUT = Layout(
    model="rig",
    dtype="float32",
    layout="rig",
    groups=(Group(tokens_per_block=4, block_bytes=UNIT),),
)


def key(number: int, group: int = 0) -> BlockKey:
    """Return a 32-byte key whose event hash is above 2^63."""
    return block_key(b"\0" * 24 + ((1 << 63) + number).to_bytes(8, "big"), group)


def meta(number: int, parent: int | None = None, group: int = 0) -> BlockMeta:
    """Return the metadata of block ``number``, a child of block ``parent``."""
    return BlockMeta(
        hashes=((1 << 63) + number,),
        parent=None if parent is None else (1 << 63) + parent,
        token_ids=(number,) * 4,
        block_size=4,
    )


class LadderRig:
    """One ladder, one scheduler session attached by default, and dictionaries as secondaries."""

    def __init__(
        self,
        slots: int = 8,
        secondaries: Sequence[TierSpec] = (),
        *,
        layout: Layout = LAYOUT,
        attach: bool = True,
        scanned: bool = True,
        primary: TierSpec | None = None,
        **options: Any,
    ) -> None:
        self.ladder = Ladder(
            pool_id="0" * 32,
            pool_bytes=slots * UNIT,
            primary=primary or TierSpec(name="cpu", medium=Medium.CPU),
            secondaries=secondaries,
            presence=Presence(bytearray(1 << 10)),
            **options,
        )
        self.layout = layout
        self.now = 0.0
        self.hold = False
        self.held: list[effects.Effect] = []
        self.effects: list[effects.Effect] = []
        self.notices: list[tuple[int, effects.Revoked]] = []
        self.answers: dict[int, effects.Reply] = {}
        self.events: list[TierEvent] = []
        self.storage: dict[str, dict[BlockId, Block]] = {spec.name: {} for spec in secondaries}
        self.memory: dict[int, object] = {}
        """What lies in each slot: the id of the block whose bytes were copied there last."""
        self.judge: Callable[[str, str, BlockId], Status] = lambda op, tier, block_id: Status.OK
        self.op_seconds = 0.0
        self._request = 0
        self._session = 0
        if scanned:
            for spec in secondaries:
                self.feed(stimuli.Found(spec.name, (), last=True))
        self.session = self.attach() if attach else 0

    # -- turns --------------------------------------------------------------------------------------

    def feed(self, stimulus: stimuli.Stimulus) -> None:
        """Run one turn and carry its effects out (or hold them)."""
        todo = self.ladder.handle(stimulus, self.now)
        self.effects += todo
        self.events += self.ladder.take_events()
        for effect in todo:
            if isinstance(effect, effects.Answer):
                self._take(effect)
            elif self.hold:
                self.held.append(effect)
            else:
                self.run(effect)

    def _take(self, answer: effects.Answer) -> None:
        if isinstance(answer.reply, effects.Revoked):
            self.notices.append((answer.session, answer.reply))
        else:
            assert answer.reply.id not in self.answers, "a request was answered twice"
            self.answers[answer.reply.id] = answer.reply

    def run(self, effect: effects.Effect) -> None:
        """Carry one work effect out against the dictionaries; ``judge`` decides each block's status."""
        if isinstance(effect, effects.Probe):
            self._probe(effect)
            return
        assert isinstance(effect, effects.Write | effects.Read | effects.Delete)
        name = type(effect).__name__.lower()
        store = self.storage[effect.tier]
        outcomes = []
        if isinstance(effect, effects.Delete):
            for block_id in effect.ids:
                status = self.judge(name, effect.tier, block_id)
                if status is Status.OK:
                    store.pop(block_id, None)
                outcomes.append(Outcome(block_id, status))
        else:
            outcomes = [self._move(name, effect.tier, store, at) for at in effect.blocks]
        self.feed(Finished(effect.op, outcomes, self.op_seconds))

    def _probe(self, effect: effects.Probe) -> None:
        store = self.storage[effect.tier]
        statuses = {self.judge("probe", effect.tier, block_id) for block_id in effect.ids}
        found = [FoundBlock(store[block_id], UNIT) for block_id in effect.ids if block_id in store]
        failed = statuses != {Status.OK}
        self.feed(Probed(effect.op, () if failed else found, failed=failed))

    def _move(self, name: str, tier: str, store: dict[BlockId, Block], at: effects.BlockAt) -> Outcome:
        block = at.block
        status = self.judge(name, tier, block.id)
        if status is Status.OK and name == "write":
            assert self.memory[at.slot] == block.id, "other bytes were written under this block's name"
            store[block.id] = block
        if status is Status.OK and name == "read" and block.id not in store:
            status = Status.GONE
        if status is Status.GONE:
            store.pop(block.id, None)
        if name == "read":
            self.memory[at.slot] = block.id if status is Status.OK else "torn"
        return Outcome(
            block.id,
            status,
            block.payload_bytes if name == "write" else 0,
            "" if status is Status.OK else "judged",
        )

    def run_held(self, *, reverse: bool = False) -> None:
        """Carry out what was held until now, in order or backwards."""
        held, self.held = self.held, []
        for effect in reversed(held) if reverse else held:
            self.run(effect)

    def advance(self, seconds: float) -> None:
        """Let time pass and tick."""
        self.now += seconds
        self.feed(stimuli.Tick())

    # -- verbs --------------------------------------------------------------------------------------

    def ask(self, request: type[stimuli.Request], *, session: int | None = None, **fields: Any) -> int:
        """Send a request; return its number."""
        self._request += 1
        message: Any = request(id=self._request, **fields)
        self.feed(stimuli.Asked(self.session if session is None else session, message))
        return self._request

    def answer(self, number: int, kind: type[ReplyT]) -> ReplyT:
        """Return the answer to a request, which must be there and of this kind."""
        reply = self.answers[number]
        assert isinstance(reply, kind), reply
        return reply

    def attach(self, engine: str = "e0", process: bytes = b"p0", **fields: Any) -> int:
        """Attach one more session and return its number."""
        self._session += 1
        fields.setdefault("layout", self.layout)
        number = self.ask(stimuli.Attach, session=self._session, engine_id=engine, process=process, **fields)
        self.answer(number, effects.Attached)
        return self._session

    def prepare(
        self, keys: Iterable[BlockKey], metas: Iterable[BlockMeta | None] = (), **fields: Any
    ) -> effects.Prepared:
        """Reserve slots."""
        number = self.ask(stimuli.PrepareStore, keys=tuple(keys), meta=tuple(metas), **fields)
        return self.answer(number, effects.Prepared)

    def copy_in(self, job: effects.Prepared, session: int | None = None) -> None:
        """Do what an engine does between reservation and commit."""
        owner = self.ladder.sessions.open.get(self.session if session is None else session)
        namespace = self.layout.namespace() if owner is None else owner.namespace
        for name, slot in zip(job.keys, job.slots, strict=True):
            self.memory[slot] = BlockId(namespace, name)

    def commit(self, job: effects.Prepared, failed: Sequence[BlockKey] = (), **fields: Any) -> effects.Reply:
        """Copy the blocks into their slots, commit the job and return whatever the answer is."""
        self.copy_in(job, fields.get("session"))
        number = self.ask(
            stimuli.Commit,
            job=job.job,
            generation=job.generation,
            pool_id=job.pool_id,
            failed=tuple(failed),
            **fields,
        )
        return self.answers[number]

    def store(self, *numbers: int, chain: bool = True) -> tuple[BlockKey, ...]:
        """Store blocks (a chain: each the child of the one before it); return the keys that are visible."""
        metas = [meta(n, numbers[i - 1] if chain and i else None) for i, n in enumerate(numbers)]
        job = self.prepare([key(n) for n in numbers], metas)
        if not job.keys:
            return ()
        reply = self.commit(job)
        assert isinstance(reply, effects.Committed)
        return reply.stored

    def load(self, *numbers: int, deadline: float = 1.0, **fields: Any) -> effects.Loaded:
        """Load blocks; the answer must be there at once (nothing held)."""
        number = self.ask(stimuli.Load, keys=tuple(map(key, numbers)), deadline=deadline, **fields)
        return self.loaded(number)

    def loaded(self, number: int) -> effects.Loaded:
        """Return a load's answer after checking that its slots hold the right bytes."""
        got = self.answer(number, effects.Loaded)
        for name, slot in zip(got.keys, got.slots, strict=True):
            assert self.memory[slot] == BlockId(self.layout.namespace(), name), "wrong bytes served"
        return got

    def release(self, lease: int, **fields: Any) -> None:
        """End a lease."""
        self.ask(stimuli.Release, lease=lease, **fields)

    def lookup(self, *numbers: int, **fields: Any) -> effects.LookedUp:
        """Ask for states."""
        return self.answer(
            self.ask(stimuli.Lookup, keys=tuple(map(key, numbers)), **fields), effects.LookedUp
        )

    def evict(self, *numbers: int, tiers: tuple[str, ...] | None = None) -> int:
        """Evict blocks and return how many residencies ended."""
        number = self.ask(stimuli.Evict, keys=tuple(map(key, numbers)), tiers=tiers)
        return self.answer(number, effects.Done).count

    def reset(self, *tiers: str) -> int:
        """Reset tiers (none named: all); return the residencies ended, 0 while storage is not gone yet."""
        number = self.ask(stimuli.Reset, tiers=tiers or None)
        return self.answer(number, effects.Done).count if number in self.answers else 0

    # -- truth --------------------------------------------------------------------------------------

    def inventory(self, namespace: str | None = None) -> set[Residency]:
        """Return every residency of a namespace (default: the session's)."""
        entries = self.ladder.inventory.entries(namespace or self.layout.namespace())
        return {(entry.tier, entry.key) for entry in entries}

    def folded(self, namespace: str | None = None) -> set[Residency]:
        """Return what all events (of one namespace) so far add up to; each must be a real change."""
        state: set[Residency] = set()
        for event in self.events:
            if namespace not in (None, event.block.namespace):
                continue
            entry = (event.tier, event.block.key)
            assert (entry in state) is (event.kind is EventKind.REMOVED), f"no change: {event}"
            (state.add if event.kind is EventKind.STORED else state.remove)(entry)
        return state

    def story(self) -> list[tuple[str, str, int]]:
        """Return the events as (kind, tier, block number)."""
        return [
            (
                event.kind.value,
                event.tier,
                event_hash(event.block.key) - (1 << 63),
            )
            for event in self.events
        ]

    def check(self) -> None:
        """Validate all invariants and that the stream equals the inventory."""
        validate(self.ladder)
        for namespace in {self.layout.namespace(), *(event.block.namespace for event in self.events)}:
            assert self.folded(namespace) == self.inventory(namespace)


def fs_spec(
    name: str = "disk", blocks: int | None = None, locality: Locality | None = Locality.LOCAL, **fields: Any
) -> TierSpec:
    """Return the spec of a storage tier with room for so many blocks of one unit."""
    capacity = None if blocks is None else blocks * UNIT
    return TierSpec(name=name, medium=Medium.STORAGE, locality=locality, capacity=capacity, **fields)

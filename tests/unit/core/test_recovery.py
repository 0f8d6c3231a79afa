"""A ladder that goes on with what another one left: the same hits, no slot that may be under a copy."""

import random

import msgspec
import pytest

from kvtierd.core import handover, stimuli
from kvtierd.core.effects import Attached, ErrorCode, Refused
from kvtierd.core.invariants import validate
from kvtierd.core.ledger import Held, Placed, PoolState, Shaped
from kvtierd.core.model import Block, BlockId, EventKind
from kvtierd.core.recovery import AWAIT, Inconsistent, restore
from kvtierd.testing.rig import LAYOUT, LadderRig, key, meta

SPACE = LAYOUT.namespace()
OTHER = msgspec.structs.replace(LAYOUT, model="other")


class Life(LadderRig):
    """A rig whose changes are written down, turn by turn, as the slot table does."""

    def __init__(self, slots=8, state=None):
        super().__init__(slots, attach=False)
        restore(self.ladder, PoolState() if state is None else state, self.now)
        self.restored = self.ladder.take_events()
        self.table = PoolState()
        self.table.counters, changes = self.ladder.take_changes()
        primary, sessions = self.ladder.stack.primary, self.ladder.sessions
        self.table.apply(space.shape() for space in primary.spaces.values())
        self.table.apply([*sessions.mappings(), *sessions.holds(), *changes])
        self.table.apply(Placed(node.slot, node.generation, node.block) for node in primary.nodes())
        self.session = self.attach()

    def feed(self, stimulus):
        super().feed(stimulus)
        if hasattr(self, "table"):
            self.table.counters, changes = self.ladder.take_changes()
            self.table.apply(changes)

    def next(self):
        life = Life(self.ladder.stack.primary.extents.units, self.table)
        life.memory = self.memory
        return life

    def resident(self):
        return {node.block.key: node.slot for node in self.ladder.stack.primary.nodes()}


def test_blocks_keep_their_slots_and_are_told_of_as_stores():
    life = Life()
    life.store(1, 2, 3)
    life.evict(2)
    after = life.next()
    assert after.resident() == {key(1): life.resident()[key(1)], key(3): life.resident()[key(3)]}
    assert [(event.kind, event.block.key) for event in after.restored] == [
        (EventKind.STORED, key(1)),
        (EventKind.STORED, key(3)),
    ]
    validate(after.ladder)


def test_numbers_fences_and_generations_are_never_given_out_again():
    life = Life()
    job = life.prepare([key(1)], [meta(1)])
    life.commit(job)
    lease = life.load(1).lease
    after = life.next()
    assert after.prepare([key(2)], [meta(2)]).generation > job.generation
    assert after.load(1).lease > lease
    assert after.ladder.sessions.fence > life.ladder.sessions.fence


def test_leased_and_reserved_slots_stay_out_of_use_until_every_process_spoke():
    life = Life()
    life.store(1, 2)
    life.attach(process=b"worker", role="worker")
    life.load(1, 2)
    life.prepare([key(n) for n in (3, 4, 5)], [None] * 3)
    after = life.next().next()
    assert len(after.prepare([key(n) for n in range(10, 18)]).keys) == 3
    after.evict(1, 2)
    assert after.prepare([key(20)]).keys == ()
    fence = after.ladder.sessions.fence
    after.ask(stimuli.Acknowledge, fence=fence)
    assert after.prepare([key(20)]).keys == ()
    after.feed(stimuli.ProcessDied(b"worker"))
    assert len(after.prepare([key(n) for n in range(20, 28)]).keys) == 5
    validate(after.ladder)


def test_what_nobody_of_the_engine_can_touch_is_free_at_once():
    life = Life()
    life.prepare([key(n) for n in range(5)])
    life.feed(stimuli.ProcessDied(b"p0"))
    life.feed(stimuli.SessionClosed(life.session))
    after = life.next()
    assert len(after.prepare([key(n) for n in range(8)]).keys) == 8
    assert not after.table.held or after.table.held.keys() == {after.ladder.sessions.last_number}


def test_blocks_wait_for_their_engine_a_while_before_another_layout_gets_their_room():
    life = Life()
    life.store(*range(8))
    after = LadderRig(8, attach=False)
    restore(after.ladder, life.table, 0.0)
    other = {"layout": OTHER, "engine_id": "e1", "process": b"p1"}
    number = after.ask(stimuli.Attach, session=5, **other)
    assert after.answer(number, Refused).code is ErrorCode.POOL_EXHAUSTED
    after.advance(AWAIT)
    number = after.ask(stimuli.Attach, session=5, **other)
    after.answer(number, Attached)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: s.shapes.update({SPACE: Shaped(LAYOUT, ((0, 9),))}), "do not fit"),
        (lambda s: s.shapes.update({SPACE: Shaped(LAYOUT, ((0, 2),))}), "do not fit"),
        (lambda s: s.shapes.update({SPACE: Shaped(LAYOUT, ((0, 4), (2, 4)))}), "do not fit"),
        (lambda s: s.shapes.clear(), "has no room"),
        (lambda s: s.held.update({9: Held(9, "e0", "x" * 32, (1,))}), "has no room"),
        (lambda s: s.held.update({9: Held(9, "e0", SPACE, (99,))}), "do not fit"),
        (
            lambda s: s.apply([Placed(max(s.blocks), 1, Block.of(BlockId(SPACE, key(1)), 4096))]),
            "in two slots",
        ),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(change, complaint):
    life = Life()
    life.store(1, 2, 3)
    change(life.table)
    with pytest.raises(Inconsistent, match=complaint):
        restore(LadderRig(8, attach=False).ladder, life.table, 0.0)


class Engine:
    """One process that works, copies late, and lives through the daemon's ends."""

    def __init__(self, name):
        self.process = name.encode()
        self.name = name
        self.session = 0
        self.copies = []
        """(into, slot, key) under way: a write puts its key there at any time, a read expects it there."""

    def join(self, life):
        self.session = life.attach(self.name, self.process)

    def step(self, life, rng):
        numbers = rng.sample(range(40), 3)
        match rng.randrange(6):
            case 0 | 1:
                job = life.prepare(
                    [key(n) for n in numbers], [meta(n) for n in numbers], session=self.session
                )
                self.copies += [(True, slot, k) for slot, k in zip(job.slots, job.keys, strict=True)]
                if job.keys and rng.random() < 0.7:
                    self.finish(life, job.slots)
                    life.commit(job, session=self.session)
            case 2 | 3:
                got = life.load(*numbers, session=self.session)
                reads = [(False, slot, k) for slot, k in zip(got.slots, got.keys, strict=True)]
                if reads and rng.random() < 0.5:
                    self.copies += reads
                elif reads:
                    life.release(got.lease, session=self.session)
            case 4:
                self.finish(life, [slot for _, slot, _ in self.copies])
                life.ask(stimuli.Acknowledge, session=self.session, fence=life.ladder.sessions.fence)
            case 5:
                life.feed(stimuli.SessionClosed(self.session))
                self.join(life)

    def finish(self, life, slots):
        for into, slot, block in [copy for copy in self.copies if copy[1] in slots]:
            if into:
                life.memory[slot] = BlockId(SPACE, block)
            else:
                assert life.memory[slot] == BlockId(SPACE, block), "the slot was reused under a copy"
        self.copies = [copy for copy in self.copies if copy[1] not in slots]


@pytest.mark.parametrize("seed", range(30))
def test_no_life_of_engines_and_daemons_ends_in_a_wrong_byte(seed):
    """The daemon dies at random; engines die, or come back and copy on; every load finds its own bytes."""
    rng = random.Random(seed)
    life = Life(16)
    engines = [Engine(f"e{n}") for n in range(3)]
    for engine in engines:
        engine.join(life)
    for step in range(400):
        engine = rng.choice(engines)
        what = rng.random()
        if what < 0.03:
            life = life.next()
            for one in engines:
                one.session = 0
        elif what < 0.04:
            engines.remove(engine)
            life.feed(stimuli.ProcessDied(engine.process))
            if engine.session:
                life.feed(stimuli.SessionClosed(engine.session))
            engines.append(Engine(f"n{step}"))
        elif not engine.session:
            engine.join(life)
        else:
            engine.step(life, rng)
        if rng.random() < 0.1:
            for one in engines:  # a copy that nobody waits for any more goes on at its own pace
                one.finish(life, [slot for _, slot, _ in one.copies if rng.random() < 0.3])
        validate(life.ladder)


def take_over(life):
    """Return a rig whose ladder goes on with what another one was in the middle of."""
    heir = LadderRig(life.ladder.stack.primary.extents.units, attach=False)
    heir.now = life.now + 1000  # clocks of two processes need not agree
    heir.memory, heir.session = life.memory, life.session
    heir._session, heir._request = life._session, life._request
    live = handover.live(life.ladder, life.now)
    restore(heir.ladder, handover.pool_state(life.ladder), heir.now, live=live)
    heir.ladder.take_events()
    validate(heir.ladder)
    return heir


def test_a_takeover_goes_on_in_the_middle_of_stores_and_loads():
    life = LadderRig(8)
    life.store(1, 2)
    job = life.prepare([key(3), key(4)], [meta(3), meta(4)])
    lease = life.load(1, 2).lease
    heir = take_over(life)
    assert heir.commit(job).stored == (key(3), key(4))
    heir.release(heir.load(3, 4).lease)
    heir.evict(1, 2)
    assert len(heir.prepare([key(n) for n in range(20, 28)]).keys) == 6, "leased slots stay"
    heir.release(lease)
    assert len(heir.prepare([key(n) for n in range(30, 38)]).keys) == 2
    validate(heir.ladder)


def test_a_takeover_keeps_deadlines_failed_keys_and_blocks_that_vanished_in_mid_store():
    life = LadderRig(8, job_ttl=60.0)
    job = life.prepare([key(1), key(2), key(3)], [None] * 3)
    life.ask(stimuli.Fail, job=job.job, keys=(key(2),))
    life.advance(50)
    heir = take_over(life)
    heir.advance(5)
    assert heir.commit(job).stored == (key(1), key(3))
    life = LadderRig(8, job_ttl=60.0)
    job = life.prepare([key(1), key(2)], [None] * 2)
    life.reset()
    heir = take_over(life)
    assert heir.commit(job).stored == ()
    assert len(heir.prepare([key(n) for n in range(8)]).keys) == 8
    validate(heir.ladder)


def test_what_was_quarantined_stays_so_and_the_processes_are_asked_again():
    life = LadderRig(8)
    life.prepare([key(n) for n in range(5)])
    life.advance(100)
    heir = take_over(life)
    assert len(heir.prepare([key(n) for n in range(10, 18)]).keys) == 3
    assert [session for session, _ in heir.notices] == [heir.session]
    heir.ask(stimuli.Acknowledge, fence=heir.notices[-1][1].fence)
    assert len(heir.prepare([key(n) for n in range(20, 28)]).keys) == 5

"""Random lives of a ladder: at every quiet point fold(stream) == inventory == what storage really holds.

The model is the rig's memory and storage: which bytes lie where. A load that was answered must find its own
bytes in every slot, although engines die, copy late, time out and are reset, and tiers fail and restart.
"""

from collections import OrderedDict

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.core.effects import Loaded, Prepared
from kvtierd.core.geometry import UNIT
from kvtierd.core.invariants import validate
from kvtierd.core.model import Block, BlockId
from kvtierd.core.stimuli import (
    Abort,
    Acknowledge,
    Found,
    FoundBlock,
    Load,
    ProcessDied,
    Release,
    SessionClosed,
    Stalled,
    Status,
    Touch,
)
from kvtierd.testing.consumer import ReferenceConsumer, residencies
from kvtierd.testing.rig import LAYOUT, LadderRig, fs_spec, key, meta
from kvtierd.wire.kvevents import encode_batch
from kvtierd.wire.projection import Projection, runs_of
from kvtierd.wire.stream import Limits, StreamLog

CHAINS = [[base + depth for depth in range(5)] for base in (0, 10, 20, 30)]
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 5)
faults = st.sampled_from(
    [Status.OK, Status.OK, Status.OK, Status.FAILED, Status.CORRUPT, Status.GONE, Status.FULL]
)


class Wire:
    """The ladder's events on the wire: one reader that was there from the start, and ones that join late."""

    def __init__(self):
        self.projection = Projection()
        self.log = StreamLog(Limits(ring_batches=8, ring_bytes=1 << 20))
        self.live = ReferenceConsumer()
        self.number = 0

    def publish(self, events):
        for run in runs_of(self.projection.apply(events)):
            payload = self.log.append(self.number, 1.5, *run)
            assert self.live.feed(self.number, payload) is None, "a reader without a gap asks for nothing"
            self.number += 1

    def late_joiner(self):
        """Join on a heartbeat after everything and replay from 0, most of it older than the ring."""
        late = ReferenceConsumer()
        wanted = late.feed(self.number, self.log.append(self.number, 1.5, 0, ()))
        assert self.live.feed(self.number, encode_batch(1.5, (), 0)) is None
        self.number += 1
        if wanted is not None:
            for number, payload in self.log.since(wanted):
                late.replay(number, payload)
            assert late.replay_ended() is None
        return late


class LadderMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.jobs: list[Prepared] = []
        self.leases: list[int] = []
        self.loads: list[int] = []
        self.zombies: list[Prepared] = []
        """Jobs that were revoked while their process may still be copying."""

    @initialize(
        slots=st.integers(2, 12),
        disk=st.integers(1, 12),
        lake=st.none() | st.integers(3, 20),
        ttl=st.none() | st.just(50.0),
        on_evict=st.booleans(),
        shared=st.booleans(),
    )
    def start(self, slots, disk, lake, ttl, on_evict, shared):
        self.slots = slots
        self.specs = [
            fs_spec("disk", disk, budget=3 * UNIT, ttl=ttl, on_evict=on_evict),
            fs_spec("lake", lake, shared=shared),
        ]
        self.rig = LadderRig(slots, self.specs)
        self.wire = Wire()
        self.published = 0

    # -- the engine ---------------------------------------------------------------------------------

    @rule(chain=chains, length=lengths, rich=st.booleans())
    def prepare(self, chain, length, rich):
        numbers = chain[:length] + chain[:1]
        metas = (
            [meta(n, numbers[i - 1] if n > numbers[0] else None) for i, n in enumerate(numbers)]
            if rich
            else ()
        )
        job = self.rig.prepare([key(n) for n in numbers], metas)
        if job.keys:
            self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fail=st.booleans())
    def commit(self, data, fail):
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        self.rig.commit(job, failed=job.keys[:1] if fail else ())

    @precondition(lambda self: self.jobs)
    @rule()
    def abort(self):
        self.rig.ask(Abort, job=self.jobs.pop().job)

    @rule(
        chain=chains,
        length=lengths,
        again=chains | st.just([]),
        lease=st.sampled_from([None, 0.5, 30.0]),
        promote=st.booleans(),
    )
    def lookup(self, chain, length, again, lease, promote):
        answer = self.rig.lookup(*chain[:length], *again, lease=lease, promote=promote)
        if answer.lease is not None:
            self.leases.append(answer.lease)

    @rule(chain=chains, length=lengths, again=chains | st.just([]), deadline=st.sampled_from([0.0, 1.0]))
    def load(self, chain, length, again, deadline):
        keys = tuple(map(key, [*chain[:length], *again]))
        self.loads.append(self.rig.ask(Load, keys=keys, deadline=deadline))
        self.collect()

    def collect(self):
        for number in [number for number in self.loads if number in self.rig.answers]:
            self.loads.remove(number)
            answer = self.rig.answers[number]
            if isinstance(answer, Loaded):
                got = self.rig.loaded(number)
                if got.lease:
                    self.leases.append(got.lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.rig.ask(Release, lease=self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(chain=chains, length=lengths)
    def touch(self, chain, length):
        self.rig.ask(Touch, keys=tuple(map(key, chain[:length] * 2)))

    @rule(chain=chains, length=lengths, tiers=st.sampled_from([None, ("cpu",), ("disk",), ("lake",)]))
    def evict(self, chain, length, tiers):
        self.rig.evict(*chain[:length], *chain[:1], tiers=tiers)

    @rule(tiers=st.sampled_from([(), ("cpu",), ("disk",)]))
    def reset(self, tiers):
        self.rig.reset(*tiers)

    # -- trouble ------------------------------------------------------------------------------------

    @rule(status=faults)
    def fault(self, status):
        def judge(op, tier, block_id):
            if tier != "disk" or (op == "write") != (status is Status.FULL):
                return Status.OK
            return status if op != "delete" else Status.OK

        self.rig.judge = judge

    @rule()
    def hold(self):
        self.rig.hold = True

    @rule(seconds=st.sampled_from([0.0, 0.01, 5.0]))
    def pace(self, seconds):
        self.rig.op_seconds = seconds

    @precondition(lambda self: self.rig.held)
    @rule(data=st.data())
    def stall(self, data):
        self.rig.feed(Stalled(data.draw(st.sampled_from(self.rig.held)).op))

    @rule(chain=chains, length=lengths)
    def others_write(self, chain, length):
        """Another daemon stores blocks in the shared tier, and this one is asked for them."""
        if not self.specs[1].shared or self.rig.hold:
            return
        for depth, number in enumerate(chain[:length]):
            block_id = BlockId(LAYOUT.namespace(), key(number))
            block = Block(block_id, UNIT, meta(number, chain[depth - 1] if depth else None))
            self.rig.storage["lake"].setdefault(block_id, block)
        self.rig.lookup(*chain[:length], promote=True)

    @rule(reverse=st.booleans())
    def let_go(self, reverse):
        self.rig.hold = False
        self.rig.run_held(reverse=reverse)

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def advance(self, seconds):
        before = dict(self.rig.ladder.sessions.jobs)
        self.rig.advance(seconds)
        self.bury([number for number in before if number not in self.rig.ladder.sessions.jobs])

    @rule(died=st.booleans())
    def lose_the_session(self, died):
        """The connection breaks; the process dies with it, or lives on and copies late."""
        numbers = [job.job for job in self.jobs]
        self.rig.feed(SessionClosed(self.rig.session))
        self.leases.clear()
        self.loads.clear()
        self.bury(numbers)
        if died:
            self.rig.feed(ProcessDied(b"p0"))
            self.zombies.clear()
        self.rig.session = self.rig.attach()

    def bury(self, numbers):
        self.zombies += [job for job in self.jobs if job.job in numbers]
        self.jobs = [job for job in self.jobs if job.job not in numbers]

    @precondition(lambda self: self.zombies)
    @rule()
    def late_copy(self):
        """A revoked job's process writes into its slots; nobody else may be hurt."""
        for slot in self.zombies[-1].slots:
            self.rig.memory[slot] = "written by a zombie"

    @rule()
    def acknowledge(self):
        self.zombies.clear()
        self.rig.ask(Acknowledge, fence=self.rig.ladder.sessions.fence)

    @rule()
    def restart(self):
        """A new daemon on the old storage: the pool is empty, the tiers are found again."""
        self.let_go(reverse=False)
        old = self.rig
        self.rig = LadderRig(self.slots, self.specs, scanned=False)
        self.wire = Wire()
        self.published = 0
        self.rig.storage = old.storage
        for spec in self.specs:
            blocks = [FoundBlock(block, UNIT) for block in old.storage[spec.name].values()]
            half = len(blocks) // 2
            self.rig.feed(Found(spec.name, blocks[half:]))
            self.rig.feed(Found(spec.name, blocks[:half], last=True))
        for leftovers in (self.jobs, self.leases, self.loads, self.zombies):
            leftovers.clear()

    # -- what must hold -----------------------------------------------------------------------------

    @invariant()
    def sound(self):
        if not hasattr(self, "rig"):
            return
        self.collect()
        validate(self.rig.ladder)
        assert self.rig.folded() == self.rig.inventory()
        self.wire.publish(self.rig.events[self.published :])
        self.published = len(self.rig.events)
        assert self.wire.live.resident == self.truth()
        if not self.rig.held:
            self.quiet()

    def truth(self):
        return residencies(self.rig.ladder.inventory.entries(self.rig.layout.namespace()))

    @rule()
    def join_late(self):
        self.sound()
        assert self.wire.late_joiner().resident == self.truth()

    def quiet(self):
        rig = self.rig
        inventory = rig.inventory()
        for spec in self.specs:
            stored = {block_id.key for block_id in rig.storage[spec.name]}
            listed = {entry for tier, entry in inventory if tier == spec.name}
            assert listed <= stored, "announced but not there"
        for node in rig.ladder.stack.primary.nodes():
            if node.state.value == "resident":
                assert rig.memory[node.slot] == node.block.id, "a visible block has other bytes"

    def teardown(self):
        if hasattr(self, "rig"):
            self.let_go(reverse=False)
            self.rig.check()


TestLadderMachine = LadderMachine.TestCase
TestLadderMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["store", "load"]), st.integers(0, 11)), max_size=120),
    st.integers(1, 6),
)
def test_without_chains_the_pool_is_plain_lru(operations, slots):
    """Compared with an OrderedDict, the simplest LRU there is."""
    rig = LadderRig(slots)
    model: OrderedDict[int, None] = OrderedDict()
    for verb, number in operations:
        if verb == "store":
            rig.store(number)
            model[number] = None
            model.move_to_end(number)
            if len(model) > slots:
                model.popitem(last=False)
        else:
            got = rig.load(number)
            assert bool(got.keys) == (number in model)
            if got.keys:
                model.move_to_end(number)
                rig.release(got.lease)
    rig.check()
    assert {entry for _, entry in rig.inventory()} == {key(number) for number in model}

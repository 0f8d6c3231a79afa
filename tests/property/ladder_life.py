"""What all lives of a ladder have in common: how they begin and end, and what must hold at every point."""

import itertools

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtierd.core.effects import Loaded, Prepared
from kvtierd.core.geometry import UNIT
from kvtierd.core.invariants import validate
from kvtierd.core.model import Group, Layout
from kvtierd.core.stimuli import (
    Found,
    FoundBlock,
    ProcessDied,
    SessionClosed,
    Status,
    Usable,
)
from kvtierd.testing.consumer import ReferenceConsumer, residencies
from kvtierd.testing.rig import LAYOUT, LadderRig, fs_spec
from kvtierd.wire.kvevents import encode_batch
from kvtierd.wire.projection import Projection, runs_of
from kvtierd.wire.stream import Limits, StreamLog

OTHER = Layout(
    model="other", dtype="x", layout="x", groups=(Group(tokens_per_block=4, block_bytes=2 * UNIT),)
)
"""Another tenant's layout, with slots of twice the size; its blocks have numbers from 100 on."""

OTHER_SESSION, WORKER_SESSION = 1000, 2000


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


class LadderLife(RuleBasedStateMachine):
    """A ladder with two tiers below the pool, its engine, and what is known of both."""

    def __init__(self):
        super().__init__()
        self.jobs: list[Prepared] = []
        self.leases: list[int] = []
        self.loads: list[int] = []
        self.zombies: list[tuple[Prepared, set[bytes]]] = []
        """Jobs that were revoked, and the processes that may still be copying for them."""
        self.worker: bytes | None = None
        """The process of the engine's worker session: its own, or the scheduler's."""
        self.other = 0
        """The other tenant's session; 0: not attached."""
        self.sessions = itertools.count(1)
        self.to_find: dict[str, list[list[FoundBlock]]] = {}
        """By tier: what a scan that is under way has not come across yet."""

    @initialize(
        slots=st.integers(2, 12),
        disk=st.integers(1, 12),
        lake=st.none() | st.integers(3, 20),
        ttl=st.none() | st.just(50.0),
        on_evict=st.booleans(),
        shared=st.booleans(),
        bound=st.none() | st.just(1.0),
    )
    def start(self, slots, disk, lake, ttl, on_evict, shared, bound):
        self.slots = slots
        self.specs = [
            fs_spec("disk", disk, budget=3 * UNIT, ttl=ttl, on_evict=on_evict),
            fs_spec("lake", lake, shared=shared, max_load_time=bound),
        ]
        self.rig = LadderRig(slots, self.specs)
        self.wire = Wire()
        self.published = 0
        self.counted = {}

    def collect(self):
        for number in [number for number in self.loads if number in self.rig.answers]:
            self.loads.remove(number)
            answer = self.rig.answers[number]
            if isinstance(answer, Loaded):
                got = self.rig.loaded(number)
                if got.lease:
                    self.leases.append(got.lease)

    def spoken(self, process):
        """A process says, or shows by its death, that it copies nothing that was revoked."""
        self.zombies = [(job, left) for job, who in self.zombies if (left := who - {process})]

    def bury(self, numbers):
        copying = {b"p0", self.worker or b"p0"}
        self.zombies += [(job, copying) for job in self.jobs if job.job in numbers]
        self.jobs = [job for job in self.jobs if job.job not in numbers]

    @rule(reverse=st.booleans())
    def let_go(self, reverse):
        self.rig.hold = False
        self.rig.run_held(reverse=reverse)

    def scan_all(self):
        for tier, parts in self.to_find.items():
            for part in parts:
                self.rig.feed(Found(tier, part))
            self.rig.feed(Found(tier, (), last=True))
        self.to_find.clear()

    @invariant()
    def sound(self):
        if not hasattr(self, "rig"):
            return
        self.collect()
        validate(self.rig.ladder)
        self.counters_never_fall()
        self.wire.publish(self.rig.events[self.published :])
        self.published = len(self.rig.events)
        if self.to_find:  # a scan's blocks are hits at once and told of, root first, at its end
            assert self.rig.folded() <= self.inventory()
            assert self.wire.live.resident <= self.truth()
        else:
            assert self.rig.folded() == self.inventory()
            assert self.wire.live.resident == self.truth()
        if not self.rig.held:
            self.quiet()

    def counters_never_fall(self):
        """L134: whatever tiers answer; a fall would be a reset to a scraper."""
        now = {
            (tier.name, name): value
            for tier in self.rig.ladder.stack.tiers
            for name, value in tier.counters.items()
        }
        assert all(now.get(name, 0) >= value for name, value in self.counted.items())
        self.counted = now

    def truth(self):
        return residencies(self.entries())

    def entries(self):
        pages = self.rig.ladder.inventory
        return [entry for layout in (LAYOUT, OTHER) for entry in pages.entries(layout.namespace())]

    def inventory(self):
        return {(entry.tier, entry.key) for entry in self.entries()}

    @rule()
    def join_late(self):
        self.sound()
        joined = self.wire.late_joiner().resident
        assert joined <= self.truth() if self.to_find else joined == self.truth()

    def quiet(self):
        rig = self.rig
        inventory = self.inventory()
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
            for spec in self.specs:
                self.rig.feed(Usable(spec.name))
            self.scan_all()
            self.sound()
            self.everybody_goes()

    def everybody_goes(self):
        """When all is well again and nobody is there, nothing is under way and nothing is held."""
        rig = self.rig
        for number in list(rig.ladder.sessions.open):
            rig.feed(SessionClosed(number))
        for process in (b"p0", b"w0", b"q"):
            rig.feed(ProcessDied(process))
        rig.judge = lambda op, tier, block_id: Status.OK
        for _ in range(8):
            rig.advance(100.0)
        validate(rig.ladder)
        sessions, stack, loads = rig.ladder.sessions, rig.ladder.stack, rig.ladder.loads
        left = [sessions.jobs, sessions.leases, sessions.quarantines, sessions.mapped]
        left += [stack.operations, loads.waiting, loads.promotion.grace, rig.ladder.stores._wishes]
        for tier in stack.secondaries:
            left += [tier.wanted, tier.leaving, tier.deletes, tier.doomed, tier.stuck, tier.asked]
        assert not any(left), left
        assert not any(node.pins for tier in stack.tiers for node in nodes_of(tier))
        for space in stack.primary.spaces.values():
            assert not space.leaving
            assert not space.promoting


def nodes_of(tier):
    return tier.blocks if hasattr(tier, "blocks") else tier.nodes()

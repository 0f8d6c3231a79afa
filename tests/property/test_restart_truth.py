"""Random lives across restarts: whatever ends the daemon or befalls the wire, readers end with its inventory.

Three kinds of readers: one asks for what it missed, one starts over from a snapshot after every gap, one
never asks for anything and hears every message. Messages get lost (not for the last kind) and come twice,
readers join late.

The real pieces but sockets: a ladder, the set of what was told, its journal in a folder, a projection, a
numbered log, reference consumers. Batches leave a process some time after they were sent; a kill loses those
that did not, and may come at any point of a turn. While the daemon is down, files appear, vanish and change,
and so does the tier file.
"""

import contextlib
import os
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId, Locality, Medium
from kvtierd.core.stimuli import Found, FoundBlock, Stop
from kvtierd.edges.journal import TAIL, Journal
from kvtierd.testing.consumer import ReferenceConsumer, residencies
from kvtierd.testing.rig import LAYOUT, LadderRig, fs_spec, key, meta
from kvtierd.wire.announced import Announced, TierLabel
from kvtierd.wire.projection import Projection, runs_of
from kvtierd.wire.stream import Limits, StreamLog, split

CPU = TierLabel("cpu", Medium.CPU, None)
CHAINS = [[base + depth for depth in range(4)] for base in (0, 10, 20)]
BATCH = 3
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 4)
tiers = st.sampled_from(["disk", "lake"])
labels = st.sampled_from([Locality.LOCAL, Locality.REMOTE, None, "absent"])
REPLAY, SNAPSHOT, BARE = "replay", "snapshot", "bare"
kinds = st.sampled_from([REPLAY, SNAPSHOT, BARE])
points = st.sampled_from(
    ["before the record", "within the record", "before the send", "within the send", "after"]
)


class Killed(Exception):
    """The process is gone."""


class Stream:
    """Numbers, log and readers. ``readers``: (consumer, kind)."""

    def __init__(self):
        self.number = 0
        self.now = 100.0
        self.readers = []
        self.begin()

    def begin(self, seeds=()):
        """A new process: only the numbers and the readers are left."""
        self.projection = Projection()
        self.log = StreamLog(Limits(ring_batches=6, ring_bytes=1 << 20))
        self.log.begin(self.number)
        self.log.seed(self.projection.apply(seeds))
        self.leaving = deque()

    def assume(self, seeds):
        self.projection.apply(seeds)

    def batches(self, events):
        for run in runs_of(self.projection.apply(events)):
            for part in split(run.changes, max_events=BATCH):
                yield run.rank, part

    def send(self, rank, changes):
        payload = self.log.append(self.number, 1.5, rank, changes)
        self.leaving.append((self.number, payload))
        self.number += 1

    def deliver(self, count=None, *, lost=(), times=1):
        """Let messages arrive, ``times`` times; ``lost``: kinds of readers that do not get them."""
        for _ in range(len(self.leaving) if count is None else min(count, len(self.leaving))):
            number, payload = self.leaving.popleft()
            for reader, kind in self.readers:
                for _ in range(0 if kind in lost and kind != BARE else times):
                    self.repair(reader, kind, reader.feed(number, payload))

    def repair(self, reader, kind, wanted):
        """What :class:`ReferenceConsumer` does over its sockets; for a snapshot, it forgets all first."""
        if kind == SNAPSHOT and wanted:
            reader._forget()
            wanted = 0
        while wanted is not None:
            if kind != BARE:
                again = None
                for number, payload in self.log.since(wanted):
                    again = reader.replay(number, payload)
                    if again is not None:
                        break
                wanted = again if again is not None else reader.replay_ended()
            else:
                reader.expected = reader._waiting[0][0]
                wanted = reader.replay_ended()

    def join(self, kind):
        """A late reader takes a snapshot on the next batch, whatever it does later."""
        self.deliver()
        reader = ReferenceConsumer()
        self.send(0, ())
        number, payload = self.leaving[-1]
        self.repair(reader, REPLAY, reader.feed(number, payload))
        self.deliver()
        self.readers.append((reader, kind))


class RestartMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(2, 10), disk=st.integers(2, 12))
    def first_start(self, slots, disk):
        self.folder = tempfile.TemporaryDirectory(prefix="kvt")
        self.boot = "b0"
        self.slots, self.disk = slots, disk
        self.lake = None
        self.journal = None
        self.stream = Stream()
        self.storage = {"disk": {}, "lake": {}}
        self.start()
        for kind in (REPLAY, SNAPSHOT, BARE):
            self.stream.readers.append((ReferenceConsumer(), kind))
        self.stream.join(BARE)

    # -- one process --------------------------------------------------------------------------------

    def start(self):
        self.bury()
        specs = [fs_spec("disk", self.disk)]
        if self.lake != "absent":
            specs.append(fs_spec("lake", None, self.lake))
        self.journal = Journal(Path(self.folder.name), clock=lambda: self.stream.now, boot=self.boot, slack=6)
        self.announced = Announced(
            [CPU, *(TierLabel(spec.name, spec.medium, spec.locality) for spec in specs)], self.journal.load()
        )
        self.journal.follow(self.announced)
        told = self.announced.begin()
        self.stream.begin(told.seeds)
        self.rig = LadderRig(self.slots, specs, scanned=False)
        self.rig.storage = {**self.storage, **{s.name: self.storage[s.name] for s in specs}}
        self.taken = 0
        self.doom = None
        self.scans = {}
        for spec in specs:
            found = [FoundBlock(block, UNIT) for block in self.storage[spec.name].values()]
            self.scans[spec.name] = deque([found[::2], found[1::2]])
        self.tell(told.events)

    def bury(self):
        """Close the descriptors of a process that is gone."""
        if self.journal is not None:
            for file in (self.journal._current, *self.journal._old):
                if file is not None:
                    file.close()

    def tell(self, events):
        """The daemon's order: record, then send. A kill may come anywhere."""
        path = self.journal._current.path
        size = path.stat().st_size
        if self.doom == "before the record" and events:
            raise Killed
        before = set(path.parent.iterdir())
        self.journal.append(events)
        if self.doom == "within the record" and events and path.exists():
            for later in set(path.parent.iterdir()) - before:
                later.unlink()  # begun after the record was whole, which it never was
            grown = path.stat().st_size
            os.truncate(path, size + (grown - size) // 2)
            raise Killed
        if self.doom == "before the send" and events:
            raise Killed
        for rank, changes in self.stream.batches(events):
            self.stream.send(rank, changes)
            if self.doom == "within the send":
                raise Killed

    def turn(self, scanned=()):
        events = self.rig.events[self.taken :]
        self.taken = len(self.rig.events)
        told = self.announced.advance(events, scanned=scanned)
        self.stream.assume(told.seeds)
        self.tell(told.events)

    def scan(self, name):
        parts = self.scans[name]
        if parts:
            found = [
                replace(item, block=self.announced.known(name, item.block))
                for item in parts.popleft()
                if item.block.id in self.storage[name]
            ]
            self.rig.feed(Found(name, found))
            self.turn()
        else:
            del self.scans[name]
            self.rig.feed(Found(name, (), last=True))
            self.turn([name])

    # -- what happens while it runs -----------------------------------------------------------------

    @rule(chain=chains, length=lengths)
    def store(self, chain, length):
        self.rig.store(*chain[:length])
        self.turn()

    @rule(chain=chains, length=lengths)
    def load(self, chain, length):
        got = self.rig.load(*chain[:length])
        if got.lease:
            self.rig.release(got.lease)
        self.turn()

    @rule(chain=chains, length=lengths, tier=st.sampled_from([None, ("cpu",), ("disk",)]))
    def evict(self, chain, length, tier):
        self.rig.evict(*chain[:length], tiers=tier)
        self.turn()

    @rule(data=st.data())
    def scan_on(self, data):
        if self.scans:
            self.scan(data.draw(st.sampled_from(sorted(self.scans))))

    @rule(count=st.integers(1, 4))
    def some_leave(self, count):
        self.stream.deliver(count)

    @rule(count=st.integers(1, 3), lost=st.sets(kinds, min_size=1))
    def the_wire_loses_some(self, count, lost):
        """For readers that can ask for them or start over."""
        self.stream.deliver(count, lost=lost)

    @rule(count=st.integers(1, 3), times=st.integers(2, 3))
    def the_wire_repeats_some(self, count, times):
        self.stream.deliver(count, times=times)

    @rule()
    def time_passes(self):
        """What was sent has left by then; that is what TAIL says."""
        self.stream.deliver()
        self.stream.now += 2 * TAIL
        self.journal.tick()

    @rule()
    def tick(self):
        self.stream.now += 0.1
        self.journal.tick()

    @precondition(lambda self: len(self.stream.readers) < 7)
    @rule(kind=kinds)
    def join_late(self, kind):
        self.stream.join(kind)

    # -- how it ends, and what happens meanwhile ----------------------------------------------------

    @rule()
    def stop_and_start(self):
        self.rig.feed(Stop())
        self.turn()
        self.stream.deliver()
        self.journal.close(flushed=True)
        self.start()

    @rule(chain=chains, length=lengths, point=points, skip=st.sampled_from([0, 1, 7]), reboot=st.booleans())
    def kill_and_start(self, chain, length, point, skip, reboot):
        self.doom = point
        with contextlib.suppress(Killed):
            self.rig.store(*chain[:length])
            self.turn()
        if point == "after":
            self.stream.deliver(1)
        self.stream.number += skip
        if reboot:
            self.boot += "x"
        self.start()

    @rule(point=points)
    def kill_while_scanning(self, point):
        if not self.scans:
            return
        self.doom = point
        with contextlib.suppress(Killed):
            for name in list(self.scans):
                while name in self.scans:
                    self.scan(name)
        self.start()

    @rule(point=points)
    def kill_at_the_start(self, point):
        """Twice in a row: the second time with the first one's removals on their way."""
        begin = RestartMachine.tell

        def doomed(events):
            self.doom = point
            begin(self, events)

        self.tell = doomed
        with contextlib.suppress(Killed):
            self.start()
        del self.tell
        self.start()

    @rule(chain=chains, lengths=st.tuples(lengths, lengths), tier=tiers, rank=st.integers(0, 1), label=labels)
    def others_meddle_while_it_is_down(self, chain, lengths, tier, rank, label):
        store = self.storage[tier]
        for number in chain[-lengths[0] :]:
            store.pop(BlockId(LAYOUT.namespace(), key(number)), None)
        for depth, number in enumerate(chain[: lengths[1]]):
            block_id = BlockId(LAYOUT.namespace(), key(number))
            described = meta(number, chain[depth - 1] if depth else None)
            store[block_id] = Block.of(block_id, UNIT, described, rank)
        self.lake = label
        self.start()

    @rule(reboot=st.booleans())
    def the_record_is_lost(self, reboot):
        """Readers that cannot ask keep what the pool had; the others find out by the numbers."""
        for path in Path(self.folder.name).iterdir():
            path.write_bytes(b"garbage")
        self.stream.number += 1000
        self.stream.readers = [entry for entry in self.stream.readers if entry[1] != BARE]
        self.start()

    # -- what must hold -----------------------------------------------------------------------------

    @rule()
    def quiet(self):
        for name in list(self.scans):
            while name in self.scans:
                self.scan(name)
        self.stream.send(0, ())  # a heartbeat
        self.stream.deliver()
        truth = residencies(self.rig.ladder.inventory.entries(LAYOUT.namespace()))
        for reader, kind in self.stream.readers:
            assert reader.resident == truth, (kind, reader.resident ^ truth, reader.counts)
            assert reader.wanted is None
        assert self.stream.projection.unmatched == 0
        assert len(self.announced) == len(self.rig.inventory())

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        try:
            self.quiet()
            self.stop_and_start()
            self.quiet()
        finally:
            self.bury()
            self.folder.cleanup()


TestRestartTruth = RestartMachine.TestCase
TestRestartTruth.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

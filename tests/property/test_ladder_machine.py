"""Random lives of a ladder: at every quiet point fold(stream) == inventory == what storage really holds.

The model is the rig's memory and storage: which bytes lie where. A load that was answered must find its own
bytes in every slot, although engines die, copy late, time out and are reset, and tiers fail and restart.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from kvtierd.core.effects import Attached, Refused
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId
from kvtierd.core.stimuli import (
    Abort,
    Acknowledge,
    Attach,
    Commit,
    Fail,
    Found,
    FoundBlock,
    Goodbye,
    Load,
    OperatorEvict,
    OperatorReset,
    Ordered,
    PrepareStore,
    ProcessDied,
    Release,
    Retune,
    Role,
    SessionClosed,
    Stalled,
    Status,
    TierLimits,
    Touch,
    Usable,
)
from kvtierd.testing.rig import LAYOUT, LadderRig, key, meta

from .ladder_life import OTHER, OTHER_SESSION, WORKER_SESSION, LadderLife, Wire

CHAINS = [[base + depth for depth in range(5)] for base in (0, 10, 20, 30)]
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 5)
faults = st.sampled_from(
    [Status.OK, Status.OK, Status.OK, Status.FAILED, Status.CORRUPT, Status.GONE, Status.FULL]
)


class LadderMachine(LadderLife):
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

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.rig.ask(Release, lease=self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(chain=chains, length=lengths)
    def touch(self, chain, length):
        self.rig.ask(Touch, keys=tuple(map(key, chain[:length] * 2)))

    # -- the engine's worker ------------------------------------------------------------------------

    @precondition(lambda self: self.worker is None)
    @rule(process=st.sampled_from([b"p0", b"w0"]))
    def attach_worker(self, process):
        self.worker, self.worker_session = process, WORKER_SESSION + next(self.sessions)
        self.rig.ask(
            Attach,
            session=self.worker_session,
            layout=LAYOUT,
            engine_id="e0",
            process=process,
            role=Role.WORKER,
        )

    @precondition(lambda self: self.worker)
    @rule(how=st.sampled_from(["goodbye", "closed", "died"]))
    def lose_the_worker(self, how):
        alone = self.worker != b"p0"
        if how == "goodbye":
            self.rig.ask(Goodbye, session=self.worker_session)
        else:
            self.rig.feed(SessionClosed(self.worker_session))
        if how == "died" and alone:
            self.rig.feed(ProcessDied(self.worker))
        if how != "closed" and alone:
            self.spoken(self.worker)
        self.worker = None

    @precondition(lambda self: self.worker and self.jobs)
    @rule()
    def worker_fails(self):
        job = self.jobs[-1]
        self.rig.ask(Fail, session=self.worker_session, job=job.job, keys=job.keys[-1:])

    @precondition(lambda self: self.worker)
    @rule(number=st.integers(1, 20))
    def worker_releases_what_is_not_its_own(self, number):
        self.rig.ask(Release, session=self.worker_session, lease=number)

    @precondition(lambda self: self.worker)
    @rule()
    def worker_acknowledges(self):
        self.rig.ask(Acknowledge, session=self.worker_session, fence=self.rig.ladder.sessions.fence)
        self.spoken(self.worker)

    # -- another tenant -----------------------------------------------------------------------------

    @precondition(lambda self: not self.other)
    @rule()
    def other_attaches(self):
        session = OTHER_SESSION + next(self.sessions)
        number = self.rig.ask(Attach, session=session, layout=OTHER, engine_id="e1", process=b"q")
        answer = self.rig.answers[number]
        assert isinstance(answer, Attached | Refused)
        self.other = session if isinstance(answer, Attached) else 0

    @precondition(lambda self: self.other)
    @rule(first=st.integers(100, 110), length=st.integers(1, 4), commit=st.booleans())
    def other_stores(self, first, length, commit):
        keys = tuple(key(n) for n in range(first, first + length))
        job = self.rig.answers[self.rig.ask(PrepareStore, session=self.other, keys=keys)]
        for block_key, slot in zip(job.keys, job.slots, strict=True):
            self.rig.memory[slot] = BlockId(OTHER.namespace(), block_key)
            self.rig.memory[slot + 1] = "the other half"
        if commit:
            fields = {"job": job.job, "generation": job.generation, "pool_id": job.pool_id}
            self.rig.ask(Commit, session=self.other, **fields)

    @precondition(lambda self: self.other)
    @rule(first=st.integers(100, 110), length=st.integers(1, 4))
    def other_loads(self, first, length):
        keys = tuple(key(n) for n in range(first, first + length))
        number = self.rig.ask(Load, session=self.other, keys=keys)
        got = self.rig.answers[number]
        for block_key, slot in zip(got.keys, got.slots, strict=True):
            assert self.rig.memory[slot] == BlockId(OTHER.namespace(), block_key)

    @precondition(lambda self: self.other)
    @rule(how=st.sampled_from(["goodbye", "closed", "died"]))
    def other_leaves(self, how):
        """Its share of the pool can be taken by the first tenant from now on."""
        if how == "goodbye":
            self.rig.ask(Goodbye, session=self.other)
        else:
            self.rig.feed(SessionClosed(self.other))
        if how == "died":
            self.rig.feed(ProcessDied(b"q"))
        self.other = 0

    # -- removal ------------------------------------------------------------------------------------

    @rule(chain=chains, length=lengths, tiers=st.sampled_from([None, ("cpu",), ("disk",), ("lake",)]))
    def evict(self, chain, length, tiers):
        self.rig.evict(*chain[:length], *chain[:1], tiers=tiers)

    @rule(tiers=st.sampled_from([(), ("cpu",), ("disk",)]))
    def reset(self, tiers):
        self.rig.reset(*tiers)

    # -- an operator --------------------------------------------------------------------------------

    @rule(tiers=st.sampled_from([None, ("cpu",), ("lake",)]), model=st.sampled_from([None, "rig", "none"]))
    def order_reset(self, tiers, model):
        self._order(OperatorReset, tiers=tiers, model=model)

    @rule(
        tier=st.sampled_from(["cpu", "disk"]),
        blocks=st.sampled_from([None, 2]),
        namespace=st.sampled_from([LAYOUT.namespace()[:5], None]),
    )
    def order_evict(self, tier, blocks, namespace):
        self._order(OperatorEvict, tier=tier, blocks=blocks, namespace=namespace)

    def _order(self, request, **fields):
        self.rig._request += 1
        self.rig.feed(Ordered(-1, request(id=self.rig._request, **fields)))

    @rule(ttl=st.sampled_from([None, 0.5, 100.0]), leases=st.sampled_from([100, 16384]))
    def retune(self, ttl, leases):
        limits = {
            tier.name: TierLimits(tier.spec.capacity, tier.spec.budget, ttl, tier.spec.max_load_time)
            for tier in self.rig.ladder.stack.secondaries
        }
        self.rig.feed(Retune(limits, job_ttl=60.0, lease_ttl=60.0, max_leases=leases))

    # -- trouble ------------------------------------------------------------------------------------

    @rule(status=faults, sick=st.sampled_from(["disk", "lake"]), deletes=st.booleans())
    def fault(self, status, sick, deletes):
        def judge(op, tier, block_id):
            if tier != sick:
                return Status.OK
            if op == "delete":
                return Status.FAILED if deletes else Status.OK
            return status if (op == "write") == (status is Status.FULL) else Status.OK

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
            block = Block.of(block_id, UNIT, meta(number, chain[depth - 1] if depth else None))
            self.rig.storage["lake"].setdefault(block_id, block)
        self.rig.lookup(*chain[:length], promote=True)

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def advance(self, seconds):
        before = dict(self.rig.ladder.sessions.jobs)
        self.rig.advance(seconds)
        self.bury([number for number in before if number not in self.rig.ladder.sessions.jobs])

    @rule(how=st.sampled_from(["goodbye", "closed", "died"]))
    def lose_the_session(self, how):
        """The connection breaks; the process dies with it, lives on and copies late, or says goodbye."""
        numbers = [job.job for job in self.jobs]
        if how == "goodbye":
            self.rig.ask(Goodbye)
        else:
            self.rig.feed(SessionClosed(self.rig.session))
        self.leases.clear()
        self.loads.clear()
        self.bury(numbers)
        if how == "died":
            if self.worker == b"p0":
                self.rig.feed(SessionClosed(self.worker_session))
                self.worker = None
            self.rig.feed(ProcessDied(b"p0"))
        if how == "died" or (how == "goodbye" and self.worker != b"p0"):
            self.spoken(b"p0")
        self.rig.session = self.rig.attach()

    @precondition(lambda self: self.zombies)
    @rule()
    def late_copy(self):
        """A revoked job's process writes into its slots; nobody else may be hurt."""
        for slot in self.zombies[-1][0].slots:
            self.rig.memory[slot] = "written by a zombie"

    @rule()
    def acknowledge(self):
        self.spoken(b"p0")
        self.rig.ask(Acknowledge, fence=self.rig.ladder.sessions.fence)

    @rule()
    def restart(self):
        """A new daemon on the old storage: the pool is empty, the tiers are found again."""
        self.let_go(reverse=False)
        old = self.rig
        self.rig = LadderRig(self.slots, self.specs, scanned=False)
        self.wire = Wire()
        self.published = 0
        self.counted = {}
        self.rig.storage = old.storage
        for spec in self.specs:
            blocks = [FoundBlock(block, block.payload_bytes) for block in old.storage[spec.name].values()]
            self.to_find[spec.name] = [blocks[start : start + 3] for start in range(0, len(blocks), 3)]
        for leftovers in (self.jobs, self.leases, self.loads, self.zombies):
            leftovers.clear()
        self.worker, self.other = None, 0

    @precondition(lambda self: self.to_find)
    @rule(data=st.data(), parts=st.integers(1, 3))
    def scan_on(self, data, parts):
        """A tier's scan comes across the next blocks, or to its end."""
        tier = data.draw(st.sampled_from(sorted(self.to_find)))
        for _ in range(parts):
            if self.to_find[tier]:
                self.rig.feed(Found(tier, self.to_find[tier].pop(0)))
        if not self.to_find[tier]:
            del self.to_find[tier]
            self.rig.feed(Found(tier, (), last=True))

    @rule(tier=st.sampled_from(["disk", "lake"]), reason=st.sampled_from(["", "no permission"]))
    def outage(self, tier, reason):
        """A tier's storage cannot be used at all, or can again."""
        self.rig.feed(Usable(tier, reason, stalled=bool(reason)))


TestLadderMachine = LadderMachine.TestCase
TestLadderMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)

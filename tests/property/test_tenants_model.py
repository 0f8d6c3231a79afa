"""Random stores of tenants with shares, against a model that says in a few lines who loses what."""

import math

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from kvtierd.core import stimuli
from kvtierd.core.geometry import UNIT
from kvtierd.core.invariants import validate
from kvtierd.core.model import Medium
from kvtierd.core.tier import TierSpec
from kvtierd.testing.rig import LAYOUT, LadderRig, fs_spec, key, meta

TENANTS = ("a", "b", "other")
ROOM = 8
KEYS = 12
shares = st.tuples(*[st.integers(0, 4)] * 3).filter(lambda some: 0 < sum(some) <= ROOM)
steps = st.lists(
    st.tuples(st.sampled_from(["store", "store", "touch"]), st.integers(0, 2), st.integers(0, KEYS - 1)),
    max_size=80,
)


class Model:
    """Each tenant's blocks, least recently used first."""

    def __init__(self, wanted):
        self.shares = dict(zip(TENANTS, wanted, strict=True))
        self.blocks = {}

    def excess(self, tenant):
        return len(self.blocks[tenant]) - self.shares[tenant]

    def touch(self, tenant, number):
        mine = self.blocks.get(tenant, [])
        if number in mine:
            mine.remove(number)
            mine.append(number)


class Disk(Model):
    """Whoever is furthest over its share loses; one that is over takes from such tenants only."""

    def store(self, tenant, number):
        mine = self.blocks.setdefault(tenant, [])
        if number in mine:
            return
        mine.append(number)
        floor = 0 if self.excess(tenant) > 0 else -math.inf
        while sum(map(len, self.blocks.values())) > ROOM:
            losers = sorted(self.blocks, key=lambda name: (-self.excess(name), name))
            gone = [
                (name, block)
                for name in losers
                if self.excess(name) > floor
                for block in self.blocks[name][:1]
                if (name, block) != (tenant, number)
            ]
            if not gone:
                mine.remove(number)
                return
            self.blocks[gone[0][0]].remove(gone[0][1])


class Pool(Model):
    """A slot once taken stays with its tenant, and what others are sure of stays free for them."""

    def __init__(self, wanted):
        super().__init__(wanted)
        self.slots = {}

    def room(self, tenant):
        free = ROOM - sum(self.slots.values())
        kept = sum(
            max(0, share - self.slots.get(name, 0)) for name, share in self.shares.items() if name != tenant
        )
        return max(min(self.shares[tenant] - self.slots.get(tenant, 0), free), free - kept)

    def store(self, tenant, number):
        mine = self.blocks.setdefault(tenant, [])
        if number in mine:
            self.touch(tenant, number)
            return
        if self.room(tenant) > 0:
            self.slots[tenant] = self.slots.get(tenant, 0) + 1
        elif mine:
            del mine[0]
        else:
            return
        mine.append(number)


class Real:
    """The ladder, with one engine of each tenant that could get any room."""

    def __init__(self, rig):
        self.rig = rig
        self.layouts = {name: msgspec.structs.replace(LAYOUT, tenant=name) for name in TENANTS}
        self.sessions = {}

    def session(self, tenant):
        if tenant not in self.sessions:
            number = 1 + TENANTS.index(tenant)
            asked = stimuli.Attach(id=-number, layout=self.layouts[tenant], engine_id=tenant, process=b"p")
            self.rig.feed(stimuli.Asked(number, asked))
            if "message" in self.rig.answers[-number].__struct_fields__:
                del self.rig.answers[-number]
                return None
            self.sessions[tenant] = number
        return self.sessions[tenant]

    def store(self, tenant, number):
        session = self.session(tenant)
        if session is None:
            return
        job = self.rig.prepare([key(number)], [meta(number)], session=session)
        if job.job:
            self.rig.commit(job, session=session)

    def touch(self, tenant, number):
        if tenant in self.sessions:
            self.rig.ask(stimuli.Touch, keys=(key(number),), session=self.sessions[tenant])

    def holds(self, tier, tenant):
        entries = self.rig.ladder.inventory.entries(self.layouts[tenant].namespace(), tier)
        return {entry.key for entry in entries}


def compare(model, real, tier, todo):
    for verb, index, number in todo:
        for each in (model, real):
            getattr(each, verb)(TENANTS[index], number)
        for name in TENANTS:
            expected = {key(block) for block in model.blocks.get(name, ())}
            assert real.holds(tier, name) == expected, name
        validate(real.rig.ladder)


@settings(max_examples=200, deadline=None)
@given(wanted=shares, todo=steps)
def test_below_the_pool_the_tenant_furthest_over_its_share_loses_first(wanted, todo):
    spec = fs_spec(blocks=ROOM, shares=amounts(wanted))
    rig = LadderRig(64, [spec], attach=False, tenants=TENANTS)
    compare(Disk(wanted), Real(rig), "disk", todo)


@settings(max_examples=200, deadline=None)
@given(wanted=shares, todo=steps)
def test_in_the_pool_what_a_tenant_is_sure_of_stays_free_for_it(wanted, todo):
    spec = TierSpec("cpu", Medium.CPU, shares=amounts(wanted))
    rig = LadderRig(ROOM, attach=False, tenants=TENANTS, primary=spec)
    compare(Pool(wanted), Real(rig), "cpu", todo)


def amounts(wanted):
    return {name: share * UNIT for name, share in zip(TENANTS, wanted, strict=True)}

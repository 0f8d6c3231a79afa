"""Tenants: a bounded number of accounts, and who loses blocks when a tier is full."""

import msgspec
import pytest

from kvtierd.core import effects, stimuli
from kvtierd.core.geometry import UNIT
from kvtierd.core.invariants import validate
from kvtierd.core.model import Block, BlockId, EventKind, Medium, SkipReason
from kvtierd.core.stimuli import Found, FoundBlock
from kvtierd.core.tenants import NAMED, NAMESPACES, Tenants
from kvtierd.core.tier import TierSpec
from kvtierd.testing.rig import LAYOUT, LadderRig, fs_spec, key, meta


def layout_of(tenant):
    return msgspec.structs.replace(LAYOUT, tenant=tenant)


class House:
    """A ladder with an engine of each tenant. Blocks are numbers; ``story`` has who lost what."""

    def __init__(self, tenants, slots=64, secondaries=(), **options):
        self.rig = LadderRig(slots, secondaries, attach=False, tenants=tenants, **options)
        self.sessions = {}
        self.tenant_of = {}

    def attach(self, tenant):
        self.sessions[tenant] = self.rig.attach(f"engine-{tenant}", layout=layout_of(tenant))
        self.tenant_of[layout_of(tenant).namespace()] = tenant

    def store(self, tenant, *numbers, chain=False):
        """Store blocks, one job each unless chained; return the numbers that got no slot, with the reason."""
        if tenant not in self.sessions:
            self.attach(tenant)
        refused = {}
        for number in numbers:
            parent = number - 1 if chain and number != numbers[0] else None
            job = self.rig.prepare([key(number)], [meta(number, parent)], session=self.sessions[tenant])
            if job.skipped:
                refused[number] = job.skipped[0].reason
            if job.job:
                self.rig.commit(job, session=self.sessions[tenant])
        validate(self.rig.ladder)
        return refused

    def holds(self, tier, tenant):
        namespace = layout_of(tenant).namespace()
        return {entry.key for entry in self.rig.ladder.inventory.entries(namespace, tier)}

    def lost(self, tier):
        """Return how many blocks each tenant lost in a tier."""
        lost = {}
        for event in self.rig.events:
            if event.tier == tier and event.kind is EventKind.REMOVED:
                tenant = self.tenant_of[event.block.namespace]
                lost[tenant] = lost.get(tenant, 0) + 1
        return lost

    def row(self, tenant, tier):
        rows = {row["tenant"]: row["tiers"] for row in self.rig.ladder.statistics()["tenants"]}
        return rows[tenant][tier]


def disk(blocks, **shares):
    return fs_spec(blocks=blocks, shares={name: share * UNIT for name, share in shares.items()})


def pool_spec(**shares):
    return TierSpec("cpu", Medium.CPU, shares={name: share * UNIT for name, share in shares.items()})


def test_who_is_over_its_share_loses_first():
    house = House(["a", "b"], secondaries=[disk(10, a=4, b=6)])
    house.store("a", *range(10))  # nobody else is there: all of it may be used
    assert house.lost("disk") == {}
    house.store("b", *range(6))
    assert house.lost("disk") == {"a": 6}
    assert len(house.holds("disk", "a")) == 4
    assert len(house.holds("disk", "b")) == 6


def test_a_tenant_within_its_share_loses_nothing_to_one_that_is_over():
    house = House(["a", "b"], secondaries=[disk(10, a=4, b=6)])
    house.store("a", *range(4))
    house.store("b", *range(6))
    house.store("b", *range(100, 130))
    assert house.lost("disk") == {"b": 30}
    assert house.holds("disk", "a") == {key(number) for number in range(4)}


def test_without_a_share_a_tenant_has_what_is_free_and_loses_it_first():
    house = House(["a", "b"], secondaries=[disk(10, a=10)])
    house.store("b", *range(10))
    house.store("a", *range(10))
    assert house.lost("disk") == {"b": 10}
    house.store("b", 200)
    assert house.lost("disk") == {"b": 10}
    assert not house.holds("disk", "b")
    assert house.rig.ladder.stack.by_name["disk"].counters["cascade_dropped_no_room"] == 1


def test_all_that_are_not_named_are_one_tenant():
    house = House(["a", "other"], secondaries=[disk(10, a=5, other=5)])
    house.store("a", *range(5))
    house.store("x", *range(3))
    house.store("y", *range(3))
    house.store(None, *range(3))
    assert "a" not in house.lost("disk")
    assert house.row("other", "disk")["blocks"] == 5


def test_removals_are_leaf_first_within_the_tenant_that_loses():
    house = House(["a", "b"], secondaries=[disk(4, b=4)])
    house.store("a", 1, 2, 3, 4, chain=True)
    house.store("b", 11, 12)
    removed = [event for event in house.rig.events if event.kind is EventKind.REMOVED]
    assert [event.block.key for event in removed] == [key(4), key(3)]


def test_blocks_of_another_run_belong_to_whom_the_storage_says():
    rig = LadderRig(8, [disk(8, a=4)], attach=False, scanned=False, tenants=["a"])
    blocks = [
        FoundBlock(Block.of(BlockId(layout_of(tenant).namespace(), key(number)), UNIT, meta(number)), UNIT)
        for tenant, number in (("a", 1), ("b", 2), ("c", 3))
    ]
    namespaces = {layout_of("a").namespace(): "a", layout_of("b").namespace(): "b"}
    rig.feed(Found("disk", (), tenants=namespaces))
    rig.feed(Found("disk", blocks))
    rig.feed(Found("disk", (), last=True))
    rows = {row["tenant"]: row["tiers"]["disk"]["blocks"] for row in rig.ladder.statistics()["tenants"]}
    assert rows == {"a": 1, "other": 2}
    validate(rig.ladder)


def test_in_the_pool_an_unused_share_stays_free_for_its_tenant():
    house = House(["a", "b"], slots=64, primary=pool_spec(a=16, b=16))
    assert house.store("a", *range(100)) == {}
    assert house.lost("cpu") == {"a": 100 - 48}, "16 of the 64 slots are kept"
    assert house.store("b", *range(16)) == {}
    assert house.lost("cpu") == {"a": 100 - 48}
    house.store("b", *range(100, 110))
    assert house.lost("cpu") == {"a": 100 - 48, "b": 10}


def test_a_detached_tenant_within_its_share_keeps_its_blocks_in_the_pool():
    house = House(["a", "b"], slots=64, primary=pool_spec(a=16))
    house.store("a", *range(16))
    house.rig.feed(stimuli.SessionClosed(house.sessions["a"]))
    house.store("b", *range(200))
    assert "a" not in house.lost("cpu")
    over = House(["a", "b"], slots=64, primary=pool_spec(a=16))
    over.store("a", *range(64))
    over.rig.feed(stimuli.SessionClosed(over.sessions.pop("a")))
    over.store("b", *range(100))
    assert over.lost("cpu") == {"a": 48, "b": 52}, "what nobody uses gives way, down to its share"


def test_a_tenant_without_room_in_the_pool_is_told_why():
    rig = LadderRig(16, attach=False, tenants=["a"], primary=pool_spec(a=16))
    request = stimuli.Attach(id=1, layout=layout_of("b"), engine_id="e", process=b"p")
    rig.feed(stimuli.Asked(1, request))
    answer = rig.answers[1]
    assert isinstance(answer, effects.Refused)
    assert "kept for other tenants' shares" in answer.message
    assert "'cpu' under tenants" in answer.message


def test_one_that_can_only_lose_pinned_blocks_is_refused_and_takes_nothing():
    house = House(["a", "b"], slots=16, primary=pool_spec(a=8))
    house.store("a", *range(8))
    session = house.sessions
    house.attach("b")
    house.rig.prepare([key(number) for number in range(8)], session=session["b"])
    assert house.store("b", 50) == {50: SkipReason.NO_ROOM}
    assert house.lost("cpu") == {}


def test_engines_cannot_make_more_names_than_the_limit():
    tenants = Tenants()
    for number in range(10 * NAMED):
        tenants.learn(f"ns{number}", f"tenant-{number}")
    assert len(tenants.names) == NAMED + 1
    assert tenants.of("ns0") == "tenant-0"
    assert tenants.of(f"ns{NAMED}") == "other"
    for number in range(2 * NAMESPACES):
        tenants.learn(f"more{number}", "tenant-0")
    assert tenants.of("more0") == "tenant-0"
    assert tenants.of(f"more{2 * NAMESPACES - 1}") == "other"


@pytest.mark.parametrize(("tenant", "name"), [(None, "none"), ("", "none"), ("x" * 200, "x" * 64)])
def test_a_name_is_short_whatever_an_engine_says(tenant, name):
    tenants = Tenants()
    tenants.learn("ns", tenant)
    assert tenants.of("ns") == name


def test_without_shares_everything_is_as_with_one_tenant():
    house = House([], secondaries=[fs_spec(blocks=4)])
    house.store("a", 1, 2, 3)
    house.store("b", 1, 2, 3)
    assert house.lost("disk") == {"a": 2}, "the oldest go, whosever they are"
    assert house.row("a", "disk") == {"blocks": 1, "used_bytes": UNIT, "share_bytes": 0, "evicted": 2}
    assert house.row("b", "cpu")["blocks"] == 3

"""What clients, workers and time can do at the worst moment, and that the ladder's promises hold."""

import pytest

from kvtierd.core.effects import Delete, Read, Refused
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId, BlockMeta, Layout
from kvtierd.core.stimuli import (
    Finished,
    Found,
    FoundBlock,
    Goodbye,
    Load,
    Outcome,
    PrepareStore,
    Probed,
    Role,
    Status,
    Touch,
)
from kvtierd.core.upkeep import EXPIRY_BATCH, STUCK_RETRY
from kvtierd.testing.rig import LAYOUT, fs_spec, key, meta


def only_below(rig, *numbers):
    rig.store(*numbers)
    rig.evict(*numbers, tiers=("cpu",))


def effects_of(rig, kind):
    return [effect for effect in rig.effects if isinstance(effect, kind)]


@pytest.mark.parametrize("first", [Status.OK, Status.GONE, Status.CORRUPT, Status.FAILED])
@pytest.mark.parametrize("evicted", [True, False])
def test_a_block_that_is_read_twice_at_once_is_deleted_once_and_after_both(rigged, first, evicted):
    """A reset of the pool takes the first read's slot away, so that a second read of the block begins."""
    rig = rigged(4, [fs_spec()])
    only_below(rig, 1)
    rig.hold = True
    rig.ask(Load, keys=(key(1),), deadline=5.0)
    rig.reset("cpu")
    rig.ask(Load, keys=(key(1),), deadline=5.0)
    if evicted:
        rig.evict(1, tiers=("disk",))
    one, two = effects_of(rig, Read)
    rig.held.clear()
    block_id = one.blocks[0].block.id
    rig.feed(Finished(one.op, [Outcome(block_id, first)]))
    assert not effects_of(rig, Delete), "a read is still under way"
    rig.memory[two.blocks[0].slot] = block_id
    rig.feed(Finished(two.op, [Outcome(block_id, Status.OK)]))
    rig.hold = False
    rig.run_held()
    assert len(effects_of(rig, Delete)) <= 1
    rig.check()


def test_a_chain_longer_than_one_look_expires(rigged):
    rig = rigged(2 * EXPIRY_BATCH, [fs_spec(ttl=10.0)])
    only_below(rig, *range(EXPIRY_BATCH + 44))
    for _ in range(4):
        rig.advance(11.0)
    assert rig.inventory() == set()


def test_old_parents_of_young_blocks_do_not_keep_others_from_expiring(rigged):
    count = EXPIRY_BATCH + 10
    rig = rigged(4 * EXPIRY_BATCH, [fs_spec(ttl=10.0)])
    for number in range(count):
        rig.store(number)
    rig.store(5000)
    rig.advance(9.0)
    for number in range(count):
        job = rig.prepare([key(10_000 + number)], [meta(10_000 + number, number)])
        rig.commit(job)
    for _ in range(4):
        rig.advance(1.0)
    assert ("disk", key(5000)) not in rig.inventory()
    assert ("disk", key(0)) in rig.inventory()


def test_a_touch_renews(rigged):
    rig = rigged(8, [fs_spec(ttl=10.0)])
    rig.store(1)
    rig.advance(6.0)
    rig.ask(Touch, keys=(key(1),))
    rig.advance(6.0)
    assert ("disk", key(1)) in rig.inventory()


def test_every_tier_gets_its_undeletable_blocks_tried_again(rigged):
    rig = rigged(8, [fs_spec("disk"), fs_spec("lake")])
    rig.store(1)
    broken = {"disk", "lake"}
    rig.judge = lambda op, tier, block: Status.FAILED if op == "delete" and tier in broken else Status.OK
    rig.evict(1)
    broken.remove("lake")
    for _ in range(4):
        rig.advance(STUCK_RETRY)
    assert rig.storage["lake"] == {}
    rig.judge = lambda op, tier, block: Status.OK


def test_a_probe_does_not_bring_back_what_could_not_be_deleted(rigged):
    rig = rigged(8, [fs_spec(shared=True)])
    rig.store(1)
    rig.judge = lambda op, tier, block: Status.FAILED if op == "delete" else Status.OK
    rig.evict(1)
    rig.judge = lambda op, tier, block: Status.OK
    rig.lookup(1, promote=True)
    rig.check()
    rig.advance(2 * STUCK_RETRY)
    rig.check()
    stored = {block_id.key for block_id in rig.storage["disk"]}
    assert {entry for tier, entry in rig.inventory() if tier == "disk"} <= stored


def test_a_probe_that_was_overtaken_by_a_deletion_announces_nothing(rigged):
    rig = rigged(8, [fs_spec(shared=True)])
    rig.hold = True
    rig.lookup(1, promote=True)
    (probe,) = rig.held
    rig.held.clear()
    rig.hold = False
    rig.store(1)
    block = next(iter(rig.storage["disk"].values()))
    rig.evict(1)
    rig.feed(Probed(probe.op, [FoundBlock(block, UNIT)]))
    assert rig.inventory() == set()
    rig.check()


@pytest.mark.parametrize("how", ["evict", "reset", "no_room"])
def test_what_is_wanted_no_more_is_leaving_no_more(rigged, how):
    rig = rigged(4, [fs_spec(blocks=0 if how == "no_room" else None, on_evict=True)])
    rig.hold = how != "no_room"
    for number in range(8):
        rig.store(number)
    if how == "evict":
        rig.evict(*range(8))
    elif how == "reset":
        rig.reset()
    rig.hold = False
    rig.run_held()
    rig.advance(1.0)
    tier = rig.ladder.stack.secondaries[0]
    assert {i for ids in tier.leaving.values() for i in ids} <= set(tier.wanted)


def test_a_turn_looks_at_few_blocks_for_a_tier_that_is_written_on_eviction(rigged):
    rig = rigged(4096, [fs_spec(on_evict=True)])
    rig.hold = True
    for number in range(4096):
        rig.store(number)
    blocks = next(iter(rig.ladder.stack.primary.spaces.values())).blocks
    looks = 0
    victim = blocks.victim

    def counted():
        nonlocal looks
        looks += 1
        return victim()

    blocks.victim = counted
    rig.lookup(1)
    assert looks <= 1


def test_a_ring_through_blocks_of_one_hash_stays_evictable(rigged):
    rig = rigged(8)

    def block(number, mine, parent=None):
        m = BlockMeta(hashes=(mine,), parent=parent)
        rig.commit(rig.prepare([key(number)], [m]))

    block(1, 30, 20)  # C -> b
    block(2, 20)  # B1
    block(3, 20, 10)  # B2 -> a
    block(4, 10, 30)  # A -> c
    assert rig.reset() == 4
    assert rig.inventory() == set()


def test_a_word_of_a_worker_ends_no_quarantine_of_the_scheduler(rigged):
    rig = rigged(1)
    worker = rig.attach("e0", b"w0", role=Role.WORKER)
    rig.store(1)
    lease = rig.load(1).lease
    rig.advance(1000.0)
    rig.release(lease, session=worker)
    assert rig.store(2) == ()


def test_goodbye_of_one_session_is_no_word_for_another_of_its_process(rigged):
    rig = rigged(1)
    worker = rig.attach("e0", b"p0", role=Role.WORKER)
    rig.prepare([key(1)])
    rig.ask(Goodbye)
    rig.session = rig.attach("e1", b"p1")
    assert rig.prepare([key(2)]).keys == (), "the worker may be copying"
    rig.ask(Goodbye, session=worker)
    assert rig.prepare([key(2)]).keys == (key(2),)


def test_an_evicted_block_does_not_come_back_with_a_promotion_under_way(rigged):
    rig = rigged(4, [fs_spec()])
    only_below(rig, 1)
    rig.hold = True
    number = rig.ask(Load, keys=(key(1),), deadline=5.0)
    rig.evict(1)
    assert rig.loaded(number).keys == ()
    rig.hold = False
    rig.run_held()
    assert rig.inventory() == set()


def test_blocks_that_a_scan_found_beyond_the_capacity_leave_when_they_are_read(rigged):
    rig = rigged(8, [fs_spec(blocks=1)], scanned=False)
    blocks = [Block.of(BlockId(LAYOUT.namespace(), key(n)), UNIT, meta(n)) for n in (1, 2)]
    for block in blocks:
        rig.storage["disk"][block.id] = block
    rig.feed(Found("disk", [FoundBlock(block, UNIT) for block in blocks]))
    rig.hold = True
    number = rig.ask(Load, keys=(key(1), key(2)), deadline=5.0)
    rig.feed(Found("disk", (), last=True))
    rig.check()
    rig.hold = False
    rig.run_held()
    assert rig.loaded(number).keys == (key(1), key(2))
    assert rig.ladder.stack.secondaries[0].used <= UNIT


def test_metadata_that_is_nested_without_end_is_refused(rigged):
    rig = rigged(4)
    deep: tuple = ()
    for _ in range(100):
        deep = (deep,)
    m = BlockMeta(hashes=(1,), extra_keys=((deep,),))
    assert isinstance(rig.answers[rig.ask(PrepareStore, keys=(key(1),), meta=(m,))], Refused)
    m = BlockMeta(hashes=(1,), extra_keys=((("image", 3), "lora"), None))
    assert rig.prepare([key(1)], [m]).keys == (key(1),)


def test_lookups_of_a_layout_never_flush_its_share_of_the_pool(rigged):
    other = Layout(**{**{f: getattr(LAYOUT, f) for f in LAYOUT.__struct_fields__}, "tenant": "b"})
    rig = rigged(16, [fs_spec()])
    only_below(rig, *range(8))
    rig.store(100, 101, 102, 103, chain=False)
    second = rig.attach("e1", b"p1", layout=other)
    keys = tuple(key(n) for n in range(12))
    rig.ask(PrepareStore, session=second, keys=keys)
    rig.lookup(*range(8), promote=True)
    cpu = {entry for tier, entry in rig.inventory() if tier == "cpu"}
    assert {key(n) for n in (100, 101)} & cpu

"""A reset is answered when no restart could bring the old bytes back."""

from kvtierd.core.effects import Done
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Block, BlockId
from kvtierd.core.stimuli import Found, FoundBlock, Load, Reset, SessionClosed, Status, Usable
from kvtierd.testing.rig import LAYOUT, fs_spec, key, meta


def test_a_reset_of_what_is_only_in_the_pool_is_answered_at_once(rigged):
    rig = rigged(4)
    rig.store(1, 2)
    assert rig.reset() == 2


def test_a_reset_waits_for_deletions_and_for_writes_that_are_on_their_way(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    rig.hold = True
    rig.store(2)
    number = rig.ask(Reset)
    assert rig.inventory() == set(), "gone from sight at once"
    assert number not in rig.answers
    rig.run_held()
    assert number not in rig.answers, "the write ended, its deletion has not"
    rig.run_held()
    assert rig.answer(number, Done).count == 3
    assert rig.storage["disk"] == {}


def test_a_reset_waits_for_a_read_that_keeps_the_block_s_storage(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    rig.evict(1, tiers=("cpu",))
    rig.hold = True
    rig.ask(Load, keys=(key(1),), deadline=1.0)
    number = rig.ask(Reset)
    rig.run_held()
    assert number not in rig.answers
    rig.run_held()
    assert rig.answer(number, Done).count == 1


def test_a_second_reset_waits_for_the_first_one_s_deletions(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    rig.hold = True
    numbers = [rig.ask(Reset), rig.ask(Reset)]
    assert not set(numbers) & set(rig.answers)
    rig.run_held()
    assert [rig.answer(number, Done).count for number in numbers] == [2, 0]


def test_storage_that_cannot_be_deleted_does_not_hold_the_answer_for_ever(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    rig.judge = lambda op, tier, bid: Status.FAILED if op == "delete" else Status.OK
    assert rig.reset() == 2
    rig.judge = lambda op, tier, bid: Status.OK


def test_a_closed_session_waits_for_nothing(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    rig.hold = True
    rig.ask(Reset)
    rig.feed(SessionClosed(rig.session))
    assert len(rig.ladder.resets) == 0
    rig.hold = False
    rig.run_held()
    rig.session = rig.attach()


def found(*numbers):
    namespace = LAYOUT.namespace()
    return [FoundBlock(Block.of(BlockId(namespace, key(n)), UNIT, meta(n)), UNIT) for n in numbers]


def scanning_rig(rigged, *numbers):
    rig = rigged(8, [fs_spec()], scanned=False)
    rig.storage["disk"] = {item.block.id: item.block for item in found(*numbers)}
    return rig


def test_a_reset_during_a_scan_takes_what_the_scan_finds_later_and_is_answered_then(rigged):
    rig = scanning_rig(rigged, 1, 2, 3)
    rig.feed(Found("disk", found(1)))
    number = rig.ask(Reset)
    rig.store(4)
    rig.feed(Found("disk", found(2)))
    assert rig.inventory() == {("cpu", key(4))}
    assert number not in rig.answers, "the scan may find more"
    rig.feed(Found("disk", found(3), last=True))
    assert rig.answer(number, Done).count == 1
    assert rig.inventory() == {("cpu", key(4)), ("disk", key(4))}, "what was stored after it stays"
    assert {block_id.key for block_id in rig.storage["disk"]} == {key(4)}


def test_an_evicted_block_that_the_scan_finds_later_does_not_come_back(rigged):
    rig = scanning_rig(rigged, 1, 2)
    assert rig.evict(2) == 0
    rig.feed(Found("disk", found(1, 2), last=True))
    assert rig.inventory() == {("disk", key(1))}
    assert {block_id.key for block_id in rig.storage["disk"]} == {key(1)}


def test_too_many_evictions_during_a_scan_cost_hits_and_never_leave_one(rigged, monkeypatch):
    monkeypatch.setattr("kvtierd.core.tier.UNWELCOME_LIMIT", 1)
    rig = scanning_rig(rigged, 1, 2, 3)
    rig.evict(1, 2)
    rig.feed(Found("disk", found(1, 2, 3), last=True))
    assert rig.inventory() == set()


def test_a_reset_of_a_tier_that_cannot_be_used_is_not_answered_before_it_can(rigged):
    rig = scanning_rig(rigged, 1)
    rig.feed(Usable("disk", "no permission"))
    number = rig.ask(Reset)
    assert number not in rig.answers
    rig.feed(Usable("disk"))
    rig.feed(Found("disk", found(1), last=True))
    assert rig.answer(number, Done).count == 0
    assert rig.storage["disk"] == {}

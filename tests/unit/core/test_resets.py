"""A reset is answered when no restart could bring the old bytes back."""

from kvtierd.core.effects import Done
from kvtierd.core.stimuli import Load, Reset, SessionClosed, Status
from kvtierd.testing.rig import fs_spec, key


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

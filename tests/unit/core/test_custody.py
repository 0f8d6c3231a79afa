"""What an engine holds ends on its word or its death, never by time alone."""

import msgspec
import pytest

from kvtierd.core import spaces
from kvtierd.core.effects import Attached, Refused
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Group, KeyState, Layout
from kvtierd.core.stimuli import Acknowledge, Attach, Goodbye, ProcessDied, Release, Role, SessionClosed, Stop
from kvtierd.testing.rig import LAYOUT, fs_spec, key


def revoke_by_close(rig):
    rig.feed(SessionClosed(rig.session))


def revoke_by_time(rig):
    rig.advance(1000.0)


@pytest.mark.parametrize("revoke", [revoke_by_close, revoke_by_time])
def test_slots_of_a_revoked_job_wait_for_every_process_of_the_engine(rigged, revoke):
    rig = rigged(1)
    rig.attach("e0", b"worker", role=Role.WORKER)
    job = rig.prepare([key(1)])
    revoke(rig)
    fence = rig.notices[-1][1].fence
    rig.session = rig.attach("e0", b"p0")
    assert rig.prepare([key(2)]).keys == ()
    rig.ask(Acknowledge, fence=fence)
    assert rig.prepare([key(2)]).keys == (), "the worker has not spoken"
    rig.feed(ProcessDied(b"worker"))
    assert rig.prepare([key(2)]).keys == (key(2),)
    assert isinstance(rig.commit(job), Refused)


def test_a_late_word_of_the_scheduler_ends_the_quarantine(rigged):
    rig = rigged(1)
    job = rig.prepare([key(1)])
    rig.advance(1000.0)
    assert rig.prepare([key(2)]).keys == ()
    assert isinstance(rig.commit(job), Refused), "too late to be stored"
    assert rig.prepare([key(2)]).keys == (key(2),)


def test_the_slots_of_a_dead_engine_are_free_at_once_in_either_order(rigged):
    for died_first in (True, False):
        rig = rigged(1)
        rig.prepare([key(1)])
        stimuli = [ProcessDied(b"p0"), SessionClosed(rig.session)]
        for stimulus in stimuli if died_first else reversed(stimuli):
            rig.feed(stimulus)
        rig.session = rig.attach("e1", b"p1")
        assert rig.prepare([key(2)]).keys == (key(2),)


def test_an_expired_load_lease_pins_until_the_engine_has_spoken(rigged):
    rig = rigged(1)
    rig.store(1)
    lease = rig.load(1).lease
    rig.advance(1000.0)
    assert rig.store(2) == ()
    rig.ask(Release, lease=lease)
    assert rig.store(2) == (key(2),)


def test_an_expired_lookup_lease_needs_nobody_s_word(rigged):
    rig = rigged(1)
    rig.store(1)
    assert rig.lookup(1, lease=0.5).leased == 1
    assert rig.store(2) == ()
    rig.advance(0.5)
    assert rig.store(2) == (key(2),)


def test_goodbye_speaks_for_its_own_process_only(rigged):
    rig = rigged(1)
    rig.attach("e0", b"worker", role=Role.WORKER)
    rig.prepare([key(1)])
    rig.ask(Goodbye)
    rig.session = rig.attach("e1", b"p1")
    assert rig.prepare([key(2)]).keys == ()
    rig.feed(ProcessDied(b"worker"))
    assert rig.prepare([key(2)]).keys == (key(2),)


def test_workers_neither_reserve_nor_commit(rigged):
    rig = rigged()
    worker = rig.attach("e0", b"w0", role=Role.WORKER)
    from kvtierd.core.stimuli import PrepareStore

    assert isinstance(rig.answers[rig.ask(PrepareStore, session=worker, keys=(key(1),))], Refused)


def wide(units):
    return Layout(
        model="wide", dtype="x", layout="x", groups=(Group(tokens_per_block=4, block_bytes=units * UNIT),)
    )


def test_a_detached_layout_gives_its_extents_and_its_blocks_get_removals(rigged):
    rig = rigged(8)
    rig.store(1, 2, 3, 4)
    other = rig.ask(Attach, session=50, layout=wide(6), engine_id="e9", process=b"p9")
    assert isinstance(rig.answers[other], Refused), "an attached layout keeps what it has"
    assert "pool.bytes" in rig.answers[other].message
    rig.ask(Goodbye)
    other = rig.ask(Attach, session=51, layout=wide(6), engine_id="e9", process=b"p9")
    assert rig.answer(other, Attached).slot_bytes == 6 * UNIT
    assert rig.story()[4:] == [("removed", "cpu", 4), ("removed", "cpu", 3)], "as much as is needed"


def test_a_detached_layout_gives_one_extent_at_a_time_and_no_block_without_its_descendants(rigged):
    rig = rigged(8)
    rig.store(1, 2, 3, 4)
    rig.store(*range(10, 14), chain=False)
    rig.ask(Goodbye)
    small = rig.ask(Attach, session=51, layout=wide(1), engine_id="e9", process=b"p9")
    rig.answer(small, Attached)
    assert [(what, n) for what, _, n in rig.story()[8:]] == [("removed", 4)], "the leaf of the chain"
    large = rig.ask(Attach, session=52, layout=wide(3), engine_id="e8", process=b"p8")
    rig.answer(large, Attached)
    gone = [n for _, _, n in rig.story()[8:]]
    left = {1, 2, 3, 4, *range(10, 14)} - set(gone)
    assert len(left) >= 3
    assert all(n - 1 in left for n in left & {2, 3, 4}), "no child without its parent"


def test_beyond_so_many_layouts_the_oldest_that_no_engine_uses_goes_and_without_one_an_attach_is_refused(
    rigged, monkeypatch
):
    """An engine that attaches with ever new ones takes no more of the daemon than that."""
    monkeypatch.setattr(spaces, "MAX_LAYOUTS", 3)
    rig = rigged(64)
    rig.store(1, 2)
    rig.ask(Goodbye)

    def attach(session):
        layout = msgspec.structs.replace(wide(1), model=f"m{session}")
        return rig.answers[rig.ask(Attach, session=session, layout=layout, engine_id="e9", process=b"p9")]

    counters = rig.ladder.stack.primary.counters
    for session in (51, 52):
        assert isinstance(attach(session), Attached)
    assert rig.story()[2:] == []
    assert isinstance(attach(53), Attached)
    assert rig.story()[2:] == [("removed", "cpu", 2), ("removed", "cpu", 1)]
    assert (counters["layouts_forgotten"], counters["layouts_refused"]) == (1, 0)
    refused = attach(54)
    assert isinstance(refused, Refused)
    assert "3 layouts are in use" in refused.message
    rig.feed(SessionClosed(51))
    assert isinstance(attach(54), Attached)
    assert (counters["layouts_forgotten"], counters["layouts_refused"]) == (2, 1)
    assert len(rig.ladder.stack.primary.spaces) == 3


def test_a_slot_larger_than_the_pool_is_refused_with_the_setting_to_change(rigged):
    rig = rigged(4)
    answer = rig.answers[rig.ask(Attach, session=50, layout=wide(5), engine_id="e9", process=b"p9")]
    assert isinstance(answer, Refused)
    assert "pool.bytes" in answer.message


def test_ranks_share_a_slot_at_published_offsets(rigged):
    layout = Layout(
        model="tp",
        dtype="x",
        layout="x",
        ranks=2,
        groups=(Group(tokens_per_block=4, block_bytes=1000), Group(tokens_per_block=8, block_bytes=3000)),
    )
    rig = rigged(8, layout=layout, attach=False)
    number = rig.ask(Attach, session=1, layout=layout, engine_id="e", process=b"p", rank=1)
    attached = rig.answer(number, Attached)
    assert attached.rank_offsets == ((0, 1024), (0, 3072))
    assert attached.payload_bytes == (2024, 6072)
    assert attached.slot_bytes == 2 * UNIT
    beyond = rig.ask(Attach, session=2, layout=layout, engine_id="e", process=b"p", rank=2)
    assert isinstance(rig.answers[beyond], Refused)


def test_blocks_of_another_namespace_are_misses(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1)
    tenant = Layout(**{**{f: getattr(rig.layout, f) for f in rig.layout.__struct_fields__}, "tenant": "b"})
    other = rig.attach("e1", b"p1", layout=tenant)
    from kvtierd.core.effects import LookedUp
    from kvtierd.core.stimuli import Lookup

    assert rig.answer(rig.ask(Lookup, session=other, keys=(key(1),)), LookedUp).states == (KeyState.MISS,)


def test_a_clean_stop_announces_that_the_pool_is_gone_leaf_first(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2)
    rig.feed(Stop())
    assert rig.story()[-2:] == [("removed", "cpu", 2), ("removed", "cpu", 1)]
    assert rig.inventory() == {("disk", key(1)), ("disk", key(2))}


def test_a_clean_stop_that_keeps_the_pool_announces_nothing(rigged):
    rig = rigged(8, [fs_spec()])
    rig.store(1, 2)
    told = len(rig.story())
    rig.feed(Stop(keep_pool=True))
    assert len(rig.story()) == told


def test_layouts_say_in_what_they_differ():
    """L74 (what the daemon's warning is about)"""
    seeded = msgspec.structs.replace(LAYOUT, hash_seed="1", hash_algorithm="sha256")
    assert seeded.differences(LAYOUT) == ["hash_algorithm", "hash_seed"]
    assert seeded.namespace() != LAYOUT.namespace()
    assert LAYOUT.differences(LAYOUT) == []
    assert msgspec.structs.replace(LAYOUT, dtype="other").differences(LAYOUT) == ["dtype"]

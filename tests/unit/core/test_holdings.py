"""What one session may hold, and renewing it."""

from kvtierd.core.effects import Done, ErrorCode, Prepared, Refused
from kvtierd.core.holdings import Limit
from kvtierd.core.stimuli import Lookup, PrepareStore, Release, Renew, SessionClosed
from kvtierd.testing.rig import key


def test_a_hoarder_is_refused_and_nobody_else(rigged):
    rig = rigged(8)
    rig.ladder.limit.max_leases = 3
    rig.store(1)
    jobs = [rig.prepare([key(number)]) for number in (2, 3)]
    lease = rig.load(1).lease
    for request, fields in ((PrepareStore, {"keys": (key(4),)}), (Lookup, {"keys": (key(1),), "lease": 1.0})):
        refused = rig.answer(rig.ask(request, **fields), Refused)
        assert refused.code is ErrorCode.BUSY
        assert "engine.max_leases" in refused.message
    assert rig.lookup(1) is not None, "what holds nothing is answered"
    other = rig.attach("e1", b"p1")
    number = rig.ask(PrepareStore, session=other, keys=(key(5),))
    assert rig.answer(number, Prepared).keys == (key(5),)
    rig.ask(Release, lease=lease)
    assert rig.prepare([key(6)]).keys == (key(6),), "one less, one more"
    rig.commit(jobs[0])
    assert rig.ladder.stack.primary.counters["leases_refused"] == 2


def test_ten_thousand_refusals_leave_no_trace(rigged):
    """L56: what is refused must not count as held."""
    rig = rigged(2)
    rig.ladder.limit.max_leases = 1
    job = rig.prepare([key(1)])
    for _ in range(10_000):
        rig.ask(PrepareStore, keys=(key(2),))
    rig.commit(job)
    assert rig.prepare([key(2)]).keys == (key(2),)


def test_an_end_of_the_session_ends_its_count(rigged):
    rig = rigged(4)
    rig.store(1)
    rig.prepare([key(2)])
    rig.load(1)
    rig.feed(SessionClosed(rig.session))
    assert rig.ladder.sessions.jobs.counts == {}
    assert rig.ladder.sessions.leases.counts == {}
    rig.session = rig.attach("e1", b"p1")


def test_what_is_renewed_lives_on_and_what_is_not_ends(rigged):
    rig = rigged(4)
    rig.store(1)
    kept, other = rig.prepare([key(2)]), rig.prepare([key(3)])
    lease = rig.load(1).lease
    for _ in range(5):
        rig.advance(40.0)
        done = rig.answer(rig.ask(Renew, numbers=(kept.job, lease, 77)), Done)
        assert done.count == 2
    assert rig.commit(kept).stored == (key(2),)
    assert isinstance(rig.commit(other), Refused)
    assert rig.ladder.sessions.leases.keys() == {lease}
    rig.advance(61.0)
    assert rig.answer(rig.ask(Renew, numbers=(lease,)), Done).count == 0, "too late"
    assert not rig.ladder.sessions.leases


def test_nobody_renews_what_is_another_s(rigged):
    rig = rigged(4)
    job = rig.prepare([key(1)])
    other = rig.attach("e0", b"p1")
    assert rig.answer(rig.ask(Renew, session=other, numbers=(job.job,)), Done).count == 0


def test_the_limit_of_a_ladder_is_the_one_it_was_made_with(rigged):
    assert isinstance(rigged(1).ladder.limit, Limit)
    assert rigged(1).ladder.limit.max_leases == 16384

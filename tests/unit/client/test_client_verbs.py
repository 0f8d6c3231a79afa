"""The verbs of both clients against a daemon that works."""

import pytest

from kvtierd.client import BlockMeta, KeyState, Scope, SkipReason, block_key
from kvtierd.core import stimuli
from kvtierd.core.effects import ErrorCode
from kvtierd.core.geometry import Geometry
from kvtierd.errors import LocalProtocolError, RequestRefused

A, B, C = (block_key(letter * 8, 0) for letter in (b"a", b"b", b"c"))
BLOCK = bytes(range(250)) * 8  # 2 ranks x 1000 bytes


def test_attach_gives_pool_and_geometry(daemon, attach, layout):
    s = attach()
    geometry = Geometry.of(layout)
    assert s.connected
    assert s.epoch == 1
    assert (s.pool_id, len(s.pool)) == (daemon.pool_id, daemon.attached_bytes)
    assert (s.payload_bytes, s.rank_offsets) == (geometry.payload_bytes, geometry.rank_offsets)
    assert len(s.slot(3)) == s.slot_bytes == geometry.slot_bytes
    assert s.attached.tiers == ("cpu",)
    assert daemon.of_type(stimuli.Attach)[0].engine_id == "e0"


def test_what_is_written_to_a_slot_is_seen_by_the_daemon(daemon, attach):
    import mmap

    s = attach()
    s.slot(5)[:4] = b"mine"
    with mmap.mmap(daemon.pool_fd, daemon.attached_bytes) as pool:
        assert pool[5 * s.unit_bytes : 5 * s.unit_bytes + 4] == b"mine"


def test_a_slot_of_another_pool_or_outside_the_pool_is_not_given(daemon, attach):
    s = attach()
    assert len(s.slot(0, pool_id=daemon.pool_id))
    with pytest.raises(LocalProtocolError, match="belongs to pool other"):
        s.slot(0, pool_id="other")
    for number in (-1, 64, 1 << 40):
        with pytest.raises(IndexError):
            s.slot(number)


def test_store_commit_lookup_load_release(daemon, attach):
    s = attach()
    job = s.prepare_store([A, B], meta=[BlockMeta(hashes=(1,)), None], scope=Scope(store_to=()))
    assert job.keys == (A, B)
    assert (job.pool_id, job.generation) == (daemon.pool_id, 7)
    for view in job.views():
        view[:3] = b"xyz"
    assert s.lookup([A]).states == (KeyState.MISS,)
    assert job.commit(failed=[B]) == (A,)
    assert job.commit() == ()
    assert len(daemon.of_type(stimuli.Commit)) == 1
    found = s.lookup([A, B], lease=5.0)
    assert (found.states, found.prefix, found.leased) == ((KeyState.HIT, KeyState.MISS), 1, 1)
    found.release()
    found.release()
    with s.load([A, B, C], deadline=0.1) as loaded:
        assert (loaded.keys, loaded.slots, loaded.sources) == ((A,), job.slots[:1], ("cpu",))
        assert bytes(loaded.views()[0][:3]) == b"xyz"
        assert len(daemon.leases) == 1
    assert not daemon.leases
    assert len(daemon.of_type(stimuli.Release)) == 2


def test_what_is_given_back_without_a_wait_is_given_back_and_mixes_no_answers_up(daemon, attach, wait_for):
    s = attach()
    s.put(A, BLOCK)
    for _ in range(50):
        found = s.lookup([A], lease=5.0)
        found.release(wait=False)
        found.release(wait=False)
        loaded = s.load([A])
        assert (loaded.keys, found.states) == ((A,), (KeyState.HIT,))
        loaded.release(wait=False)
        loaded.release()
    assert s.lookup([A, B]).states == (KeyState.HIT, KeyState.MISS)
    assert len(daemon.of_type(stimuli.Release)) == 100
    assert wait_for(lambda: not daemon.leases)


def test_a_job_commits_on_clean_exit_and_aborts_on_an_exception(daemon, attach):
    s = attach()
    with s.prepare_store([A]) as job:
        pass
    assert s.lookup([A]).prefix == 1
    with pytest.raises(ZeroDivisionError), s.prepare_store([B]) as job:
        raise ZeroDivisionError
    assert s.lookup([B]).prefix == 0
    assert daemon.of_type(stimuli.Abort)[0].job == job.job
    assert not daemon.jobs


def test_a_worker_reports_failed_keys_before_the_commit(daemon, attach):
    s = attach()
    job = s.prepare_store([A, B])
    assert s.fail(job.job, [B])
    assert job.commit() == (A,)


def test_put_and_get_give_the_bytes_back_of_every_rank_and_group(daemon, attach):
    s = attach()
    small = block_key(b"s", 1)
    assert s.put(A, BLOCK, meta=BlockMeta(hashes=(1,)))
    assert s.put(small, memoryview(BLOCK)[:1024])
    assert s.put(A, BLOCK)  # already there
    assert s.get(A) == BLOCK
    assert s.get(small) == BLOCK[:1024]
    assert s.get(B) is None
    with s.load([A]) as loaded:
        view = loaded.views()[0]
        first, second = s.rank_offsets[0]
        assert bytes(view[first : first + 1000]) == BLOCK[:1000]
        assert bytes(view[second : second + 1000]) == BLOCK[1000:]
    assert not daemon.leases


def test_put_of_a_wrong_size_or_group_is_refused_before_anything_is_sent(daemon, attach):
    s = attach()
    with pytest.raises(ValueError, match="2000 bytes, not 3"):
        s.put(A, b"abc")
    with pytest.raises(ValueError, match="no group 9"):
        s.put(block_key(b"x", 9), BLOCK)
    with pytest.raises(ValueError, match="1 metadata for 2 keys"):
        s.prepare_store([A, B], meta=[None])
    assert not daemon.of_type(stimuli.PrepareStore)


def test_counting_verbs_and_a_paged_inventory(daemon, attach):
    s = attach()
    keys = [block_key(bytes([n]) * 8) for n in range(5)]
    with s.prepare_store(keys):
        pass
    assert [entry.key for entry in s.inventory()] == keys
    assert len(daemon.of_type(stimuli.Inventory)) == 3
    assert (s.touch(keys), s.prefetch(keys[:2])) == (5, 2)
    assert s.evict(keys[:2], tiers=["cpu"]) == 2
    assert s.reset() == 3
    assert s.inventory("cpu") == []


def test_a_skipped_key_says_why(daemon, attach):
    s = attach()
    s.put(A, BLOCK)
    job = s.prepare_store([A])
    assert (job.keys, job.slots, job.commit()) == ((), (), ())
    assert [(skip.key, skip.reason) for skip in job.skipped] == [(A, SkipReason.RESIDENT)]


def test_status_needs_no_session(daemon, connect):
    assert connect().status()["daemon"] == "fake"


@pytest.mark.parametrize("code", [ErrorCode.BAD_REQUEST, ErrorCode.UNKNOWN_TIER, ErrorCode.NOT_ALLOWED])
def test_a_mistake_of_the_caller_raises_and_the_session_goes_on(daemon, attach, code):
    s = attach()
    daemon.refuse[stimuli.PrepareStore] = code
    with pytest.raises(RequestRefused) as refusal:
        s.prepare_store([A])
    assert refusal.value.code == code
    daemon.refuse.clear()
    assert s.put(A, BLOCK)
    assert s.epoch == 1


@pytest.mark.parametrize(
    "code",
    [ErrorCode.BUSY, ErrorCode.STOPPING, ErrorCode.UNKNOWN_JOB, ErrorCode.STALE_POOL, ErrorCode.INTERNAL],
)
def test_a_passing_refusal_is_a_miss_that_names_its_reason(daemon, attach, code):
    s = attach()
    daemon.refuse |= dict.fromkeys(
        (stimuli.PrepareStore, stimuli.Load, stimuli.Lookup, stimuli.Evict, stimuli.Inventory), code
    )
    job = s.prepare_store([A])
    assert (job.keys, job.commit(), job.reason) == ((), (), code)
    assert (s.load([A]).reason, s.lookup([A]).reason) == (code, code)
    assert s.lookup([A]).states == (KeyState.MISS,)
    assert (s.evict([A]), s.inventory(), s.get(A), s.put(A, BLOCK)) == (0, [], None, False)
    assert s.connected


def test_a_field_that_does_not_fit_is_named(daemon, attach):
    s = attach()
    with pytest.raises(RequestRefused, match=r"bad_request.*keys\[0\]"):
        s.lookup([block_key(b"")])
    with pytest.raises(TypeError):
        s.lookup([object()])
    assert s.lookup([A]).reason == ""


def test_a_refused_attach_raises(daemon, attach):
    daemon.refuse[stimuli.Attach] = ErrorCode.POOL_EXHAUSTED
    with pytest.raises(RequestRefused, match="pool_exhausted"):
        attach()


def test_a_daemon_of_another_version_is_named(start, attach, connect):
    start(versions=(7, 9))
    with pytest.raises(RequestRefused, match=r"bad_version.*client speaks 1-1, this daemon 7-9"):
        attach()
    with pytest.raises(RequestRefused, match="bad_version"):
        connect().status()


def test_fences_are_polled_and_acknowledged_up_to_what_was_polled(daemon, attach, wait_for):
    s = attach()
    assert s.poll() is None
    assert not s.acknowledge()
    daemon.notice(3)
    assert wait_for(s.poll) == 3
    daemon.notice(4)
    s.lookup([A])  # takes the notice in: the caller has not heard of fence 4 yet
    assert s.acknowledge()
    assert [request.fence for request in daemon.of_type(stimuli.Acknowledge)] == [3]
    assert s.poll() == 4
    assert s.acknowledge()
    assert s.poll() is None


def test_unknown_fields_and_notices_of_a_newer_daemon_are_ignored(daemon, attach):
    import msgspec

    s = attach()
    daemon.raw(msgspec.msgpack.encode({"type": "weather", "id": 0, "sun": True}))
    daemon.raw(msgspec.msgpack.encode({"type": "revoked", "id": 0, "fence": 2, "new": [1]}))
    assert s.lookup([A]).reason == ""
    assert (s.epoch, s.poll()) == (1, 2)


def test_close_says_goodbye_and_later_verbs_are_misses(daemon, connect, layout, wait_for):
    c = connect()
    s = c.attach(layout, engine_id="e0", role="worker", rank=1)
    c.close()
    assert len(daemon.of_type(stimuli.Goodbye)) == 1
    assert wait_for(lambda: not daemon.connections)
    assert s.lookup([A]).reason == "away"
    assert not s.connected

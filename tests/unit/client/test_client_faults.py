"""The clients when the daemon is absent, late, cut off, replaced or talks nonsense: a miss, in time."""

import os
import random
import socket
import time

import pytest

from kvtierd.client import KeyState, block_key
from kvtierd.client._link import Backoff
from kvtierd.core import stimuli
from kvtierd.core.effects import ErrorCode
from kvtierd.errors import RequestRefused, Unavailable
from kvtierd.wire.messages import Hello

A, B = block_key(b"a" * 8), block_key(b"b" * 8)
BLOCK = bytes(range(250)) * 8


def assert_all_miss(s):
    assert s.lookup([A, B]).states == (KeyState.MISS, KeyState.MISS)
    job = s.prepare_store([A])
    assert (job.keys, job.slots, job.views(), job.commit(), job.abort()) == ((), (), (), (), None)
    loaded = s.load([A], deadline=30)
    assert (loaded.keys, loaded.slots, loaded.views(), loaded.release()) == ((), (), (), None)
    assert (s.put(A, BLOCK), s.get(A), s.fail(1, [A])) == (False, None, False)
    assert (s.evict([A]), s.reset(), s.prefetch([A]), s.touch([A])) == (0, 0, 0, 0)
    assert (s.inventory(), s.poll(), s.acknowledge()) == ([], None, False)


def test_with_no_daemon_every_verb_misses_at_once(connect, layout, clock):
    """L111: the engine starts before the daemon."""
    c = connect(deadline=60.0, clock=clock)
    begin = time.monotonic()
    s = c.attach(layout, engine_id="e0")
    assert (s.connected, s.pool, s.pool_id, s.epoch) == (False, None, None, 0)
    assert s.payload_bytes == (2024, 1024)
    assert_all_miss(s)
    with pytest.raises(Unavailable):
        c.status()
    assert time.monotonic() - begin < 5


def test_a_daemon_that_appears_later_is_found(connect, layout, clock, start, wait_for):
    """L111, L112: without the caller doing anything about it."""
    s = connect(deadline=5.0, clock=clock).attach(layout, engine_id="e0")
    daemon = start()
    assert s.lookup([A]).reason == "away"  # the backoff has not passed
    clock.run()
    assert wait_for(lambda: s.put(A, BLOCK))
    assert (s.connected, s.epoch, s.pool_id) == (True, 1, daemon.pool_id)


def test_a_restarted_daemon_gets_a_new_mapping_and_nothing_of_the_old_one(attach, start, clock, wait_for):
    """L112, L61: jobs and leases of the old daemon die with it, its slots are never those of the new one."""
    first = start()
    s = attach(clock=clock)
    s.put(A, BLOCK)
    job, loaded, found = s.prepare_store([B]), s.load([A]), s.lookup([A], lease=9.0)
    old_pool = s.pool
    first.close()
    assert_all_miss(s)
    second = start()
    clock.run()
    assert wait_for(lambda: s.lookup([A]).reason == "")
    assert (s.epoch, s.pool_id) == (2, second.pool_id)
    assert s.lookup([A]).prefix == 0
    job.views()[0][:3] = b"old"  # still safe: the old mapping
    assert bytes(s.slot(job.slots[0])[:3]) == b"\0\0\0"
    assert bytes(loaded.views()[0][:1000]) == BLOCK[:1000]
    assert (job.commit(), loaded.release(), found.release()) == ((), None, None)
    assert not second.of_type(stimuli.Commit)
    assert not second.of_type(stimuli.Release)
    assert len(old_pool) == first.attached_bytes
    assert s.put(A, BLOCK)


def test_a_reconnect_to_the_same_daemon_keeps_the_mapping_and_shows_the_fence(
    attach, daemon, clock, wait_for
):
    s = attach(clock=clock)
    pool = s.pool
    pool[:4] = b"mark"
    daemon.fence = 5
    daemon.drop_connections()
    clock.run()
    assert wait_for(lambda: s.lookup([A]).reason == "")
    assert s.epoch == 2
    assert bytes(s.pool[:4]) == b"mark"
    assert s.pool.obj is pool.obj
    assert s.poll() == 5


def test_a_fence_of_the_daemon_before_says_nothing_to_the_next_one(attach, start, clock, wait_for):
    """Else its own revocations, which count from 1 again, would never be acknowledged."""
    first = start()
    s = attach(clock=clock)
    first.notice(9)
    assert wait_for(s.poll) == 9
    first.close()
    second = start()
    clock.run()
    assert wait_for(lambda: (s.acknowledge(), s.epoch == 2)[1])
    assert not second.of_type(stimuli.Acknowledge)
    assert s.poll() is None
    second.notice(2)
    assert wait_for(s.poll) == 2
    assert s.acknowledge()
    assert [request.fence for request in second.of_type(stimuli.Acknowledge)] == [2]


def test_who_may_have_been_counted_in_by_an_attach_that_went_unanswered_speaks(
    attach, daemon, clock, wait_for
):
    """The daemon waits for every process that it gave the pool to, read or not."""
    daemon.mute.add(stimuli.Attach)
    s = attach(deadline=0.2, clock=clock)
    assert not s.connected
    daemon.fence = 4
    daemon.mute.clear()
    daemon.drop_connections()
    clock.run()
    assert wait_for(lambda: s.lookup([A]).reason == "")
    assert s.poll() == 4
    assert s.acknowledge()


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 30])
def test_an_answer_cut_off_is_a_miss_within_the_deadline(attach, daemon, clock, wait_for, cut):
    """L38: after 1, 3 or 7 bytes, or after the header alone."""
    s = attach(deadline=30.0, clock=clock)
    daemon.cut = cut
    begin = time.monotonic()
    assert s.lookup([A]).reason == "away"
    assert time.monotonic() - begin < 5
    clock.run()
    assert wait_for(lambda: s.put(A, BLOCK))


def test_a_cut_in_the_handshake_leaves_no_descriptor_behind(attach, daemon, clock, wait_for):
    daemon.cut = 9
    s = attach(deadline=5.0, clock=clock)
    assert not s.connected
    clock.run()
    assert wait_for(lambda: s.put(A, BLOCK))


def test_a_late_answer_is_a_miss_then_dropped_and_what_it_hands_out_goes_back(attach, daemon, wait_for):
    """L57: an answer that comes too late never becomes another request's."""
    s = attach(deadline=0.05)
    daemon.mute = {stimuli.Lookup, stimuli.PrepareStore}
    assert s.lookup([A], lease=5.0).reason == "late"
    begin = time.monotonic()
    assert s.prepare_store([A]).reason == "late"
    assert s.lookup([B]).reason == "late"
    assert time.monotonic() - begin < 1
    daemon.answer_late()
    assert wait_for(lambda: s.lookup([A, B]).states == (KeyState.MISS, KeyState.MISS) and not s._link.overdue)
    assert s.connected
    assert s.epoch == 1
    s.touch([A])
    assert wait_for(lambda: not daemon.jobs and not daemon.leases)


def test_a_late_daemon_still_gets_releases_and_nobody_waits_for_it(attach, daemon, wait_for):
    s = attach(deadline=0.05)
    s.put(A, BLOCK)
    loaded = s.load([A])
    daemon.mute = {stimuli.Touch, stimuli.Release}
    s.touch([A])
    loaded.release()
    assert wait_for(lambda: daemon.of_type(stimuli.Release))
    daemon.answer_late()
    assert wait_for(lambda: not daemon.leases)


def test_who_does_not_wait_for_a_release_does_not_notice_that_the_daemon_is_late_or_away(
    attach, daemon, wait_for, clock
):
    s = attach(deadline=5.0, clock=clock)
    s.put(A, BLOCK)
    late, away = s.load([A]), s.load([A])
    daemon.mute = {stimuli.Release}
    begin = time.monotonic()
    late.release(wait=False)
    assert wait_for(lambda: daemon.of_type(stimuli.Release))
    daemon.drop_connections()
    away.release(wait=False)
    assert wait_for(lambda: not s.connected)
    s.load([A]).release(wait=False)
    assert time.monotonic() - begin < 3


def test_a_daemon_that_accepts_and_says_nothing_costs_one_deadline(connect, layout, socket_path, clock):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path)
        listener.listen()
        begin = time.monotonic()
        s = connect(deadline=0.1, clock=clock).attach(layout, engine_id="e0")
        assert not s.connected
        for _ in range(20):
            assert s.lookup([A]).reason == "away"
        assert time.monotonic() - begin < 3


def test_nonsense_from_the_daemon_ends_the_connection_not_the_engine(attach, daemon, clock, wait_for):
    """L124: a pickle is bytes like any other."""
    s = attach(clock=clock)
    daemon.raw(b"\x80\x04cos\nsystem\n")
    assert wait_for(lambda: s.lookup([A]).reason == "away")
    clock.run()
    assert wait_for(lambda: s.put(A, BLOCK))
    assert s.epoch == 2


def spoil(daemon, fault):
    """Let the daemon hand out a pool that cannot be mapped."""
    if fault == "size":
        daemon.attached_bytes *= 2
    else:
        daemon.descriptors = 1


@pytest.mark.parametrize("fault", ["size", "descriptors"])
def test_an_attach_to_a_pool_that_cannot_be_mapped_says_so(attach, daemon, clock, fault):
    """L115: a reason at once, not a wait."""
    spoil(daemon, fault)
    with pytest.raises(RequestRefused) as refused:
        attach(deadline=1.0, clock=clock)
    assert refused.value.code == "cannot_map"


@pytest.mark.parametrize("fault", ["size", "descriptors"])
def test_a_pool_that_cannot_be_mapped_any_more_is_a_miss_until_it_can(attach, daemon, clock, wait_for, fault):
    s = attach(deadline=1.0, clock=clock)
    right = daemon.attached_bytes, daemon.descriptors
    spoil(daemon, fault)
    daemon.drop_connections()
    assert wait_for(lambda: s.lookup([A]).reason == "away")

    def refused():
        s.lookup([A])
        return s.refused

    clock.run()
    assert wait_for(refused).code == "cannot_map"
    assert_all_miss(s)
    daemon.attached_bytes, daemon.descriptors = right
    clock.run()
    assert wait_for(lambda: s.put(A, BLOCK))
    assert s.refused is None


def test_a_refusal_while_coming_back_is_kept_and_verbs_miss(attach, daemon, clock, wait_for):
    s = attach(clock=clock)
    daemon.refuse[stimuli.Attach] = ErrorCode.BAD_REQUEST
    daemon.drop_connections()
    assert wait_for(lambda: s.lookup([A]).reason == "away")

    def refused():
        s.lookup([A])
        return s.refused

    clock.run()

    assert wait_for(refused).code == ErrorCode.BAD_REQUEST
    daemon.refuse.clear()

    assert wait_for(lambda: s.put(A, BLOCK))
    assert s.refused is None


def test_a_daemon_that_is_stopping_is_as_good_as_absent(attach, daemon, clock, wait_for):
    daemon.refuse[stimuli.Attach] = ErrorCode.STOPPING
    s = attach(clock=clock)
    assert (s.connected, s.refused.code) == (False, ErrorCode.STOPPING)
    daemon.refuse.clear()
    clock.run()
    assert wait_for(lambda: s.put(A, BLOCK))


def test_a_hundred_reconnects_leak_no_descriptor_and_the_process_counts_as_alive(
    attach, daemon, clock, wait_for
):
    s = attach(clock=clock)
    s.put(A, BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    clock.run()
    for turn in range(100):
        # each attach costs the daemon here one read end, which it keeps
        daemon.drop_connections()
        assert wait_for(lambda: s.lookup([A]).prefix == 1), turn
    assert not daemon.liveness_hung_up()
    held_by_daemon = len(daemon._liveness) - 1
    assert len(os.listdir("/proc/self/fd")) - held_by_daemon <= before + 1
    assert s.epoch >= 101


def test_hello_and_attach_are_repeated_with_the_same_parameters(attach, daemon, clock, wait_for):
    s = attach(clock=clock)
    daemon.drop_connections()
    clock.run()
    assert wait_for(lambda: s.lookup([A]).reason == "")
    first, second = daemon.of_type(stimuli.Attach)
    assert (first.layout, first.engine_id, first.process) == (second.layout, second.engine_id, second.process)
    assert not daemon.of_type(Hello)  # the connection answers those by itself


def test_the_backoff_rises_to_two_seconds_with_jitter_and_starts_anew():
    now = [0.0]
    backoff = Backoff(lambda: now[0], random.Random(1))
    assert backoff.remaining() == 0
    delays = []
    for _ in range(40):
        backoff.failed()
        delays.append(backoff.remaining())
        now[0] += delays[-1]
    assert delays[0] == pytest.approx(0.05)
    assert all(0.05 <= delay <= 2.0 for delay in delays)
    assert max(delays) > 1
    assert len(set(delays[6:])) > 20
    backoff.succeeded()
    backoff.failed()
    assert backoff.remaining() == pytest.approx(0.05)

"""The pipeline: verbs that are on their way at once, few waits, nothing lost and nothing leaked."""

import time

import pytest

from kvtierd.client import Client, KeyState, block_key
from kvtierd.client.pipeline import MAX_IN_FLIGHT, Pipeline
from kvtierd.core import stimuli
from kvtierd.core.effects import ErrorCode
from kvtierd.errors import RequestRefused

A, B, C = (block_key(bytes([n]) * 32) for n in range(1, 4))


@pytest.fixture
def pipe(socket_path, daemon, layout):
    with Client(socket_path, deadline=0.3) as client:
        yield Pipeline(client.attach(layout, engine_id="e0"))


def store(pipe, *keys):
    job = pipe.prepare_store(keys)
    pipe.wait([job])
    committed = pipe.commit(job.result)
    pipe.wait([committed])
    return committed.result


def test_many_verbs_cost_one_wait(pipe, daemon):
    assert store(pipe, A, B) == (A, B)
    before = pipe.round_trips
    calls = [pipe.lookup([key], lease=5.0) for key in (A, B, C)] + [pipe.load([A, B])]
    assert not any(call.done for call in calls)
    assert pipe.wait(calls)
    assert [call.result.states[0] for call in calls[:3]] == [KeyState.HIT, KeyState.HIT, KeyState.MISS]
    assert calls[3].result.keys == (A, B)
    assert pipe.round_trips == before + 1
    assert pipe.waited > 0


def test_what_nobody_waits_for_is_found_by_a_poll(pipe, daemon, wait_for):
    store(pipe, A)
    call = pipe.load([A])
    pipe.flush()
    wait_for(lambda: pipe.poll() or call.done)
    released = pipe.release(call.result)
    pipe.flush()
    wait_for(lambda: not daemon.leases)
    wait_for(lambda: pipe.poll() or released.done)
    assert pipe.misses == {}


def test_nothing_is_written_before_it_is_flushed(pipe, daemon, wait_for):
    """The daemon takes all that comes together as one turn."""
    pipe.lookup([A])
    pipe.lookup([B])
    assert daemon.of_type(stimuli.Lookup) == []
    pipe.flush()
    wait_for(lambda: len(daemon.of_type(stimuli.Lookup)) == 2)


def test_a_lookup_may_ask_for_more_than_states(pipe, daemon):
    pipe.wait([pipe.lookup([A], lease=1.0, everywhere=True, touch=True)])
    (asked,) = daemon.of_type(stimuli.Lookup)
    assert (asked.everywhere, asked.touch, asked.lease) == (True, True, 1.0)


def test_a_silent_daemon_costs_one_deadline_and_then_nothing(pipe, daemon, wait_for):
    """20 ms in an engine; the engine's step must never stand still for a daemon that hangs."""
    daemon.mute = {stimuli.Lookup, stimuli.PrepareStore}
    first = pipe.lookup([A], lease=5.0)
    begin = time.monotonic()
    assert pipe.wait([first]) is False
    pipe.drop(first)
    assert 0.25 < time.monotonic() - begin < 1.0
    assert (first.miss, first.result.states) == ("late", (KeyState.MISS,))
    begin = time.monotonic()
    for _ in range(100):
        call = pipe.prepare_store([B])
        assert call.done
        assert call.miss == "late"
    assert time.monotonic() - begin < 0.2
    daemon.answer_late()
    wait_for(lambda: pipe.poll() or not pipe.session._link.overdue)
    assert store(pipe, C) == (C,)
    assert pipe.misses == {"late": 101}


def test_a_late_answer_gives_back_what_it_hands_out(pipe, daemon, wait_for):
    store(pipe, A)
    daemon.mute = {stimuli.Lookup, stimuli.Load, stimuli.PrepareStore}
    calls = [pipe.lookup([A], lease=5.0), pipe.load([A]), pipe.prepare_store([B])]
    assert pipe.wait(calls, seconds=0.02) is False
    for call in calls:
        pipe.drop(call)
    daemon.answer_late()
    wait_for(lambda: pipe.poll() or (not daemon.leases and not daemon.jobs))


def test_giving_up_an_answer_is_no_fault_of_the_daemon(pipe, daemon):
    call = pipe.lookup([A], lease=5.0)
    pipe.drop(call, late=False)
    assert call.done
    assert pipe.misses == {}
    assert store(pipe, A) == (A,)


def test_a_lost_connection_ends_every_call_and_the_next_ones_find_their_way_back(pipe, daemon, wait_for):
    calls = [pipe.lookup([A]), pipe.load([A])]
    daemon.mute = {stimuli.Lookup, stimuli.Load}
    pipe.flush()
    wait_for(lambda: len(daemon.of_type(stimuli.Load)) == 1)
    daemon.drop_connections()
    pipe.wait(calls)
    assert [call.miss for call in calls] == ["away", "away"]
    daemon.mute = set()
    wait_for(lambda: pipe.poll() or pipe.session.connected)
    assert store(pipe, A) == (A,)


def test_a_job_of_an_earlier_connection_is_not_committed_on_a_later_one(pipe, daemon, wait_for):
    job = pipe.prepare_store([A])
    pipe.wait([job])
    daemon.drop_connections()
    wait_for(lambda: pipe.poll() or pipe.session.epoch == 2)
    late = pipe.commit(job.result)
    assert (late.done, late.miss, late.result) == (True, "stale", ())


def test_with_no_daemon_every_call_misses_at_once(socket_path, layout):
    with Client(socket_path, deadline=5.0) as client:
        pipe = Pipeline(client.attach(layout, engine_id="e0"))
        begin = time.monotonic()
        calls = [pipe.lookup([A]), pipe.load([A]), pipe.prepare_store([A]), pipe.reset()]
        assert pipe.wait(calls)
        assert [call.miss for call in calls] == ["away"] * 4
        assert time.monotonic() - begin < 1


def test_a_mistake_of_the_caller_is_raised_where_the_answer_is_read(pipe, daemon):
    daemon.refuse = {stimuli.Load: ErrorCode.UNKNOWN_TIER}
    call = pipe.load([A])
    pipe.wait([call])
    with pytest.raises(RequestRefused, match="as told"):
        _ = call.result


def test_calls_in_flight_are_bounded_but_what_gives_back_always_goes(pipe, daemon, wait_for):
    store(pipe, A)
    held = pipe.load([A])
    pipe.wait([held])
    daemon.mute = {stimuli.Lookup}
    calls = [pipe.lookup([A]) for _ in range(MAX_IN_FLIGHT + 10)]
    assert [call.miss for call in calls[-10:]] == ["busy"] * 10
    pipe.release(held.result)
    pipe.flush()
    wait_for(lambda: not daemon.leases)


def test_nothing_to_ask_is_done_at_once(pipe):
    call = pipe.lookup([A])
    pipe.wait([call])
    assert pipe.release(call.result).done


def test_a_patient_session_comes_in_when_the_refusal_has_passed(socket_path, daemon, layout, wait_for):
    """L112: an engine that an older daemon refused finds the upgraded one by itself."""
    daemon.refuse = {stimuli.Attach: ErrorCode.POOL_EXHAUSTED}
    with Client(socket_path, deadline=0.3) as client:
        pipe = Pipeline(client.attach(layout, engine_id="e0", patient=True))
        assert pipe.session.refused.code is ErrorCode.POOL_EXHAUSTED
        assert pipe.lookup([A]).miss == "away"
        daemon.refuse = {}
        wait_for(lambda: pipe.poll() or pipe.session.connected)
        assert pipe.session.refused is None
        assert store(pipe, A) == (A,)

"""Promises of the vLLM glue: a request that can have no hit waits for nothing."""

from __future__ import annotations

from fake_session import FakeSession
from glue_rig import end_step, keys_of, manager, request, step, tracked
from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def begun(blocks=6, **more):
    """A manager over a daemon that shows what it has, and a request that it knows of."""
    session, req = FakeSession(), request(blocks, **more)
    session.shows_absence = True
    return session, req, manager(session)[0]


def ask(made, req, context):
    return [made.lookup(key, context) for key in keys_of(req)]


def check_a_request_that_can_have_no_hit_waits_for_nothing_and_is_told_in_the_next_step():
    session, req, made = begun()
    context = tracked(made, req)
    assert ask(made, req, context) == [MISS] * 6
    step(made)
    end_step(made)
    assert session.calls["lookup"] == 0
    step(made)
    assert session.asked == [(tuple(BlockKey(k) for k in keys_of(req)), False)]
    assert (made._pipeline.waits, session.leases) == (0, 0)
    for _ in range(3):
        step(made)
    assert session.calls["lookup"] == 1


def check_a_request_that_ended_at_once_is_told_too():
    session, req, made = begun()
    context = tracked(made, req)
    assert ask(made, req, context) == [MISS] * 6
    step(made)
    made.on_request_finished(context)
    step(made)
    assert session.calls["lookup"] == 1


def check_what_was_stored_while_a_request_waited_its_turn_is_a_hit():
    session, req, made = begun()
    context = tracked(made, req)
    step(made)
    session.states = {BlockKey(key): KeyState.HIT for key in keys_of(req)[:4]}
    assert ask(made, req, context) == [HIT] * 4 + [MISS] * 2
    assert session.leases == 1
    for _ in range(3):
        step(made)
    assert session.calls["lookup"] == 1
    made.on_request_finished(context)
    assert session.leases == 0


def check_a_first_block_that_nobody_has_is_a_miss_before_the_answer_comes():
    session, req, made = begun()
    session.states = {BlockKey(key): KeyState.HIT for key in keys_of(req)[1:]}
    context = tracked(made, req)
    assert session.calls["lookup"] == 1
    assert made.lookup(keys_of(req)[0], context) is MISS
    assert made._pipeline.waits == 0
    assert made.lookup(keys_of(req)[1], context) is HIT
    assert made._pipeline.waits == 1
    made.on_request_finished(context)
    assert session.leases == 0


def check_a_wish_is_asked_for_whatever_is_there_since_it_may_be_wrong():
    session, req, made = begun(kv_transfer_params={"kvtierd": {"load_from": ["disk"]}})
    context = tracked(made, req)
    assert session.calls["lookup"] == 1
    assert ask(made, req, context) == [MISS] * 6
    assert made._pipeline.waits == 1

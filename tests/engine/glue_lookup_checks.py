"""Promises of the vLLM glue: few round trips, held hits, patience with promotions, wishes of requests."""

from __future__ import annotations

from types import SimpleNamespace

from fake_session import FakeSession
from glue_rig import end_step, identity, keys_of, manager, prepare_load, prepare_store, request, step, tracked
from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState, Scope, SkipReason
from kvtierd.engines.vllm import lookups as lookups_module
from kvtierd.engines.vllm.transfer import NO_SLOT
from kvtierd.engines.vllm.versions import CacheHitSource

HIT, MISS, PENDING, RETRY = (
    LookupResult.HIT,
    LookupResult.MISS,
    LookupResult.HIT_PENDING,
    LookupResult.RETRY,
)


def all_of(req, state, group=0):
    return {BlockKey(key): state for key in keys_of(req, group)}


def ask(made, req, context, group=0):
    return [made.lookup(key, context) for key in keys_of(req, group)]


def check_a_request_is_asked_for_when_it_arrives_and_waited_for_at_its_first_lookup():
    session, req = FakeSession(), request(6)
    session.states = {BlockKey(k): KeyState.HIT for k in keys_of(req)[:4]}
    made, _ = manager(session)
    context = tracked(made, req)
    assert session.calls["lookup"] == 1
    assert made._pipeline.waits == 0
    assert ask(made, req, context) == [HIT] * 4 + [MISS] * 2
    assert session.calls == {"lookup": 1, "touch": 1}
    assert made._pipeline.waits == 1
    assert session.asked == [(tuple(BlockKey(k) for k in keys_of(req)), False)]


def check_all_requests_of_a_step_are_waited_for_once():
    session = FakeSession()
    requests = [request(6, f"r{number}") for number in range(20)]
    session.states = all_of(requests[0], KeyState.HIT)
    made, _ = manager(session)
    contexts = [tracked(made, req) for req in requests]
    for req, context in zip(requests, contexts, strict=True):
        assert ask(made, req, context) == [HIT] * 6
        prepare_load_spec = made.prepare_load(keys_of(req), context)
        assert prepare_load_spec.pool_id == ""
    end_step(made)
    assert made._pipeline.waits == 2, "one for the lookups, one for the slots"


def check_a_request_that_comes_up_after_the_step_waited_is_deferred_by_a_step():
    session, first, second = FakeSession(), request(2, "a"), request(2, "b")
    session.states = all_of(first, KeyState.HIT)
    made, _ = manager(session)
    contexts = [tracked(made, req) for req in (first, second)]
    ask(made, first, contexts[0])
    made._lookups.consumed("b")  # as after a load that failed: it must be asked for anew
    assert ask(made, second, contexts[1]) == [RETRY] * 2
    assert made._pipeline.waits == 1
    step(made)
    assert ask(made, second, contexts[1]) == [HIT] * 2


def check_a_late_daemon_costs_one_deadline_and_is_a_miss():
    session, req = FakeSession(), request(3)
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    made._pipeline.silent = True
    context = tracked(made, req)
    assert ask(made, req, context) == [MISS] * 3
    assert made._pipeline.waits == 1
    assert made._pipeline.misses == {"late": 1}
    step(made)
    assert made.failures == {"call": 1}


def check_lookups_while_a_promotion_runs_cost_no_wait_and_few_questions():
    session, req = FakeSession(), request(3)
    session.states = all_of(req, KeyState.COLD)
    made, clock = manager(session)
    context = tracked(made, req)
    assert ask(made, req, context) == [PENDING] * 3
    session.states = all_of(req, KeyState.PENDING)
    waits = made._pipeline.waits
    for _ in range(1000):
        step(made)
        clock.now += lookups_module.POLL_INTERVAL / 10
        assert ask(made, req, context) == [PENDING] * 3
    assert made._pipeline.waits == waits
    assert session.calls["lookup"] < 60, session.calls
    assert session.leases == 0


def check_within_one_step_pending_blocks_are_asked_once():
    session, req = FakeSession(), request(3)
    session.states = all_of(req, KeyState.PENDING)
    made, clock = manager(session)
    context = tracked(made, req)
    for _ in range(100):
        ask(made, req, context)
        clock.now += 0.01
    assert session.calls["lookup"] == 2, "the whole chain, then its promotion"


def check_a_finished_promotion_turns_pending_into_hit_and_names_its_tier():
    session, req = FakeSession(), request(2)
    keys = [BlockKey(k) for k in keys_of(req)]
    session.states = {keys[0]: KeyState.HIT, keys[1]: KeyState.COLD}
    session.sources = {keys[1]: "disk"}
    made, clock = manager(session)
    context = tracked(made, req)
    assert ask(made, req, context) == [HIT, PENDING]
    session.states[keys[1]] = KeyState.PENDING
    step(made)
    assert ask(made, req, context) == [HIT, PENDING]
    session.states[keys[1]] = KeyState.HIT
    clock.now += 0.1
    for _ in range(2):  # the question goes out in one step, its answer is taken in by the next
        step(made)
        answers = ask(made, req, context)
    assert answers == [HIT, HIT]
    assert [made.get_load_source(key, context) for key in keys_of(req)] == [
        CacheHitSource.HOST,
        CacheHitSource.DISK,
    ]
    prepare_load(made, keys_of(req), context)
    assert made.get_stats()._values["vllm:kvtierd_hit_blocks"] == {("cpu",): 1, ("disk",): 1}


def check_waiting_for_a_promotion_ends_at_its_deadline():
    session, req = FakeSession(), request(2)
    session.states = all_of(req, KeyState.PENDING)
    made, clock = manager(session, promotion_deadline=1.0)
    context = tracked(made, req)
    assert ask(made, req, context) == [PENDING] * 2
    for _ in range(3):
        clock.now += 0.6
        step(made)
        answers = ask(made, req, context)
    assert answers == [MISS] * 2
    asked = session.calls["lookup"]
    step(made)
    assert ask(made, req, context) == [MISS] * 2
    assert session.calls["lookup"] == asked


def check_a_daemon_that_falls_silent_during_a_promotion_ends_the_wait_at_its_deadline():
    session, req = FakeSession(), request(2)
    session.states = all_of(req, KeyState.COLD)
    made, clock = manager(session, promotion_deadline=1.0)
    context = tracked(made, req)
    assert ask(made, req, context) == [PENDING] * 2
    made._pipeline.silent = True
    clock.now += 1.1
    step(made)
    assert ask(made, req, context) == [MISS] * 2


def check_a_block_that_has_no_room_in_the_pool_is_a_miss_when_the_daemon_says_so():
    session, req = FakeSession(), request(2)
    keys = [BlockKey(k) for k in keys_of(req)]
    session.states = {keys[0]: KeyState.HIT, keys[1]: KeyState.COLD}
    made, _ = manager(session)
    context = tracked(made, req)
    assert ask(made, req, context) == [HIT, PENDING]
    step(made)
    assert ask(made, req, context) == [HIT, MISS]


def check_only_blocks_that_the_engine_lacks_are_promoted():
    session, req = FakeSession(), request(6)
    session.states = all_of(req, KeyState.COLD)
    made, _ = manager(session)
    context = tracked(made, req)
    assert made.lookup(keys_of(req)[2], context) is PENDING
    assert session.asked[-1] == (tuple(BlockKey(k) for k in keys_of(req)[2:]), True)


def check_a_sliding_window_promotes_one_window_from_its_end():
    """L72: its blocks before the window are gone, and it must hit all the same."""
    who = identity(groups=2)
    session, req = FakeSession(groups=2), request(8)
    window = keys_of(req, 1)[5:]
    session.states = all_of(req, KeyState.HIT) | {BlockKey(k): KeyState.COLD for k in window}
    made, _ = manager(session, who)
    context = tracked(made, req)
    assert ask(made, req, context) == [HIT] * 8
    assert made.lookup(keys_of(req, 1)[7], context) is PENDING
    assert session.asked[-1] == (tuple(BlockKey(k) for k in window[::-1]), True)
    session.states.update((BlockKey(k), KeyState.HIT) for k in window)
    step(made)
    assert [made.lookup(k, context) for k in reversed(window)] == [HIT] * 3
    assert made.lookup(keys_of(req, 1)[4], context) is MISS


def check_an_old_answer_is_asked_for_again_before_its_lease_ends():
    session, req = FakeSession(), request(2)
    session.states = all_of(req, KeyState.HIT)
    made, clock = manager(session, lease=2.0)
    context = tracked(made, req)
    ask(made, req, context)
    clock.now += 1.5
    step(made)
    session.states.clear()
    assert ask(made, req, context) == [MISS] * 2
    assert session.leases == 0


def check_an_unused_lease_is_given_back():
    session, req = FakeSession(), request(2)
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    ask(made, req, context)
    assert session.leases == 1
    made.on_request_finished(context)
    assert session.leases == 0
    assert not made._requests


def check_a_request_that_ends_before_its_answer_leaves_no_lease():
    session, req = FakeSession(), request(2)
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    made._pipeline.poll()  # the answer is there, nobody has looked at it
    made.on_request_finished(context)
    assert session.leases == 0


def check_a_load_takes_over_from_the_lookups_lease():
    session, req = FakeSession(), request(2)
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    ask(made, req, context)
    prepare_load(made, keys_of(req), context)
    assert session.leases == 1
    made.complete_load(set(keys_of(req)), context)
    assert session.leases == 0


def check_a_long_queue_pins_no_pool():
    session, req = FakeSession(), request(2, "late")
    made, _ = manager(session)
    session.states = all_of(req, KeyState.HIT)
    for number in range(lookups_module.MOST_LEASED):
        tracked(made, request(1, f"r{number}"))
    context = tracked(made, req)
    assert ask(made, req, context) == [PENDING] * 2, "a hit that nothing holds is secured first"
    step(made)
    assert ask(made, req, context) == [HIT] * 2


def check_a_request_that_has_grown_is_asked_for_again():
    session, req, longer = FakeSession(), request(2), request(4)
    session.states = all_of(longer, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    ask(made, req, context)
    req.block_hashes += longer.block_hashes[2:]
    step(made)
    assert ask(made, longer, context) == [HIT] * 4
    assert made._pipeline.waits == 2


def check_blocks_that_were_there_when_the_request_came_make_no_copy_job():
    session, req = FakeSession(), request(3)
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    ask(made, req, context)
    waits = made._pipeline.waits
    assert prepare_store(made, keys_of(req), context).keys_to_store == []
    assert made._pipeline.waits == waits
    assert session.calls["prepare_store"] == 1, "other tiers may want them"


def check_slots_of_blocks_that_only_seemed_to_be_there_go_back():
    session, req = FakeSession(), request(3)
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    ask(made, req, context)
    session.states.clear()
    assert prepare_store(made, keys_of(req), context).keys_to_store == []
    step(made)
    end_step(made)
    assert session.jobs[0].aborted


def check_requests_may_name_their_tiers_and_a_bound():
    session = FakeSession()
    req = request(
        4, kv_transfer_params={"kvtierd": {"load_from": ["disk"], "store_to": [], "max_tokens": 11}}
    )
    session.states = all_of(req, KeyState.HIT)
    made, _ = manager(session)
    context = tracked(made, req)
    assert ask(made, req, context) == [HIT, HIT, MISS, MISS]
    session.states.clear()
    other = request(4, "s", kv_transfer_params=req.kv_transfer_params)
    assert len(prepare_store(made, keys_of(req), tracked(made, other)).keys_to_store) == 2
    assert set(session.scopes) == {Scope(load_from=("disk",), store_to=())}
    assert made.problem("r") == ""


def check_vllms_own_tier_matchers_are_understood():
    session = FakeSession()
    wish = [{"medium": "cpu"}, {"medium": "STORAGE", "locality": "LOCAL"}, {"medium": "storage"}]
    made, _ = manager(session)
    tracked(made, request(1, kv_transfer_params={"kv_load_tiers": wish}))
    assert session.scopes == [Scope(load_from=("locality=LOCAL", "medium=STORAGE"))]


def check_bad_wishes_are_refused_with_a_message_and_served_without_the_cache():
    bad = [
        {"kvtierd": []},
        {"kvtierd": {"load_form": ["disk"]}},
        {"kvtierd": {"load_from": "disk"}},
        {"kvtierd": {"store_to": [1]}},
        {"kvtierd": {"max_tokens": -1}},
        {"kvtierd": {"max_tokens": True}},
        {"kv_load_tiers": [{"medium": "TAPE"}]},
        {"kv_load_tiers": "disk"},
    ]
    for params in bad:
        session, req = FakeSession(), request(2, kv_transfer_params=params)
        session.states = all_of(req, KeyState.HIT)
        made, _ = manager(session)
        context = tracked(made, req)
        assert ask(made, req, context) == [MISS] * 2
        assert prepare_store(made, keys_of(req), context).keys_to_store == []
        assert "kv" in made.problem("r"), params
        assert made.failures == {"request": 1}
        made.on_request_finished(context)


def check_a_pool_that_was_full_is_asked_within_the_call_until_it_has_room_again():
    session, req = FakeSession(), request(2)
    session.refuse = SkipReason.NO_ROOM
    made, _ = manager(session)
    context = tracked(made, req)
    assert len(prepare_store(made, keys_of(req), context).keys_to_store) == 2, "nobody knew"
    assert made.prepare_store(keys_of(req), context) is None
    session.refuse = None
    assert len(made.prepare_store(keys_of(req), context).keys_to_store) == 2
    waits = made._pipeline.waits
    made.prepare_store(keys_of(request(3))[2:], context)
    assert made._pipeline.waits == waits


def check_a_store_waits_for_nothing_and_gets_its_slots_in_a_later_step():
    session, req = FakeSession(), request(3)
    made, _ = manager(session)
    context = tracked(made, req)
    spec = made.prepare_store(keys_of(req), context).store_spec
    assert end_step(made, spec) == {}
    assert spec.pending
    assert session.calls["prepare_store"] == 0, "not in the step that computes the request's first token"
    step(made)
    assert session.calls["prepare_store"] == 1
    (slots,) = end_step(made).values()
    assert (slots.pool_id, len(slots.slots)) == (session.pool_id, 3)
    assert made._pipeline.waits == 0
    assert end_step(made) == {}


def check_a_flush_gets_the_slots_of_the_jobs_it_names():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    first, second = (made.prepare_store([key], context).store_spec for key in keys_of(req))
    assert end_step(made, first, second) == {}
    jobs = SimpleNamespace(store_jobs={}, jobs_to_flush={second.ticket, 99})
    assert second.ticket in made.fill(jobs)
    assert made._pipeline.waits == 1


def check_a_store_that_the_daemon_never_answers_is_not_waited_for_for_ever():
    session, req = FakeSession(), request(2)
    made, clock = manager(session)
    context = tracked(made, req)
    spec = made.prepare_store(keys_of(req), context).store_spec
    end_step(made, spec)
    made._pipeline.silent = True
    step(made)
    assert end_step(made) == {}
    clock.now += 2.0
    assert end_step(made)[spec.ticket].slots == (NO_SLOT,) * 2


def check_a_store_that_a_reset_overtakes_gives_its_slots_back():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    end_step(made, made.prepare_store(keys_of(req), context).store_spec)
    made._pipeline.silent = True
    step(made)
    made.reset_cache()
    made._pipeline.silent = False
    step(made)
    assert end_step(made) == {}
    assert session.jobs[0].aborted

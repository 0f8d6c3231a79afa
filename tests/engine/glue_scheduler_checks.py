"""Promises of the scheduler side of the vLLM glue: lookups, metadata, stores, resets, settings."""

from __future__ import annotations

from types import SimpleNamespace

from fake_session import FakeSession, spec
from glue_rig import TOKENS, finish, gpu, identity, keys_of, manager, request, step, tracked, worker
from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import KeyState, SkipReason
from kvtierd.engines.vllm import lookups as lookups_module
from kvtierd.engines.vllm.chain import Chain, to_block_key
from kvtierd.engines.vllm.identity import _hash_seed
from kvtierd.engines.vllm.manager import KvtierdManager
from kvtierd.engines.vllm.settings import Settings
from kvtierd.engines.vllm.transfer import NO_SLOT, WorkerReport
from kvtierd.engines.vllm.versions import HAS_FIXED_SEED, CacheHitSource
from kvtierd.errors import ConfigError


def check_a_request_is_looked_up_in_one_round_trip():
    session, req = FakeSession(), request(6)
    session.states = {to_block_key(k): KeyState.HIT for k in keys_of(req)[:4]}
    made, _ = manager(session)
    context = tracked(made, req)
    answers = [made.lookup(key, context) for key in keys_of(req)]
    assert answers == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2
    assert session.calls["lookup"] == 1
    assert session.asked[0] == (tuple(to_block_key(k) for k in keys_of(req)), True)


def check_only_blocks_that_the_engine_lacks_are_asked_for():
    session, req = FakeSession(), request(6)
    made, _ = manager(session)
    made.lookup(keys_of(req)[2], tracked(made, req))
    assert session.asked[0][0] == tuple(to_block_key(k) for k in keys_of(req)[2:])


def check_pending_blocks_cost_one_poll_per_interval_however_often_they_are_asked():
    session, req = FakeSession(), request(3)
    session.states = {to_block_key(k): KeyState.PENDING for k in keys_of(req)}
    made, clock = manager(session)
    context = tracked(made, req)
    for _ in range(1000):
        for key in keys_of(req):
            assert made.lookup(key, context) is LookupResult.HIT_PENDING
        step(made)
        clock.now += lookups_module.POLL_INTERVAL / 10
    assert 90 <= session.calls["lookup"] <= 110, session.calls
    assert session.leases == 0


def check_within_one_step_pending_blocks_are_asked_once():
    session, req = FakeSession(), request(3)
    session.states = {to_block_key(k): KeyState.PENDING for k in keys_of(req)}
    made, clock = manager(session)
    context = tracked(made, req)
    for _ in range(100):
        made.lookup(keys_of(req)[0], context)
        clock.now += 0.01
    assert session.calls["lookup"] == 1


def check_a_finished_promotion_turns_pending_into_hit():
    session, req = FakeSession(), request(2)
    keys = [to_block_key(k) for k in keys_of(req)]
    session.states = {keys[0]: KeyState.HIT, keys[1]: KeyState.PENDING}
    made, clock = manager(session)
    context = tracked(made, req)
    assert made.lookup(keys_of(req)[1], context) is LookupResult.HIT_PENDING
    session.states[keys[1]] = KeyState.HIT
    clock.now += 0.1
    step(made)
    assert made.lookup(keys_of(req)[1], context) is LookupResult.HIT
    assert made.get_load_source(keys_of(req)[1], context) is CacheHitSource.DISK


def check_waiting_for_a_promotion_ends_at_its_deadline():
    session, req = FakeSession(), request(2)
    session.states = {to_block_key(k): KeyState.PENDING for k in keys_of(req)}
    made, clock = manager(session, promotion_deadline=1.0)
    context = tracked(made, req)
    assert made.lookup(keys_of(req)[0], context) is LookupResult.HIT_PENDING
    clock.now += 1.5
    step(made)
    assert made.lookup(keys_of(req)[0], context) is LookupResult.MISS
    assert session.asked[-1][1] is False


def check_a_block_that_has_no_room_in_the_pool_is_a_miss_at_once():
    session, req = FakeSession(), request(2)
    keys = [to_block_key(k) for k in keys_of(req)]
    session.states = {keys[0]: KeyState.HIT, keys[1]: KeyState.COLD}
    made, _ = manager(session)
    context = tracked(made, req)
    assert [made.lookup(k, context) for k in keys_of(req)] == [LookupResult.HIT, LookupResult.MISS]


def check_an_old_answer_is_asked_for_again_before_its_lease_ends():
    session, req = FakeSession(), request(2)
    session.states = {to_block_key(k): KeyState.HIT for k in keys_of(req)}
    made, clock = manager(session, lease=2.0)
    context = tracked(made, req)
    made.lookup(keys_of(req)[0], context)
    clock.now += 1.5
    step(made)
    session.states.clear()
    assert made.lookup(keys_of(req)[0], context) is LookupResult.MISS
    assert session.leases == 0


def check_an_unused_lease_is_given_back():
    session, req = FakeSession(), request(2)
    session.states = {to_block_key(k): KeyState.HIT for k in keys_of(req)}
    made, _ = manager(session)
    context = tracked(made, req)
    made.lookup(keys_of(req)[0], context)
    assert session.leases == 1
    made.on_request_finished(context)
    assert session.leases == 0
    assert not made._requests


def check_a_new_request_touches_its_whole_chain():
    session, req = FakeSession(), request(5)
    made, _ = manager(session)
    tracked(made, req)
    assert session.calls["touch"] == 1


def check_metadata_describes_every_vllm_block_of_a_chunk():
    req = request(4)
    req.cache_salt = "tenant-a"
    first, second = Chain(req, identity(chunk=2).shapes), keys_of(req, chunk=2)
    root, child = first.meta(second[0]), first.meta(second[1])
    low = [int.from_bytes(h[-8:], "big") for h in req.block_hashes]
    assert root.hashes == (low[0], low[1])
    assert root.parent is None
    assert (child.hashes, child.parent) == ((low[2], low[3]), low[1])
    assert child.token_ids == tuple(range(2 * TOKENS, 4 * TOKENS))
    assert (child.block_size, child.spec_kind) == (TOKENS, "full_attention")
    assert (root.extra_keys, child.extra_keys) == ((("tenant-a",), None), (None, None))


def check_lora_requests_are_described():
    req = request(1)
    req.lora_request = SimpleNamespace(adapter_id=3, name="poet", lora_name="poet", lora_path="/poet")
    meta = Chain(req, identity().shapes).meta(keys_of(req)[0])
    assert (meta.lora_id, meta.lora_name, meta.extra_keys) == (3, "poet", (("poet",),))


def check_a_chain_grows_with_its_request():
    req = request(2)
    chain = Chain(req, identity().shapes)
    assert len(chain.all()) == 2
    longer = request(3)
    req.block_hashes.append(longer.block_hashes[2])
    req.all_token_ids = longer.all_token_ids
    assert chain.meta(keys_of(longer)[2]).token_ids == (8, 9, 10, 11)


def check_a_key_that_one_of_two_workers_failed_is_not_committed():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    output = made.prepare_store(keys_of(req), context)
    ticket, bad = output.store_spec.ticket, keys_of(req)[1]
    both = WorkerReport(tickets={ticket: 1}).aggregate(
        WorkerReport(tickets={ticket: 1}, failed={ticket: {bad}})
    )
    assert both.tickets == {ticket: 2}
    made.note_failures(both)
    made.complete_store(set(keys_of(req)), context)
    assert session.jobs[0].committed == [to_block_key(keys_of(req)[0])]


def check_blocks_that_are_there_already_are_not_stored_again():
    session, req = FakeSession(), request(3)
    session.states = {to_block_key(keys_of(req)[0]): KeyState.HIT}
    made, _ = manager(session)
    output = made.prepare_store(keys_of(req), tracked(made, req))
    assert output.keys_to_store == keys_of(req)[1:]
    assert len(session.jobs[0].meta) == 3


def check_a_full_pool_is_offered_the_blocks_again_a_few_times():
    session, req = FakeSession(), request(2)
    session.refuse = SkipReason.NO_ROOM
    made, _ = manager(session)
    context = tracked(made, req)
    outputs = [made.prepare_store(keys_of(req), context) for _ in range(5)]
    assert outputs[:3] == [None] * 3
    assert outputs[3].keys_to_store == outputs[4].keys_to_store == []


def check_no_error_of_the_daemon_reaches_the_engine():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    output = made.prepare_store(keys_of(req), context)
    session.broken = OSError("connection reset")
    copier.submit_store(1, gpu([1, 2]), output.store_spec)
    finish(copier)
    made.complete_store(set(keys_of(req)), context)
    other = tracked(made, request(2, "other"))
    assert made.lookup(keys_of(req)[0], other) is LookupResult.MISS
    assert made.prepare_store(keys_of(req), other).keys_to_store == []
    assert made.prepare_load(keys_of(req), other).slots == (NO_SLOT, NO_SLOT)
    made.complete_load(set(keys_of(req)), other)
    made.reset_cache()
    step(made)
    made.on_request_finished(other)
    made.shutdown()
    assert made.failures["lookup"] == 1


def check_an_unbound_manager_is_inert():
    made, req = KvtierdManager(spec()), request(1)
    context = tracked(made, req)
    assert made.lookup(keys_of(req)[0], context) is LookupResult.MISS
    assert made.prepare_store(keys_of(req), context).keys_to_store == []
    step(made)
    made.reset_cache()
    made.shutdown()


def check_a_reset_ends_running_jobs_only_when_every_worker_is_done():
    session, req = FakeSession(), request(2)
    made, _ = manager(session, identity(ranks=2))
    context = tracked(made, req)
    output = made.prepare_store(keys_of(req), context)
    ticket = output.store_spec.ticket
    made.reset_cache()
    assert session.calls["reset"] == 1
    made.settle_orphans(WorkerReport(tickets={ticket: 1}))
    assert not session.jobs[0].aborted
    made.settle_orphans(WorkerReport(tickets={ticket: 1}))
    assert session.jobs[0].aborted
    made.complete_store(set(keys_of(req)), context)
    assert session.jobs[0].committed is None


def check_a_reset_that_the_daemon_did_not_get_is_owed():
    session, req = FakeSession(), request(1)
    made, _ = manager(session)
    context = tracked(made, req)
    session.states = {to_block_key(keys_of(req)[0]): KeyState.HIT}
    session.connected = False
    made.reset_cache()
    session.states = {to_block_key(keys_of(req)[0]): KeyState.HIT}
    assert made.lookup(keys_of(req)[0], context) is LookupResult.MISS
    assert made.prepare_store(keys_of(req), context).keys_to_store == []
    session.connected = True
    step(made)
    assert session.states == {}
    assert made.prepare_store(keys_of(req), context).keys_to_store == keys_of(req)


def check_unknown_or_missing_settings_are_refused():
    socket = {"kvtierd_socket": "/s"}
    for extra in ({}, {**socket, "kvtierd_dedline": 1}, {**socket, "kvtierd_lease": 0}):
        assert "kvtierd_" in refusal(extra)
    assert Settings.of({**socket, "spec_name": "x", "kvtierd_lease": 2}).lease == 2


def refusal(extra):
    try:
        Settings.of(extra)
    except ConfigError as error:
        return str(error)
    return ""


def check_an_unseeded_fast_hash_shares_nothing_with_other_engines():
    assert (
        _hash_seed("sha256", "a") == _hash_seed("sha256", "b")
    ) is HAS_FIXED_SEED  # random before vLLM 0.29
    assert _hash_seed("xxhash", "a") != _hash_seed("xxhash", "b")

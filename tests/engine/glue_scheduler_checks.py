"""Promises of the scheduler side of the vLLM glue: metadata, stores, resets, settings."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import prometheus_client
from fake_session import FakeSession, spec
from glue_rig import (
    TOKENS,
    finish,
    gpu,
    identity,
    keys_of,
    manager,
    prepare_load,
    prepare_store,
    request,
    step,
    tracked,
    worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState, SkipReason
from kvtierd.engines.vllm.chain import Chain
from kvtierd.engines.vllm.identity import _hash_seed
from kvtierd.engines.vllm.manager import KvtierdManager
from kvtierd.engines.vllm.settings import Settings
from kvtierd.engines.vllm.transfer import NO_SLOT, WorkerReport
from kvtierd.engines.vllm.versions import HAS_FIXED_SEED
from kvtierd.errors import ConfigError


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


def check_stores_and_loads_belong_to_the_trace_that_a_request_came_with():
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for headers, sent in (
        (None, None),
        ({"traceparent": parent, "tracestate": "x=1"}, parent),
        ({"tracestate": "x=1"}, None),
        ({"traceparent": "0" * 200}, None),
    ):
        session, req = FakeSession(), request(2)
        req.trace_headers = headers
        made, _ = manager(session)
        context = tracked(made, req)
        prepare_store(made, keys_of(req), context)
        prepare_load(made, keys_of(req), context)
        assert session.traces == [("prepare_store", sent), ("load", sent)], headers


def check_a_key_that_one_of_two_workers_failed_is_not_committed():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    output = prepare_store(made, keys_of(req), context)
    ticket, bad = output.store_spec.ticket, keys_of(req)[1]
    both = WorkerReport(tickets={ticket: 1}).aggregate(
        WorkerReport(tickets={ticket: 1}, failed={ticket: {bad}})
    )
    assert both.tickets == {ticket: 2}
    made.note_failures(both)
    made.complete_store(set(keys_of(req)), context)
    assert session.jobs[0].committed == [BlockKey(keys_of(req)[0])]


def check_blocks_that_are_there_already_are_not_stored_again():
    session, req = FakeSession(), request(3)
    session.states = {BlockKey(keys_of(req)[0]): KeyState.HIT}
    made, _ = manager(session)
    output = prepare_store(made, keys_of(req), tracked(made, req))
    assert output.store_spec.slots[0] == NO_SLOT
    assert NO_SLOT not in output.store_spec.slots[1:]
    assert len(session.jobs[0].meta) == 3


def check_a_full_pool_is_offered_the_blocks_again_a_few_times():
    session, req = FakeSession(), request(2)
    session.refuse = SkipReason.NO_ROOM
    made, _ = manager(session)
    context = tracked(made, req)
    outputs = [prepare_store(made, keys_of(req), context) for _ in range(6)]
    assert outputs[0].store_spec.slots == (NO_SLOT,) * 2, "nobody knew that it was full"
    assert outputs[1:4] == [None] * 3
    assert outputs[4].keys_to_store == outputs[5].keys_to_store == []


def check_no_error_of_the_daemon_reaches_the_engine():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    output = prepare_store(made, keys_of(req), context)
    session.broken = OSError("connection reset")
    copier.submit_store(1, gpu([1, 2]), output.store_spec)
    finish(copier)
    made.complete_store(set(keys_of(req)), context)
    other = tracked(made, request(2, "other"))
    assert made.lookup(keys_of(req)[0], other) is LookupResult.MISS
    assert prepare_store(made, keys_of(req), other).store_spec.slots == (NO_SLOT, NO_SLOT)
    assert prepare_load(made, keys_of(req), other).slots == (NO_SLOT, NO_SLOT)
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
    assert prepare_store(made, keys_of(req), context).keys_to_store == []
    step(made)
    made.reset_cache()
    made.shutdown()


def check_a_reset_ends_running_jobs_only_when_every_worker_is_done():
    session, req = FakeSession(), request(2)
    made, _ = manager(session, identity(ranks=2))
    context = tracked(made, req)
    output = prepare_store(made, keys_of(req), context)
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
    session.states = {BlockKey(keys_of(req)[0]): KeyState.HIT}
    session.connected = False
    made.reset_cache()
    session.states = {BlockKey(keys_of(req)[0]): KeyState.HIT}
    assert made.lookup(keys_of(req)[0], context) is LookupResult.MISS
    assert prepare_store(made, keys_of(req), context).keys_to_store == []
    session.connected = True
    step(made)
    assert made.lookup(keys_of(req)[0], context) is LookupResult.MISS, "it is not done yet"
    step(made)
    assert session.states == {}
    assert prepare_store(made, keys_of(req), context).keys_to_store == keys_of(req)


def check_vllm_makes_prometheus_metrics_of_what_is_reported():
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: partial(kind, registry=registry)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    extra = {"spec_name": "KvtierdOffloadingSpec", "spec_module_path": "kvtierd.engines.vllm"}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    metrics = OffloadPromMetrics(config, kinds, ["engine"], {0: ["0"]})
    session, req = FakeSession(), request(2)
    session.states = {BlockKey(k): KeyState.HIT for k in keys_of(req)}
    made, _ = manager(session)
    context = tracked(made, req)
    made.lookup(keys_of(req)[0], context)
    prepare_load(made, keys_of(req), context)
    made._pipeline.misses["late"] += 3
    made.note_failures(WorkerReport(recomputed=4, failed={9: {b"k"}}))
    metrics.observe(made.get_stats().data)
    said = prometheus_client.generate_latest(registry).decode()
    for line in (
        'vllm:kvtierd_hit_blocks_total{engine="0",tier="cpu"} 2.0',
        'vllm:kvtierd_hit_bytes_total{engine="0",tier="cpu"} 4096.0',
        'vllm:kvtierd_recomputed_blocks_total{engine="0"} 4.0',
        'vllm:kvtierd_unstored_blocks_total{engine="0"} 1.0',
        'vllm:kvtierd_unanswered_calls_total{engine="0",reason="late"} 3.0',
        'vllm:kvtierd_round_trips_total{engine="0"} 2.0',
        'vllm:kvtierd_connected{engine="0"} 1.0',
    ):
        assert line in said, line
    assert made.get_stats() is None, "nothing happened since"


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

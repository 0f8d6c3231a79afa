"""Promises about requests that lost blocks on the way."""

from __future__ import annotations

from types import SimpleNamespace

from fake_session import FakeSession
from glue_rig import keys_of, manager, request, step, tracked
from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState
from kvtierd.engines.vllm.connector import KvtierdConnector


def check_a_request_that_lost_a_block_is_offered_none_again_and_others_are():
    """Or a worker that cannot copy makes vLLM load, lose and look up the same block for ever."""
    session, unlucky, other = FakeSession(), request(3), request(3, name="other")
    session.states = {BlockKey(key): KeyState.HIT for key in keys_of(unlucky)}
    made, _ = manager(session)
    contexts = [tracked(made, req) for req in (unlucky, other)]
    keys = keys_of(unlucky)
    assert made.lookup(keys[0], contexts[0]) is LookupResult.HIT
    made.prepare_load(keys, contexts[0])
    made.loads_failed()
    made.complete_load(keys, contexts[0])
    step(made)
    assert made.lookup(keys[0], contexts[0]) is LookupResult.MISS
    assert made.lookup(keys[0], contexts[1]) is LookupResult.HIT


def check_the_connector_passes_lost_loads_on_before_they_complete():
    order = []
    connector = object.__new__(KvtierdConnector)
    connector.connector_scheduler = SimpleNamespace(
        update_connector_output=lambda output: order.append("completed")
    )
    KvtierdConnector._manager, usual = (
        property(lambda self: SimpleNamespace(loads_failed=lambda: order.append("lost"))),
        KvtierdConnector._manager,
    )
    try:
        for bad in ({7}, set()):
            connector.update_connector_output(
                SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=bad)
            )
    finally:
        KvtierdConnector._manager = usual
    assert order == ["lost", "completed", "completed"]

"""Promises of the worker side of the vLLM glue: what is copied where, and what is never copied."""

from __future__ import annotations

import copy

import torch
from fake_session import UNIT, FakeSession
from glue_rig import (
    PAGE,
    end_step,
    finish,
    gpu,
    identity,
    keys_of,
    manager,
    prepare_load,
    prepare_store,
    report,
    request,
    step,
    store,
    tracked,
    worker,
)
from vllm.v1.kv_offload.base import LookupResult

from kvtierd.core.model import BlockKey, KeyState
from kvtierd.engines.vllm.transfer import NO_SLOT


def check_stored_bytes_come_back_into_other_blocks():
    session, req = FakeSession(), request(3)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, caches = worker(session)
    before = [cache.clone() for cache in caches]
    store(made, copier, req, context, [1, 2, 3])
    context = tracked(made, request(3, "later"))
    assert [made.lookup(k, context) for k in keys_of(req)] == [LookupResult.HIT] * 3
    loaded = prepare_load(made, keys_of(req), context)
    assert copier.submit_load(2, loaded, gpu([6, 5, 4])) is True
    finish(copier)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[6, 5, 4]], old[[1, 2, 3]])
        assert torch.equal(cache[[0, 1, 2, 3, 7]], old[[0, 1, 2, 3, 7]])
    assert copier.take_load_errors() == set()
    made.complete_load(set(keys_of(req)), context)
    assert session.leases == 0


def check_chunks_of_several_blocks_keep_their_order_and_may_begin_inside():
    who = identity(chunk=2)
    session, req = FakeSession(), request(4)
    made, _ = manager(session, who)
    context = tracked(made, req)
    copier, caches = worker(session, who, chunk=2)
    before = [cache.clone() for cache in caches]
    keys = keys_of(req, chunk=2)
    output = prepare_store(made, keys, context)
    copier.submit_store(1, gpu([0, 1, 2, 3]), output.store_spec)
    made.complete_store(set(keys), context)
    loaded = prepare_load(made, keys, context)
    copier.submit_load(2, loaded, gpu([5, 6, 7], indices=[1]))  # the engine has the first block itself
    finish(copier)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[5, 6, 7]], old[[1, 2, 3]])


def check_groups_and_ranks_lie_apart():
    who = [identity(ranks=2, rank=r, groups=2) for r in range(2)]
    session, req = FakeSession(ranks=2, groups=2, rank_bytes=2 * PAGE), request(1)
    made, _ = manager(session, who[0])
    context = tracked(made, req)
    copiers = [worker(session, w, groups=2) for w in who]
    copiers[1][1][0].add_(1)
    before = [[cache.clone() for cache in caches] for _, caches in copiers]
    keys = keys_of(req, 0) + keys_of(req, 1)
    output = prepare_store(made, keys, context)
    for copier, _ in copiers:
        copier.submit_store(1, gpu([0, 1], sizes=[1, 1]), output.store_spec)
    made.complete_store(set(keys), context)
    loaded = prepare_load(made, keys, context)
    for (copier, caches), old in zip(copiers, before, strict=True):
        copier.submit_load(2, loaded, gpu([5, 6], sizes=[1, 1]))
        for cache, was in zip(caches, old, strict=True):
            assert torch.equal(cache[[5, 6]], was[[0, 1]])


def check_a_job_of_another_pool_is_never_copied_and_its_keys_are_failed():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    output = prepare_store(made, keys_of(req), context)
    output.store_spec.pool_id = "pool-0"
    copier.submit_store(1, gpu([1, 2]), output.store_spec)
    assert finish(copier) == [1]
    assert not any(session.memory)
    made.note_failures(report(copier))
    made.complete_store(set(keys_of(req)), context)
    assert session.jobs[0].committed == []
    assert session.failed == [(1, tuple(BlockKey(k) for k in keys_of(req)))]


def check_a_load_of_another_pool_or_namespace_is_recomputed():
    for field, value in (("pool_id", "pool-0"), ("namespace", "other")):
        session, req = FakeSession(), request(2)
        session.states = {BlockKey(k): KeyState.HIT for k in keys_of(req)}
        made, _ = manager(session)
        context = tracked(made, req)
        copier, caches = worker(session)
        before = [cache.clone() for cache in caches]
        loaded = prepare_load(made, keys_of(req), context)
        setattr(loaded, field, value)
        copier.submit_load(1, loaded, gpu([3, 4]))
        assert finish(copier) == [1]
        assert copier.take_load_errors() == {3, 4}
        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def check_a_block_that_is_gone_is_recomputed_alone():
    session, req = FakeSession(), request(3)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, caches = worker(session)
    old = [cache.clone() for cache in caches]
    store(made, copier, req, context, [0, 1, 2])
    del session.states[BlockKey(keys_of(req)[2])]
    loaded = prepare_load(made, keys_of(req), context)
    assert loaded.slots[2] == NO_SLOT
    copier.submit_load(2, loaded, gpu([4, 5, 6]))
    finish(copier)
    assert copier.take_load_errors() == {6}
    assert copier.take_load_errors() == set()
    assert torch.equal(caches[0][[4, 5]], old[0][[0, 1]])


def check_slots_outside_the_pool_are_never_touched():
    session, req = FakeSession(), request(1)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    output = prepare_store(made, keys_of(req), context)
    output.store_spec.slots = (len(session.memory) // UNIT,)
    copier.submit_store(1, gpu([1]), output.store_spec)
    assert finish(copier) == [1]
    assert report(copier).failed[output.store_spec.ticket] == set(keys_of(req))


def check_a_worker_follows_the_session_to_a_new_pool():
    session, req = FakeSession(), request(1)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    session.memory = bytearray(len(session.memory))
    session.pool, session.pool_id = memoryview(session.memory), "pool-2"
    store(made, copier, req, context, [1])
    assert any(session.memory)
    assert session.jobs[0].committed == [BlockKey(keys_of(req)[0])]


def check_a_worker_that_acknowledged_a_revocation_starts_no_older_job():
    session, req = FakeSession(), request(1)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    output = prepare_store(made, keys_of(req), context)
    session.fence = 5
    finish(copier)
    assert session.acknowledged == [5]
    copier.submit_store(1, gpu([1]), output.store_spec)
    finish(copier)
    told = report(copier)
    assert told.failed
    assert not any(session.memory)
    made.note_failures(told)
    made.complete_store(set(keys_of(req)), context)
    store(made, copier, request(2, "s"), tracked(made, request(2, "s")), [1, 2], job=2)
    assert len(session.jobs[-1].committed) == 2, "a job that is newer than the revocation runs"


def check_the_scheduler_does_not_speak_for_a_worker_in_its_process():
    session = FakeSession()
    made, _ = manager(session)
    copier, _ = worker(FakeSession())
    session.fence = 3
    step(made)
    assert session.acknowledged == []
    copier.shutdown()
    step(made)
    assert session.acknowledged == [3]


def check_a_store_without_slots_is_held_until_they_come():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    spec = made.prepare_store(keys_of(req), context).store_spec
    end_step(made, spec)
    travelled = copy.deepcopy(spec)  # as to another process
    copier.submit_store(1, gpu([1, 2]), travelled)
    assert finish(copier) == []
    step(made)
    copier.take_fills(end_step(made))
    assert finish(copier) == [1]
    made.complete_store(set(keys_of(req)), context)
    assert len(session.jobs[0].committed) == 2


def check_slots_may_come_before_the_store_is_submitted():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    spec = made.prepare_store(keys_of(req), context).store_spec
    travelled = copy.deepcopy(spec)
    end_step(made, spec)
    step(made)
    copier.take_fills(end_step(made))
    copier.submit_store(1, gpu([1, 2]), travelled)
    assert finish(copier) == [1]
    assert any(session.memory)
    assert not copier._fills


def check_a_flush_gives_up_a_store_that_has_no_slots_and_it_is_not_committed():
    session, req = FakeSession(), request(2)
    made, _ = manager(session)
    context = tracked(made, req)
    copier, _ = worker(session)
    spec = made.prepare_store(keys_of(req), context).store_spec
    end_step(made, spec)
    copier.submit_store(1, gpu([1, 2]), copy.deepcopy(spec))
    copier.wait({1})
    assert finish(copier) == [1]
    step(made)  # asks, too late
    made.note_failures(report(copier))
    made.complete_store(set(keys_of(req)), context)
    step(made)
    end_step(made)
    assert session.jobs[0].committed is None
    assert session.jobs[0].aborted
    assert not any(session.memory)

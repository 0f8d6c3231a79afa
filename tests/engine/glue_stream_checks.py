"""Promises of the copies on side streams, against a device whose streams run when they are told to."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import torch
from fake_device import FakeDevice
from fake_session import FakeSession
from glue_rig import (
    finish,
    gpu,
    identity,
    keys_of,
    manager,
    prepare_load,
    prepare_store,
    report,
    request,
    tracked,
    worker,
)

from kvtierd.core.model import BlockKey, KeyState
from kvtierd.engines.vllm import streams
from kvtierd.engines.vllm.copies import Piece
from kvtierd.engines.vllm.streams import StreamCopier

PAGE = 512


def setup(*, batched=True, blocks=6, slots=6):
    device = FakeDevice(batched=batched)
    copier = StreamCopier(device)
    memory = bytearray(slots * PAGE)
    copier.map(memoryview(memory))
    cache = torch.arange(blocks * PAGE, dtype=torch.int64).remainder(127).to(torch.int8).reshape(blocks, PAGE)
    return device, copier, memory, cache


def piece(cache, blocks, slots):
    return [Piece(cache, PAGE, np.asarray(blocks, np.int64), np.asarray(slots, np.int64) * PAGE)]


def slot(memory, number):
    return torch.frombuffer(memory, dtype=torch.int8)[number * PAGE : (number + 1) * PAGE]


def check_a_store_copies_what_was_computed_before_it_was_submitted():
    """L62: the kernel that writes the block has not run yet when the store is submitted."""
    device, copier, memory, cache = setup()
    device.calculate(lambda: cache[2].fill_(77))
    copier.store(1, piece(cache, [2], [4]))
    assert copier.finished() == []
    device.run()
    assert [job for job, _, ok in copier.finished() if ok] == [1]
    assert bool((slot(memory, 4) == 77).all())


def check_a_load_overwrites_no_block_that_is_still_being_read():
    """L62, the other way round."""
    device, copier, memory, cache = setup()
    read = []
    before = cache[3].clone()
    slot(memory, 1).fill_(99)
    device.calculate(lambda: read.append(cache[3].clone()))
    copier.load(1, piece(cache, [3], [1]))
    device.run()
    assert torch.equal(read[0], before)
    assert bool((cache[3] == 99).all())


def check_what_is_computed_after_a_submission_is_not_waited_for():
    device, copier, _, cache = setup()
    copier.store(1, piece(cache, [2], [4]))
    blocked = device.event()
    blocked.done = False
    device.compute.queue.append(blocked)  # a long kernel
    device.run()
    assert [job for job, *_ in copier.finished()] == [1]


def check_nothing_is_synchronised_with_in_a_step():
    device, copier, _, cache = setup()
    for job in range(20):
        device.calculate(lambda: None)
        (copier.store if job % 2 else copier.load)(job, piece(cache, [job % 6], [job % 6]))
        copier.finished()
    device.run()
    assert sorted(job for job, *_ in copier.finished()) == list(range(20))
    assert device.synchronisations == 0


def check_a_load_may_end_before_an_older_store_does():
    """L59: each is reported once, when its own event has come."""
    device, copier, _, cache = setup()
    copier.store(1, piece(cache, [0], [0]))
    store_stream = copier._out
    held, store_stream.queue = store_stream.queue, type(store_stream.queue)()
    copier.load(2, piece(cache, [1], [1]))
    device.run()
    assert [job for job, *_ in copier.finished()] == [2]
    assert copier.finished() == []
    store_stream.queue = held
    device.run()
    assert [job for job, *_ in copier.finished()] == [1]
    assert copier.finished() == ()


def check_waiting_for_a_job_waits_for_that_job_only():
    """Preemption and loads within a step wait for their jobs."""
    device, copier, memory, cache = setup()
    copier.store(1, piece(cache, [0], [0]))
    copier.store(2, piece(cache, [1], [1]))
    copier.wait(1)
    assert torch.equal(slot(memory, 0), cache[0])
    assert not torch.equal(slot(memory, 1), cache[1])
    assert device.synchronisations == 1


def check_a_whole_job_is_one_operation_and_its_descriptors_live_till_its_end():
    device, copier, memory, cache = setup()
    other = cache.clone().add_(1)
    copier.store(1, [*piece(cache, [5, 0, 3], [0, 1, 2]), *piece(other, [1], [3])])
    assert device.operations == 1
    device.run()
    copier.finished()
    for number, want in enumerate((cache[5], cache[0], cache[3], other[1])):
        assert torch.equal(slot(memory, number), want)


def check_only_reads_of_host_memory_may_be_out_of_order():
    device, copier, _, cache = setup()
    copier.store(1, piece(cache, [0], [0]))
    copier.load(2, piece(cache, [0], [0]))
    assert device.out_of_order == [False, True]


def check_without_vllms_operator_torch_copies_row_by_row():
    device, copier, memory, cache = setup(batched=False)
    before = cache.clone()
    copier.store(1, piece(cache, [4, 2], [0, 5]))
    copier.load(2, piece(cache, [1], [5]))
    device.run()
    assert sorted(job for job, *_ in copier.finished()) == [1, 2]
    assert torch.equal(slot(memory, 0), before[4])
    assert torch.equal(cache[1], before[2])


def check_slots_outside_the_pool_raise_before_anything_is_copied():
    device, copier, _, cache = setup()
    outside = [*piece(cache, [0], [0]), *piece(cache, [1], [6])]
    with contextlib.suppress(ValueError):
        copier.store(1, outside)
        raise AssertionError("not refused")
    assert device.operations == 0
    assert copier.finished() == ()


def check_a_pool_that_cannot_be_pinned_is_used_all_the_same_and_told_once():
    device = FakeDevice()
    device.refuse = "cudaHostRegister says 2"
    warnings = capture(lambda: StreamCopier(device).map(memoryview(bytearray(PAGE))))
    assert len(warnings) == 1
    assert "pageable" in warnings[0]
    assert device.registered == {}


def capture(do):
    """Return what was logged at warning level or above meanwhile."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger(streams.__name__)
    logger.addHandler(handler)
    try:
        do()
    finally:
        logger.removeHandler(handler)
    return told


def check_a_large_pool_is_pinned_in_parts_and_no_copy_crosses_a_border():
    whole, streams.REGISTER_CHUNK = streams.REGISTER_CHUNK, 1000
    try:
        device, copier, memory, cache = setup()
        assert copier.pinned
        assert sum(device.registered.values()) == len(memory)
        crossing = [Piece(cache, PAGE, np.asarray([0, 1]), np.asarray([700, 1900]))]
        _, host, sizes = streams.descriptors(crossing, 0)
        assert sorted(zip(host.tolist(), sizes.tolist(), strict=True)) == [
            (700, 300),
            (1000, 212),
            (1900, 100),
            (2000, 412),
        ]
        copier.store(1, crossing)
        device.run()
        assert torch.equal(torch.frombuffer(memory, dtype=torch.int8)[700 : 700 + PAGE], cache[0])
        assert torch.equal(torch.frombuffer(memory, dtype=torch.int8)[1900 : 1900 + PAGE], cache[1])
    finally:
        streams.REGISTER_CHUNK = whole


def check_an_old_pool_stays_pinned_until_its_copies_have_ended_and_nobody_waits():
    """L112: a worker that follows the daemon to a new pool does not stop the engine for it."""
    device, copier, memory, cache = setup()
    copier.store(1, piece(cache, [0], [0]))
    copier.unmap()
    fresh = bytearray(6 * PAGE)
    copier.map(memoryview(fresh))
    assert len(device.registered) >= 1
    device.run()
    assert [job for job, *_ in copier.finished()] == [1]
    assert torch.equal(slot(memory, 0), cache[0])
    copier.store(2, piece(cache, [1], [0]))
    device.run()
    copier.finished()
    assert torch.equal(slot(fresh, 0), cache[1])
    assert device.synchronisations == 0
    copier.close()
    wait_until_empty(device)


def wait_until_empty(device):
    from kvtierd.testing.clock import wait_for

    wait_for(lambda: not device.registered, "the last registration to end")


def check_closing_waits_for_copies():
    device, copier, memory, cache = setup()
    copier.store(1, piece(cache, [0], [0]))
    copier.close()
    assert torch.equal(slot(memory, 0), cache[0])
    assert device.registered == {}


def make(session=None):
    """A worker on a fake device, with the scheduler side beside it."""
    session = session or FakeSession()
    device = FakeDevice()
    copier, caches = worker(session, identity(), copier=StreamCopier(device))
    return session, device, copier, caches


def check_a_store_is_committed_only_after_its_copy_has_ended():
    """L62: nothing is announced before the bytes are there."""
    session, device, copier, _ = make()
    made, _ = manager(session)
    req = request(2)
    context = tracked(made, req)
    output = prepare_store(made, keys_of(req), context)
    copier.submit_store(1, gpu([1, 2]), output.store_spec)
    assert finish(copier) == []
    assert session.jobs[0].committed is None
    device.run()
    assert finish(copier) == [1]
    made.complete_store(set(output.keys_to_store), context)
    assert len(session.jobs[0].committed) == 2


def check_a_copy_that_fails_on_its_way_is_reported_when_what_was_begun_has_ended():
    session, device, copier, _ = make()
    made, _ = manager(session)
    req = request(2)
    session.states = {BlockKey(k): KeyState.HIT for k in keys_of(req)}
    context = tracked(made, req)
    spec = prepare_load(made, keys_of(req), context)
    device.broken = RuntimeError("launch failed")
    told = capture(lambda: copier.submit_load(1, spec, gpu([3, 4])))
    assert len(told) == 1
    assert finish(copier) == []
    assert copier.take_load_errors() == set()
    device.run()
    assert finish(copier) == [1]
    assert copier.take_load_errors() == {3, 4}
    assert report(copier).recomputed == 2


def check_a_revocation_is_acknowledged_only_when_no_copy_runs():
    session, device, copier, _ = make()
    made, _ = manager(session)
    req = request(1)
    output = prepare_store(made, keys_of(req), tracked(made, req))
    copier.submit_store(1, gpu([1]), output.store_spec)
    session.fence = 4
    finish(copier)
    assert session.acknowledged == []
    device.run()
    finish(copier)
    assert session.acknowledged == [4]


def check_preemption_waits_for_the_stores_of_the_blocks_that_are_taken_away():
    session, device, copier, caches = make()
    made, _ = manager(session)
    req = request(1)
    output = prepare_store(made, keys_of(req), tracked(made, req))
    want = caches[0][1].clone()
    copier.submit_store(1, gpu([1]), output.store_spec)
    copier.wait({1, 99})
    caches[0][1].zero_()  # the block has a new owner
    assert device.synchronisations == 1
    start = output.store_spec.slots[0] * 4096
    stored = torch.frombuffer(session.memory, dtype=torch.int8)[start : start + len(want)]
    assert torch.equal(stored, want)

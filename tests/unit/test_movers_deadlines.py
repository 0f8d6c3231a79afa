"""Movers on storage that does not answer: deadlines, stalls that eat nothing else, and probes (L82, L87)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from kvtierd.core.effects import Delete, Probe, Read, Write
from kvtierd.core.stimuli import Probed, Status
from kvtierd.edges import mover_describe
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import LAYOUT, block, payload
from kvtierd.testing.mover_bench import SIZE, FaultyProbing, MoverBench, at, entered, run, statuses


def ids(*numbers):
    return tuple(block(number).id for number in numbers)


# -- deadlines ------------------------------------------------------------------------------------------


@run
async def test_an_operation_past_the_deadline_is_told_once_and_finished_when_it_really_ends():
    async with MoverBench(writers=1) as bench:
        bench.fill([1])
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(1)))
            await entered(hold)
            bench.pass_deadline(29.0)
            assert bench.stalled == []
            for _ in range(3):
                bench.pass_deadline(2.0)
            assert bench.stalled == [1]
            assert bench.finished == {}
        assert statuses(await bench.outcomes(1)) == [Status.OK]
        assert bench.seconds[1] == 35.0


@run
async def test_an_operation_within_the_deadline_is_not_told():
    async with MoverBench() as bench:
        bench.mover.submit(Write(1, "ram", at(1, 2, 3)))
        await bench.outcomes(1)
        bench.pass_deadline()
        assert bench.stalled == []
        assert bench.stalls()["total"] == 0


@run
async def test_the_timer_finds_a_stall_by_itself():
    async with MoverBench(writers=1, deadline=0.02, clock=time.monotonic) as bench:
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(1)))
            await entered(hold)
            await bench.wait_for(lambda: bench.stalled == [1])
        assert statuses(await bench.outcomes(1)) == [Status.OK]


@run
async def test_the_time_of_an_operation_is_that_of_its_jobs_without_the_wait():
    async with MoverBench(writers=1, batch=8) as bench:
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(1)))
            await entered(hold)
            bench.mover.submit(Write(2, "ram", at(2)))
            bench.clock.advance(10.0)
        await bench.outcomes(2)
        assert (bench.seconds[1], bench.seconds[2]) == (10.0, 0.0)


@run
async def test_the_rest_of_a_stalled_operation_is_not_begun():
    async with MoverBench(writers=2, batch=2) as bench:
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(*range(8))))
            await entered(hold, 2)
            bench.pass_deadline()
        outcomes = await bench.outcomes(1)
        assert statuses(outcomes) == [Status.OK] * 4 + [Status.FAILED] * 4
        assert outcomes[-1].reason == "the tier is stalled"
        assert len(bench.backend.inner.store) == 4


@run
async def test_what_waits_for_a_thread_longer_than_the_deadline_fails_without_having_begun():
    async with MoverBench(writers=2) as bench:
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(1)))
            await entered(hold)
            bench.clock.advance(20.0)
            bench.mover.submit(Write(2, "ram", at(2)))
            await entered(hold, 2)
            bench.mover.submit(Write(3, "ram", at(3)))
            bench.pass_deadline(15.0)
            assert bench.stalled == [1]
            assert bench.finished == {}, "a thread is left that may come to it"
            bench.mover.submit(Delete(4, "ram", ids(9)))
            bench.pass_deadline(14.0)
            assert bench.stalled == [1]
            bench.pass_deadline(1.5)
            assert bench.stalled == [1, 2]
            (outcome,) = await bench.outcomes(3)
            assert outcome.status is Status.FAILED
        assert statuses(await bench.outcomes(4)) == [Status.OK], "a delete is never dropped"
        assert block(3).id not in bench.backend.inner.store


# -- a stalled tier -------------------------------------------------------------------------------------


@run
async def test_new_work_for_a_tier_without_free_threads_fails_at_once_until_one_comes_back():
    async with MoverBench(writers=2, batch=1) as bench:
        hold = bench.backend.hold("write")
        bench.mover.submit(Write(1, "ram", at(1, 2)))
        await entered(hold, 2)
        bench.mover.submit(Write(2, "ram", at(3)))
        bench.pass_deadline()
        (dropped,) = await bench.outcomes(2)
        bench.mover.submit(Write(3, "ram", at(4)))
        (refused,) = await bench.outcomes(3)
        for outcome in (dropped, refused):
            assert (outcome.status, outcome.reason) == (Status.FAILED, "the tier is stalled")
        assert hold.entered == 2
        hold.release()
        await bench.outcomes(1)
        bench.mover.submit(Write(4, "ram", at(5)))
        assert statuses(await bench.outcomes(4)) == [Status.OK]


@run
async def test_one_stuck_thread_leaves_the_others_at_work():
    async with MoverBench(writers=2) as bench:
        hold = bench.backend.hold("write")
        bench.mover.submit(Write(1, "ram", at(1)))
        await entered(hold)
        bench.backend._holds.clear()  # what comes after goes through
        bench.pass_deadline()
        bench.mover.submit(Write(2, "ram", at(2)))
        assert statuses(await bench.outcomes(2)) == [Status.OK]
        assert bench.stalls()["writers"] == 1
        hold.release()
        await bench.outcomes(1)


@run
async def test_stuck_writes_leave_reads_alone_and_stuck_reads_leave_writes_alone():
    async with MoverBench(readers=1, writers=1) as bench:
        bench.fill([1, 2])
        bench.mover.submit(Write(1, "ram", at(1)))
        await bench.outcomes(1)
        with bench.backend.hold("write") as writes:
            bench.mover.submit(Write(2, "ram", at(2)))
            await entered(writes)
            bench.pass_deadline()
            bench.mover.submit(Read(3, "ram", at(1, slots=[20])))
            assert statuses(await bench.outcomes(3)) == [Status.OK]
            assert bytes(bench.view(20, SIZE)) == payload(1, SIZE)
        await bench.outcomes(2)
        with bench.backend.hold("read") as reads:
            bench.mover.submit(Read(4, "ram", at(1)))
            await entered(reads)
            bench.pass_deadline()
            bench.mover.submit(Write(5, "ram", at(5)))
            assert statuses(await bench.outcomes(5)) == [Status.OK]
        assert bench.stalled == [2, 4]


@run
async def test_a_stall_is_counted_with_its_reason_and_logged_once_at_each_end(caplog):
    with caplog.at_level(logging.INFO, "kvtierd.edges.movers"):
        async with MoverBench(writers=2, batch=1) as bench:
            with bench.backend.hold("write") as hold:
                bench.mover.submit(Write(1, "ram", at(1, 2)))
                await entered(hold, 2)
                bench.pass_deadline()
                reason = "a write of 1 blocks took longer than 30 s"
                assert bench.stalls() == {"now": 2, "readers": 0, "writers": 2, "total": 2, "reason": reason}
            await bench.outcomes(1)
            assert bench.stalls() == {"now": 0, "readers": 0, "writers": 0, "total": 2, "reason": reason}
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert levels == [
        ("WARNING", "tier ram: a write takes longer than 30 s"),
        ("INFO", "tier ram: answers again"),
    ]


@run
async def test_close_does_not_hang_on_a_stalled_tier_and_does_not_call_it_ended():
    bench = MoverBench(readers=1, writers=1)
    with bench.backend.hold("write") as hold:
        bench.mover.submit(Write(1, "ram", at(1)))
        bench.mover.submit(Delete(2, "ram", ids(7)))
        await entered(hold)
        bench.pass_deadline()
        assert await bench.mover.close(0.05) is False
        assert statuses(bench.finished[1] + bench.finished[2]) == [Status.FAILED] * 2


# -- probes ---------------------------------------------------------------------------------------------


@run
async def test_a_probe_tells_which_blocks_are_there():
    async with MoverBench(backend=FaultyProbing) as bench:
        bench.mover.submit(Write(1, "ram", at(*range(10))))
        await bench.outcomes(1)
        bench.mover.submit(Probe(2, "ram", ids(*range(5, 25))))
        answer = await bench.answer(2)
        assert not answer.failed
        assert sorted(found.block.id for found in answer.found) == sorted(ids(*range(5, 10)))
        figures = bench.mover.statistics()["probe"]
        assert figures["outcomes"] == {"found": 5, "absent": 15, "unknown": 0}
        assert (figures["in_flight"], figures["in_flight_blocks"]) == (0, 0)


@run
async def test_a_probe_of_storage_that_cannot_be_probed_knows_nothing():
    async with MoverBench() as bench:
        bench.mover.submit(Probe(1, "ram", ids(1)))
        assert bench.probed == {}, "never from inside submit"
        assert await bench.answer(1) == Probed(1, (), failed=True)


@pytest.mark.parametrize(("error", "complaints"), [(TierError("ram", "away"), 0), (ValueError("a bug"), 1)])
def test_a_probe_that_fails_in_part_knows_nothing(error, complaints, caplog):
    @run
    async def test():
        async with MoverBench(backend=FaultyProbing, batch=2) as bench:
            bench.backend.break_probes(error, times=1)
            bench.mover.submit(Probe(1, "ram", ids(*range(8))))
            assert await bench.answer(1) == Probed(1, (), failed=True)
            assert bench.mover.statistics()["probe"]["errors"] == complaints

    with caplog.at_level(logging.ERROR, "kvtierd"):
        test()
    assert len(caplog.records) == complaints


@run
async def test_probes_wait_for_reads_and_leave_half_of_the_threads_to_them():
    async with MoverBench(backend=FaultyProbing, readers=4, batch=1) as bench:
        with bench.backend.hold_probes() as probes, bench.backend.hold("read") as reads:
            bench.mover.submit(Probe(1, "ram", ids(*range(10))))
            await entered(probes, 2)
            bench.mover.submit(Read(2, "ram", at(1, 2, 3)))
            await entered(reads, 2)
            assert (probes.entered, reads.entered) == (2, 2)
            probes.release()
            await entered(reads, 3)
            reads.release()
        assert not (await bench.answer(1)).failed
        assert len(await bench.outcomes(2)) == 3


@run
async def test_a_probe_past_the_deadline_is_answered_at_once_and_only_once():
    async with MoverBench(backend=FaultyProbing, readers=2) as bench:
        with bench.backend.hold_probes() as hold:
            bench.mover.submit(Probe(1, "ram", ids(1)))
            bench.mover.submit(Probe(2, "ram", ids(2)))
            await entered(hold)
            bench.pass_deadline()
            assert bench.probed == {op: Probed(op, (), failed=True) for op in (1, 2)}
            assert bench.stalled == [], "no slot is at stake"
            bench.mover.submit(Probe(3, "ram", ids(3)))
            assert (await bench.answer(3)).failed, "no thread is left for probes"
            bench.mover.submit(Read(4, "ram", at(1)))
            assert statuses(await bench.outcomes(4)) == [Status.GONE], "one is left for reads"
        await asyncio.to_thread(lambda: None)
        assert await bench.mover.close(20) is True


# -- records of namespaces ------------------------------------------------------------------------------


class Describing(MemoryBackend):
    """Remembers what it was told of namespaces; waits for ``go`` before each."""

    def __init__(self):
        super().__init__("ram")
        self.go = threading.Event()
        self.told = []

    def describe(self, namespace, layout):
        assert self.go.wait(20)
        self.told.append(namespace)
        if namespace == "bad":
            raise ValueError("no")


@run
async def test_namespaces_are_described_in_order_without_holding_up_anything(caplog):
    inner = Describing()
    async with MoverBench(inner=inner) as bench:
        for name in ("a", "bad", "c"):
            bench.mover.describe(name, LAYOUT)
        bench.mover.submit(Write(1, "ram", at(1)))
        assert statuses(await bench.outcomes(1)) == [Status.OK]
        inner.go.set()
        while bench.mover._describer.busy:
            await asyncio.to_thread(lambda: None)
        bench.mover.describe("d", LAYOUT)
    assert inner.told in (["a", "bad", "c", "d"], ["a", "bad", "c"]), "what waits at the close is dropped"
    assert "could not be described: ValueError('no')" in caplog.text


@run
async def test_a_stuck_description_takes_no_more_than_its_bound_and_does_not_hang_the_close():
    inner = Describing()
    bench = MoverBench(inner=inner)
    for number in range(1000):
        bench.mover.describe(str(number), LAYOUT)
    assert len(bench.mover._describer._waiting) <= 64
    assert await bench.mover.close(0.05) is False
    inner.go.set()
    while bench.mover._describer.busy:
        await asyncio.to_thread(lambda: None)
    assert len(inner.told) <= 1


@run
async def test_no_more_namespaces_are_described_than_a_daemon_should_ever_meet(monkeypatch):
    monkeypatch.setattr(mover_describe, "RECORDS", 2)
    inner = Describing()
    inner.go.set()
    bench = MoverBench(inner=inner)
    for name in ("a", "b", "c", "a", "d"):
        bench.mover.describe(name, LAYOUT)
    while bench.mover._describer.busy:
        await asyncio.to_thread(lambda: None)
    assert inner.told == ["a", "b", "a"]
    assert bench.mover.statistics()["undescribed"] == 2
    await bench.mover.close(1.0)

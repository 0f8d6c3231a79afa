"""Movers: outcomes in order and exactly once, reads before writes, a close that never hangs."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
from collections import Counter

import pytest

from kvtierd.core.effects import BlockAt, Delete, Read, Write
from kvtierd.core.stimuli import Outcome, Status
from kvtierd.edges import mover_scan, movers
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import block, payload
from kvtierd.testing.mover_bench import SIZE, at, entered, run, statuses
from kvtierd.testing.mover_bench import MoverBench as Bench


@run
async def test_blocks_travel_from_slots_to_the_tier_and_back():
    async with Bench() as bench:
        bench.fill(range(20))
        bench.mover.submit(Write(1, "ram", at(*range(20))))
        assert statuses(await bench.outcomes(1)) == [Status.OK] * 20
        bench.mover.submit(Read(2, "ram", at(*range(20), slots=range(30, 50))))
        assert statuses(await bench.outcomes(2)) == [Status.OK] * 20
        assert all(bytes(bench.view(30 + n, SIZE)) == payload(n, SIZE) for n in range(20))
        bench.mover.submit(Delete(3, "ram", tuple(block(n).id for n in range(5))))
        await bench.outcomes(3)
        assert len(bench.backend.inner.store) == 15
        assert bench.threads == {threading.get_ident()}


@run
async def test_outcomes_are_in_the_order_of_the_blocks():
    async with Bench(readers=3, batch=2) as bench:
        bench.fill(range(1, 12, 2))
        bench.mover.submit(Write(1, "ram", at(*range(1, 12, 2))))
        await bench.outcomes(1)
        bench.mover.submit(Read(2, "ram", at(*range(12))))
        outcomes = await bench.outcomes(2)
        assert [outcome.id for outcome in outcomes] == [block(number).id for number in range(12)]
        assert statuses(outcomes) == [Status.GONE, Status.OK] * 6


@run
async def test_an_effect_is_cut_into_one_job_per_chunk():
    async with Bench(writers=2, batch=4) as bench:
        for op, blocks in enumerate([1, 2, 3, 8, 9, 20]):
            bench.mover.submit(Write(op, "ram", at(*range(blocks))))
            await bench.outcomes(op)
        sizes = [len(ids) for _, ids in bench.backend.calls]
        assert Counter(sizes) == Counter([1, 1, 1, 2, 1, 4, 4, 4, 4, 1, 4, 4, 4, 4, 4])


@run
async def test_big_blocks_are_jobs_of_their_own_whatever_the_batch(monkeypatch):
    monkeypatch.setattr(movers, "CHUNK_BYTES", 2 * SIZE + 1)
    async with Bench(writers=2, batch=16) as bench:
        bench.mover.submit(Write(1, "ram", at(*range(9))))
        await bench.outcomes(1)
        assert Counter(len(ids) for _, ids in bench.backend.calls) == Counter([2, 2, 2, 2, 1])
        monkeypatch.setattr(movers, "CHUNK_BYTES", SIZE - 1)
        bench.backend.calls.clear()
        bench.mover.submit(Read(2, "ram", at(*range(3))))
        assert statuses(await bench.outcomes(2)) == [Status.OK] * 3
        assert [len(ids) for _, ids in bench.backend.calls] == [1, 1, 1]


@run
async def test_an_effect_without_blocks_is_answered_and_never_from_inside_submit():
    async with Bench() as bench:
        bench.mover.submit(Read(1, "ram", ()))
        assert bench.finished == {}
        assert await bench.outcomes(1) == []


@run
async def test_a_read_does_not_wait_behind_writes():
    async with Bench(readers=1, writers=1) as bench:
        bench.fill([1])
        bench.mover.submit(Write(1, "ram", at(1)))
        await bench.outcomes(1)
        with bench.backend.hold("write") as hold:
            for op in range(2, 8):
                bench.mover.submit(Write(op, "ram", at(op)))
            await entered(hold)
            bench.mover.submit(Read(9, "ram", at(1, slots=[20])))
            assert statuses(await bench.outcomes(9)) == [Status.OK]
            assert bench.order == [1, 9]
            assert bench.mover.statistics()["write"]["in_flight"] == 6
        await bench.wait_for(lambda: len(bench.order) == 8)
        assert bench.order == [1, 9, 2, 3, 4, 5, 6, 7]


@run
async def test_no_more_calls_run_at_once_than_there_are_threads():
    async with Bench(writers=2, batch=1) as bench:
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(*range(10))))
            await entered(hold, 2)
            assert hold.entered == 2
        await bench.outcomes(1)


@run
async def test_an_exception_of_the_backend_fails_its_blocks_only_and_is_logged_once(caplog):
    async with Bench(writers=1, batch=2) as bench:
        bench.backend.raises("write", ValueError("boom"), times=2)
        with caplog.at_level(logging.ERROR, "kvtierd"):
            bench.mover.submit(Write(1, "ram", at(*range(6))))
            outcomes = await bench.outcomes(1)
        assert statuses(outcomes) == [Status.FAILED] * 4 + [Status.OK] * 2
        assert outcomes[0].reason == "ValueError: boom"
        assert bench.mover.statistics()["write"]["errors"] == 2
        assert len(caplog.records) == 1


@run
async def test_a_slot_view_that_fails_is_an_outcome(caplog):
    async with Bench() as bench:
        bench.mover.submit(Write(1, "ram", (BlockAt(block(1, size=SIZE), 10_000),)))
        (outcome,) = await bench.outcomes(1)
        assert outcome.status is Status.FAILED


class Forgetful(MemoryBackend):
    """A broken backend: it answers for one block too few."""

    def write(self, transfers):
        return super().write(transfers)[:-1]


@run
async def test_a_backend_that_forgets_a_block_does_not_shift_the_outcomes(caplog):
    bench = Bench(batch=3)
    bench.mover._backend = Forgetful("ram")
    async with bench:
        bench.mover.submit(Write(1, "ram", at(1, 2, 3)))
        outcomes = await bench.outcomes(1)
        assert [outcome.id for outcome in outcomes] == [block(number).id for number in (1, 2, 3)]
        assert set(statuses(outcomes)) == {Status.FAILED}


@run
async def test_scripted_outcomes_reach_the_core_and_the_counters():
    async with Bench() as bench:
        bench.backend.fail("write", Status.FULL, ids=[block(2).id], reason="disk full")
        bench.fill(range(4))
        bench.mover.submit(Write(1, "ram", at(0, 1, 2, 3)))
        outcomes = await bench.outcomes(1)
        assert outcomes[2] == Outcome(block(2).id, Status.FULL, reason="disk full")
        figures = bench.mover.statistics()["write"]
        assert figures["outcomes"] == {"ok": 3, "gone": 0, "corrupt": 0, "failed": 0, "full": 1}
        assert (figures["bytes"], figures["in_flight"], figures["in_flight_blocks"]) == (3 * SIZE, 0, 0)


@run
async def test_slot_views_are_released_when_the_job_ends():
    async with Bench() as bench:
        bench.mover.submit(Write(1, "ram", at(1, 2)))
        await bench.outcomes(1)
        bench.mover.submit(Read(2, "ram", at(1, 2)))
        await bench.outcomes(2)
        bench.pool.append(0)  # BufferError while any view is exported


@run
async def test_a_full_queue_refuses_reads_and_writes_but_no_delete():
    async with Bench(writers=1, queue_blocks=4) as bench:
        with bench.backend.hold("write") as hold:
            bench.mover.submit(Write(1, "ram", at(1, 2, 3)))
            await entered(hold)
            bench.mover.submit(Write(2, "ram", at(4, 5)))
            assert set(statuses(await bench.outcomes(2))) == {Status.FAILED}
            bench.mover.submit(Delete(3, "ram", tuple(block(n).id for n in range(10, 20))))
            assert bench.mover.statistics()["write"]["refused"] == 2
        assert set(statuses(await bench.outcomes(3))) == {Status.OK}


@run
async def test_many_effects_are_each_answered_exactly_once():
    async with Bench(readers=3, writers=3, batch=2) as bench:
        bench.backend.fail("write", times=50)
        for op in range(300):
            kind = (Write, Read)[op % 2]
            bench.mover.submit(kind(op, "ram", at(*(op % 50 + i for i in range(op % 7)))))
        await bench.wait_for(lambda: len(bench.finished) == 300)
        assert [len(bench.finished[op]) for op in range(300)] == [op % 7 for op in range(300)]


@run
async def test_a_callback_that_raises_does_not_lose_the_others():
    bench = Bench()
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    real = bench.done

    def done(finished):
        real(finished)
        if finished.op == 1:
            raise ValueError("in the callback")

    bench.mover._done = done
    async with bench:
        with bench.backend.hold("delete") as hold:
            for op in range(1, 5):
                bench.mover.submit(Delete(op, "ram", (block(op).id,)))
            await entered(hold, 2)
        await bench.wait_for(lambda: len(bench.finished) == 4)
    assert len(problems) == 1


@run
async def test_close_waits_for_what_is_queued_and_refuses_what_is_new():
    bench = Bench(writers=1)
    with bench.backend.hold("write") as hold:
        for op in range(3):
            bench.mover.submit(Write(op, "ram", at(op)))
        await entered(hold)
        closing = asyncio.create_task(bench.mover.close(30))
        await asyncio.to_thread(lambda: None)
        bench.mover.submit(Write(9, "ram", at(9)))
        (refused,) = await bench.outcomes(9)
        assert (refused.status, refused.reason) == (Status.FAILED, "closing")
        assert not closing.done()
    assert await closing is True
    assert [statuses(bench.finished[op]) for op in range(3)] == [[Status.OK]] * 3


@run
async def test_close_gives_up_on_a_stuck_backend_and_answers_everything_once():
    bench = Bench(writers=1, batch=1)
    bench.fill(range(4))
    hold = bench.backend.hold("write")
    bench.mover.submit(Write(1, "ram", at(0, 1, 2)))
    bench.mover.submit(Write(2, "ram", at(3)))
    await entered(hold)
    assert await bench.mover.close(0.05) is False
    assert statuses(bench.finished[1]) == [Status.FAILED] * 3
    assert statuses(bench.finished[2]) == [Status.FAILED]
    hold.release()
    for thread in bench.mover._writers._threads:
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
    await asyncio.to_thread(lambda: None)  # what the thread handed back late has been seen and ignored
    assert bench.order == [1, 2]
    assert list(bench.backend.inner.store) == [block(0).id]


@run
async def test_a_deletion_is_carried_out_while_closing_and_waited_for():
    """What was removed must not be found at the next start."""
    bench = Bench(writers=1)
    with bench.backend.hold("write") as hold:
        bench.mover.submit(Write(0, "ram", at(0)))
        await entered(hold)
        closing = asyncio.create_task(bench.mover.close(30))
        await asyncio.to_thread(lambda: None)
        bench.mover.submit(Delete(1, "ram", (at(0)[0].block.id,)))
    assert await closing is True
    assert statuses(bench.finished[1]) == [Status.OK]
    bench.mover.submit(Delete(2, "ram", (at(0)[0].block.id,)))
    (refused,) = await bench.outcomes(2)
    assert refused.reason == "closing"


@run
async def test_closing_an_idle_mover_ends_its_threads():
    bench = Bench()
    assert await bench.mover.close(10) is True
    for thread in bench.mover._writers._threads + bench.mover._readers._threads:
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()


def test_a_stuck_thread_does_not_keep_the_interpreter_from_ending():
    program = """
        import asyncio
        from kvtierd.core.effects import Delete
        from kvtierd.edges.backends.memory import MemoryBackend
        from kvtierd.edges.movers import Mover
        from kvtierd.testing.backend_kit import block
        from kvtierd.testing.faults import FaultyBackend

        async def main():
            backend = FaultyBackend(MemoryBackend("ram"))
            loop = asyncio.get_running_loop()
            ignore = lambda _: None
            options = dict(stalled=ignore, probed=ignore, readers=1, writers=1, deadline=30.0)
            mover = Mover("ram", backend, None, ignore, loop, **options)
            hold = backend.hold("delete", limit=1000)
            mover.submit(Delete(1, "ram", (block(1).id,)))
            await asyncio.to_thread(hold.wait_entered)
            print(await mover.close(0.05))

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        timeout=50,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n"


class Batches(MemoryBackend):
    """Scans ``count`` batches and notes how far it came."""

    def __init__(self, count):
        super().__init__("ram")
        self.count, self.made = count, 0

    def scan(self):
        for _ in range(self.count):
            self.made += 1
            yield []


@run
async def test_a_scan_hands_over_what_is_there_and_then_says_so():
    async with Bench() as bench:
        bench.mover.submit(Write(1, "ram", at(*range(8))))
        await bench.outcomes(1)
        found, finished = [], asyncio.Event()
        bench.mover.start_scan(found.append, finished.set)
        await asyncio.wait_for(finished.wait(), 20)
        assert {one.tier for one in found} == {"ram"}
        assert len([one for batch in found for one in batch.blocks]) == 8
        assert bench.mover.statistics()["scan"] == {"running": False, "blocks": 8, "error": ""}


@run
async def test_a_scan_that_raises_is_finished_all_the_same(caplog):
    async with Bench() as bench:
        bench.backend.raises("scan", OSError("unreadable"))
        finished = asyncio.Event()
        bench.mover.start_scan(lambda _: None, finished.set)
        await asyncio.wait_for(finished.wait(), 20)
        assert bench.mover.statistics()["scan"]["error"] == "OSError: unreadable"


@run
async def test_a_scan_that_the_storage_breaks_off_is_made_again(monkeypatch):
    """What it did not see is not taken for lost."""
    monkeypatch.setattr(mover_scan, "FIRST_PAUSE", 0.01)
    async with Bench() as bench:
        bench.mover.submit(Write(1, "ram", at(*range(8))))
        await bench.outcomes(1)
        bench.backend.raises("scan", TierError("ram", "the root folder is missing"), times=3)
        found, told, finished = [], [], asyncio.Event()
        bench.mover.start_scan(found.append, finished.set, told.append)
        await asyncio.wait_for(finished.wait(), 20)
        assert {one.block.id for batch in found for one in batch.blocks} == {block(n).id for n in range(8)}
        assert told == ["the root folder is missing"] * 3 + [""]
        assert bench.mover.statistics()["scan"]["error"] == ""


@run
async def test_a_scan_runs_only_a_few_batches_ahead_of_the_loop():
    inner = Batches(1000)
    async with Bench(inner=inner) as bench:
        ahead, taken, finished = [], [], asyncio.Event()

        def found(batch):
            taken.append(batch)
            ahead.append(inner.made - len(taken))

        bench.mover.start_scan(found, finished.set)
        await asyncio.wait_for(finished.wait(), 20)
        assert len(taken) == 1000
        assert max(ahead) <= 6


@run
async def test_reads_and_writes_go_on_while_a_scan_hangs_and_close_still_ends():
    bench = Bench()
    hold = bench.backend.hold("scan")
    bench.mover.start_scan(lambda _: None, lambda: None)
    await entered(hold)
    bench.mover.submit(Write(1, "ram", at(1)))
    assert statuses(await bench.outcomes(1)) == [Status.OK]
    assert await bench.mover.close(0.05) is False
    hold.release()


@pytest.mark.parametrize("kind", [Write, Read])
def test_only_the_affected_blocks_of_a_batch_fail(kind):
    """L61: the others are stored or loaded, the memory of failed ones is untouched."""

    async def main():
        async with Bench() as bench:
            bench.fill(range(8))
            if kind is Read:
                bench.mover.submit(Write(1, "ram", at(*range(8))))
                await bench.outcomes(1)
            bench.pool[:] = b"\xaa" * len(bench.pool)
            name = "read" if kind is Read else "write"
            bench.backend.fail(name, ids=[block(n).id for n in range(2, 8)])
            bench.mover.submit(kind(2, "ram", at(*range(8))))
            assert statuses(await bench.outcomes(2)) == [Status.OK] * 2 + [Status.FAILED] * 6
            if kind is Read:
                assert bytes(bench.view(1, SIZE)) == payload(1, SIZE)
                assert bytes(bench.view(2, SIZE)) == b"\xaa" * SIZE

    asyncio.run(main())

"""Storage that cannot be used at a start: told at once, tried again, never waited for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from kvtierd.edges import aside, opening
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.edges.opening import Opening, Openings
from kvtierd.errors import TierError, TierRefused, TierTaken
from kvtierd.testing.faults import FaultyBackend
from kvtierd.testing.mover_bench import entered, run


class Told:
    """What was told of a tier, and a wait for more of it."""

    def __init__(self):
        self.states = []
        self._changed = asyncio.Event()

    def __call__(self, tier, reason, stalled):
        self.states.append((reason, stalled))
        self._changed.set()

    async def wait_for(self, state):
        async with asyncio.timeout(20):
            while state not in self.states:
                self._changed.clear()
                await self._changed.wait()


def bring_up(*, held=False, deadline=30.0):
    backend = FaultyBackend(MemoryBackend("ram"))
    loop = asyncio.get_running_loop()
    one = Opening("ram", backend, loop, lambda: held, deadline, first_pause=0.01)
    return backend, one, Openings({"ram": one})


@run
async def test_usable_storage_is_open_when_the_start_goes_on():
    _, _, openings = bring_up()
    openings.start()
    await openings.settle()
    assert openings.is_open("ram")
    assert openings.fresh
    told = Told()
    openings.follow(told)
    assert told.states == [("", False)]
    openings.close()


@pytest.mark.parametrize("error", [TierError("ram", "no permission"), OSError(5, "no permission")])
@run
async def test_storage_that_cannot_be_used_is_tried_again_until_it_can(error):
    backend, _, openings = bring_up(held=True)
    backend.raises("open", error, times=3)
    openings.start()
    await openings.settle()
    assert not openings.is_open("ram")
    assert not openings.fresh
    told = Told()
    openings.follow(told)
    assert "no permission" in told.states[0][0]
    assert "tier 'ram'" not in told.states[0][0], "who it is about is known"
    await told.wait_for(("", False))
    assert openings.is_open("ram")
    assert len(backend.calls) == 4
    openings.close()


@run
async def test_what_waiting_does_not_mend_ends_the_start():
    backend, _, openings = bring_up()
    backend.raises("open", TierRefused("ram", "give it a key"))
    openings.start()
    with pytest.raises(TierRefused, match="give it a key"):
        await openings.settle()
    openings.close()


@run
async def test_another_daemon_that_is_ending_is_waited_for():
    backend, _, openings = bring_up()
    backend.raises("open", TierTaken("ram", "in use"), times=5)
    openings.start()
    await openings.settle()
    assert openings.is_open("ram")
    openings.close()


@run
async def test_another_daemon_that_stays_ends_the_start(monkeypatch):
    monkeypatch.setattr(opening, "TAKEN_PATIENCE", 0.1)
    backend, _, openings = bring_up()
    backend.raises("open", TierTaken("ram", "in use by process 7"))
    openings.start()
    with pytest.raises(TierTaken, match="process 7"):
        await openings.settle()
    openings.close()


@run
async def test_storage_that_does_not_answer_delays_nothing_and_is_used_when_it_does(monkeypatch):
    monkeypatch.setattr(opening, "PATIENCE", 0.05)
    backend, _, openings = bring_up(deadline=0.1)
    hold = backend.hold("open")
    openings.start()
    await entered(hold)
    await openings.settle()
    assert not openings.is_open("ram")
    told = Told()
    openings.follow(told)
    assert told.states == [("its storage does not answer", True)]
    await told.wait_for(("making its storage usable takes longer than 0.1 s", True))
    hold.release()
    await told.wait_for(("", False))
    openings.close()


@run
async def test_the_end_does_not_wait_for_storage_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(opening, "PATIENCE", 0.05)
    backend, _, openings = bring_up()
    hold = backend.hold("open")
    openings.start()
    await entered(hold)
    await openings.settle()
    began = time.monotonic()
    openings.close()
    assert time.monotonic() - began < 0.5
    hold.release()


class ClosesNever(MemoryBackend):
    def __init__(self):
        super().__init__("ram")
        self.hold = FaultyBackend(self).hold("open")

    def close(self):
        self.hold.pass_through()


@run
async def test_storage_that_does_not_close_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.05)
    backend = ClosesNever()
    one = Opening("ram", backend, asyncio.get_running_loop(), lambda: False, 30.0)
    openings = Openings({"ram": one})
    openings.start()
    await openings.settle()
    openings.close()
    assert "did not close" in caplog.text
    backend.hold.release()


STUCK = """
import asyncio, os, sys
from kvtierd.edges.aside import DaemonThreads

async def main():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonThreads())
    assert await loop.run_in_executor(None, sum, (1, 2)) == 3
    try:
        async with asyncio.timeout(0.1):
            await loop.run_in_executor(None, os.read, int(sys.argv[1]), 1)
    except TimeoutError:
        print("went on", flush=True)

asyncio.run(main())
"""


def test_a_call_that_never_returns_keeps_no_process_alive():
    """asyncio and the interpreter join the threads of an ordinary executor: that would be for ever."""
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", STUCK, str(reading)],
            pass_fds=[reading],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert done.stdout == "went on\n"


def test_a_call_in_a_thread_raises_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        aside.DaemonThreads().submit(lambda: 1 / 0).result(20)

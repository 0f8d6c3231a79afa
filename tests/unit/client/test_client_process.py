"""Threads, tasks, forks and process death: what belongs to a process stays with it."""

import asyncio
import os
import signal
import threading
import time

import pytest

from kvtierd.client import AsyncClient, Client, KeyState, block_key
from kvtierd.client._mapping import process_token
from kvtierd.core import stimuli

A = block_key(b"a" * 8)


def in_child(work):
    """Run in a forked child; returns its exit status (0: ``work`` gave something true)."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_a_forked_child_has_its_own_connection_and_the_parents_stays(daemon, socket_path, layout):
    with Client(socket_path, deadline=5.0) as client:
        s = client.attach(layout, engine_id="e0")
        job = s.prepare_store([A])

        def child():
            return job.commit() == () and s.lookup([A]).reason == "" and s.epoch == 2 and s.poll() is None

        assert in_child(child) == 0
        assert s.epoch == 1
        assert s.lookup([A]).states == (KeyState.MISS,)
        assert job.commit() == (A,)
        first, second = daemon.of_type(stimuli.Attach)
        assert first.process != second.process
        assert len(first.process) == len(second.process) == 16


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_a_forked_child_of_the_async_client_leaves_the_parents_loop_alone(daemon, socket_path, layout):
    async def parent():
        async with AsyncClient(socket_path, deadline=5.0) as client:
            s = await client.attach(layout, engine_id="e0")
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                asyncio._set_running_loop(None)
                status = 1
                try:
                    status = 0 if asyncio.run(s.lookup([A])).reason == "" and s.epoch == 2 else 2
                finally:
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # noqa: ASYNC222 - it has an alarm
            return status, (await s.lookup([A])).reason, s.epoch

    assert asyncio.run(parent()) == (0, "", 1)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_the_liveness_descriptor_outlives_the_session_and_ends_with_the_process(
    daemon, socket_path, layout, wait_for
):
    ready_r, ready_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the test runner's would raise in here
        signal.alarm(20)
        try:
            client = Client(socket_path, deadline=5.0)
            held = client.attach(layout, engine_id="e0").pool  # it ends with the last view of the mapping
            client.close()
            os.write(ready_w, b"x" if held is not None else b"-")
            signal.pause()
        finally:
            os._exit(0)
    os.read(ready_r, 1)
    assert wait_for(lambda: not daemon.connections)
    assert not daemon.liveness_hung_up()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert wait_for(daemon.liveness_hung_up)
    os.close(ready_r)
    os.close(ready_w)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_each_process_has_its_own_token():
    token = process_token()
    assert process_token() == token
    assert in_child(lambda: process_token() != token and process_token() == process_token()) == 0


def test_threads_share_a_blocking_session(daemon, socket_path, layout):
    with Client(socket_path, deadline=10.0) as client:
        s = client.attach(layout, engine_id="e0")
        wrong = []

        def work(number):
            for turn in range(50):
                keys = [block_key(bytes([number, turn])), block_key(b"other")]
                if len(s.lookup(keys[: 1 + turn % 2]).states) != 1 + turn % 2:
                    wrong.append(turn)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(daemon.of_type(stimuli.Lookup)) == 200


def test_async_requests_overtake_one_that_waits(daemon, socket_path, layout):
    async def main():
        async with AsyncClient(socket_path, deadline=10.0) as client:
            s = await client.attach(layout, engine_id="e0")
            daemon.mute = {stimuli.Load}
            slow = asyncio.create_task(s.load([A], deadline=5.0))
            answers = await asyncio.gather(*(s.lookup([A] * n) for n in range(1, 200)))
            assert [len(answer.states) for answer in answers] == list(range(1, 200))
            assert not slow.done()
            daemon.answer_late()
            return (await slow).reason

    assert asyncio.run(main()) == ""


def test_a_cancelled_verb_gives_back_what_its_answer_hands_out(daemon, socket_path, layout, wait_for):
    async def main():
        async with AsyncClient(socket_path, deadline=10.0) as client:
            s = await client.attach(layout, engine_id="e0")
            daemon.mute = {stimuli.PrepareStore}
            store = asyncio.create_task(s.prepare_store([A]))
            await s.lookup([A])  # by now the store was sent
            store.cancel()
            with pytest.raises(asyncio.CancelledError):
                await store
            daemon.answer_late()
            until = time.monotonic() + 5
            while not daemon.of_type(stimuli.Abort) and time.monotonic() < until:
                await s.lookup([A])
            return daemon.jobs

    assert asyncio.run(main()) == {}


def test_an_async_session_comes_back_by_itself(daemon, socket_path, layout):
    async def main():
        async with AsyncClient(socket_path, deadline=5.0) as client:
            s = await client.attach(layout, engine_id="e0")
            daemon.drop_connections()
            async with asyncio.timeout(5):
                while s.epoch < 2:  # noqa: ASYNC110 - no verb is called
                    await asyncio.sleep(0)
            return s.connected

    assert asyncio.run(main())


def test_an_async_session_may_move_to_another_loop(daemon, socket_path, layout):
    client = AsyncClient(socket_path, deadline=5.0)

    async def first():
        return await client.attach(layout, engine_id="e0")

    async def second():
        found = await s.lookup([A])
        await client.close()
        return found.reason, s.epoch

    s = asyncio.run(first())
    assert asyncio.run(second()) == ("", 2)

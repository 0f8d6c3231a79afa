"""Audiences that come, go and change while the daemon runs: nobody else notices, and no reader goes wrong."""

import asyncio
import socket

import pytest

from kvtierd.config.audiences import Audience, Events
from kvtierd.errors import ConfigError
from kvtierd.testing.clock import until
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.testing.hub_rig import DISK, TCP, event, folded, gone, of, run, serving
from kvtierd.testing.local_daemon import free_port


def audience(index, **settings):
    return Audience.model_validate(
        {"name": f"a{index}", "bind": TCP, "replay": TCP, **settings}, strict=False
    )


def events_with(*audiences):
    return Events.model_construct(
        audiences=audiences, heartbeat=0.05, ring_batches=1000, ring_bytes=1 << 30, model="m"
    )


def test_a_new_audience_has_all_that_is_there_and_the_old_one_is_not_touched(tmp_path):
    async def main():
        async with serving(tmp_path, {}, heartbeat=0.05) as hub:
            known = [event(number) for number in range(5)] + [event(1, **DISK)]
            hub.publish(known)
            before = of(hub)
            await hub.change(events_with(audience(0), audience(1, media=["STORAGE"])), lambda: known)
            assert of(hub)["bind"] == before["bind"], "its sockets are the same"
            hub.publish([event(7), event(7, **DISK)])
            assert {entry.medium for entry in await folded(hub, 1)} == {"STORAGE"}
            assert len(await folded(hub, 1)) == 2
            assert len(await folded(hub, 0)) == 8

    run(main)


def test_what_is_told_while_audiences_change_reaches_the_new_ones(tmp_path):
    async def main():
        async with serving(tmp_path, {}, heartbeat=0.05) as hub:
            there = {1: event(1)}
            hub.publish([event(1)])
            change = asyncio.ensure_future(
                hub.change(events_with(audience(0), audience(1)), lambda: list(there.values()))
            )
            number = 2
            while not change.done():
                there[number] = event(number)
                hub.publish([event(number)])
                if number % 3 == 0:
                    del there[number - 1]
                    hub.publish([gone(number - 1)])
                number += 1
                await asyncio.sleep(0.01)
            await change
            assert await folded(hub, 1) == await folded(hub, 0)

    run(main)


def test_an_audience_that_goes_closes_its_sockets_and_one_that_shared_its_stream_goes_on(tmp_path):
    async def main():
        async with serving(tmp_path, {}, {}, heartbeat=0.05) as hub:
            hub.publish([event(1)])
            assert len(hub._publishers) == 1
            await hub.change(events_with(audience(0)), lambda: [event(1)])
            hub.publish([event(2)])
            assert list(hub.statistics()["audiences"]) == ["a0"]
            assert len(await folded(hub)) == 2
            await hub.change(events_with(audience(0), audience(1)), lambda: [event(1), event(2)])
            assert await folded(hub, 1) == await folded(hub, 0)

    run(main)


def test_a_reader_of_an_audience_that_changes_its_view_hears_the_difference(tmp_path):
    """On the same port; it does nothing but stay subscribed, and asks for what it missed."""
    places = {"bind": f"tcp://127.0.0.1:{free_port()}", "replay": f"tcp://127.0.0.1:{free_port()}"}

    async def main():
        async with serving(tmp_path, places, heartbeat=0.05) as hub:
            reader = ReferenceConsumer()

            def heard(count, *media):
                reader.poll(0.0)
                return (len(reader.resident), {entry.medium for entry in reader.resident}) == (
                    count,
                    {*media},
                )

            reader.connect(places["bind"], places["replay"])
            await until(lambda: of(hub)["subscribers"] == 1)
            known = [event(1), event(2), event(1, **DISK)]
            hub.publish(known)
            await until(lambda: heard(3, "CPU", "STORAGE"))
            changed = audience(0, **places, media=["STORAGE"])
            await hub.change(events_with(changed), lambda: known)
            await until(lambda: heard(1, "STORAGE"))
            hub.publish([event(2, **DISK)])
            await until(lambda: heard(2, "STORAGE"))
            reader.close()

    run(main)


def test_an_address_that_is_taken_leaves_the_audiences_of_before(tmp_path):
    async def main():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            async with serving(tmp_path, {}, {"topic": "x"}, heartbeat=0.05) as hub:
                hub.publish([event(1)])
                wanted = events_with(audience(0), audience(1, bind=where))
                with pytest.raises(ConfigError, match="a1"):
                    await hub.change(wanted, lambda: [event(1)])
                hub.publish([event(2)])
                assert of(hub, 1)["topic"] == "x"
                assert len(await folded(hub, 1)) == len(await folded(hub, 0)) == 2

    run(main)

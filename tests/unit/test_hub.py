"""Several audiences on one daemon: what they share, what each hears, and their sockets."""

import asyncio
import json

import pytest
import zmq

from kvtierd.core.model import Medium
from kvtierd.errors import ConfigError
from kvtierd.testing.clock import until
from kvtierd.testing.hub_rig import DISK, TCP, H, event, events_of, folded, gone, of, replayed, run, serving
from kvtierd.wire.kvevents import BlockStored, decode_batch


def test_audiences_of_one_view_share_numbers_and_bytes_each_under_its_own_topic(tmp_path):
    """L17: also when replayed."""

    async def main():
        topics = [{"topic": ""}, {"topic": "kv@{pod_ip}@{model}"}]
        async with serving(tmp_path, *topics) as hub:
            for number in range(5):
                hub.publish([event(number)])
            first, second = [await replayed(of(hub, i)["replay"]) for i in range(2)]
            assert [reply[1:] for reply in first] == [reply[1:] for reply in second]
            assert {reply[0] for reply in first} == {b""}
            assert {reply[0] for reply in second} == {b"kv@10.0.0.1@m"}
            assert len(hub._publishers) == 1

    run(main)


def test_each_view_has_numbers_of_its_own_without_a_hole(tmp_path):
    async def main():
        async with serving(tmp_path, {}, {"media": ["STORAGE"]}, {"form": "array"}) as hub:
            for number in range(6):
                hub.publish([event(number), *([event(number, **DISK)] if number % 3 == 0 else [])])
            counts = [len(await replayed(of(hub, i)["replay"])) for i in range(3)]
            assert counts == [6, 2, 6]
            assert {entry.medium for entry in await folded(hub, 1)} == {"STORAGE"}
            assert {entry.locality for entry in await folded(hub, 2)} == {None}

    run(main)


def test_an_audience_without_removals_never_hears_one_and_late_joiners_hear_what_is_there(tmp_path):
    async def main():
        async with serving(tmp_path, {"removals": False}, ring_batches=2) as hub:
            for number in range(20):
                hub.publish([event(number), *([gone(number - 5)] if number >= 5 else [])])
            hub.publish([gone(17)])
            for number in (50, 51, 52):
                hub.publish([event(number)])
            told = await events_of(hub)
            assert {type(one) for one in told} == {BlockStored}
            assert {h for one in told for h in one.block_hashes} == {
                H + n for n in (15, 16, 18, 19, 50, 51, 52)
            }
            hub.publish([event(17)])
            assert (await events_of(hub))[-1].block_hashes == (H + 17,), "announced again when it is back"

    run(main)


def test_many_removals_that_nobody_hears_do_not_pile_up(tmp_path):
    async def main():
        async with serving(tmp_path, {"removals": False}, ring_batches=2) as hub:
            for at in range(0, 40_000, 1000):
                hub.publish([event(n) for n in range(at, at + 1000)])
            for at in range(0, 40_000, 1000):
                hub.publish([gone(n) for n in range(at, at + 1000)])
            assert len(hub._publishers[0]._held) < 1 << 14

    run(main)


def test_media_have_the_names_that_the_audience_knows(tmp_path):
    async def main():
        async with serving(tmp_path, {"preset": "vllm-0.26"}) as hub:
            lake = {"tier": "lake", "medium": Medium.STORAGE}
            hub.publish([event(1), event(1, **DISK), event(1, **lake)])
            hub.publish([gone(1, **DISK)])
            assert [one.medium for one in await events_of(hub)] == ["CPU", "FS", "OBJ", "FS"]
            assert of(hub)["tiers"] == {"cpu": "CPU", "disk": "FS", "lake": "OBJ"}

    run(main)


def test_chains_travel_in_one_event_where_the_audience_takes_that(tmp_path):
    async def main():
        async with serving(tmp_path, {"one_block_per_event": False}, {}) as hub:
            hub.publish([event(n) for n in (1, 2, 3, 7, 8)] + [event(3, **DISK)])
            hub.publish([gone(8), gone(7)])
            packed, single = [await events_of(hub, i) for i in range(2)]
            assert [len(one.block_hashes) for one in packed] == [3, 2, 1, 2]
            assert packed[0].token_ids == (1, 2, 3, 4, 2, 2, 3, 4, 3, 2, 3, 4)
            assert packed[0].parent_block_hash == H
            assert {len(one.block_hashes) for one in single} == {1}
            assert await folded(hub, 0) == await folded(hub, 1)

    run(main)


# -- sockets


def test_an_audience_that_connects_reaches_a_router_that_binds(tmp_path):
    async def main():
        context = zmq.Context()
        sub = context.socket(zmq.SUB)
        sub.bind(TCP)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        endpoint = sub.getsockopt_string(zmq.LAST_ENDPOINT)
        settings = {"preset": "llm-d", "bind": None, "connect": endpoint, "coalesce": None}
        async with serving(tmp_path, settings, heartbeat=0.01) as hub:
            await until(lambda: sub.poll(0))
            hub.publish([event(1)])
            frames = sub.recv_multipart()
            while not decode_batch(frames[2]).events:
                await until(lambda: sub.poll(0))
                frames = sub.recv_multipart()
            assert frames[0] == b"kv@10.0.0.1:8000@m"
            assert len(await folded(hub)) == 1
        context.destroy(linger=0)

    run(main)


def test_real_endpoints_are_in_the_status_and_in_a_file(tmp_path):
    """L116: port 0."""

    async def main():
        async with serving(tmp_path, {}, {"topic": "kv@{pod_ip}@{model}"}) as hub:
            found = json.loads((tmp_path / "events.json").read_text())
            assert found["a1"]["topic"] == "kv@10.0.0.1@m"
            for index in range(2):
                assert found[f"a{index}"]["bind"] == of(hub, index)["bind"] != TCP
            assert hub.bound_endpoints()["bind"] == found["a0"]["bind"]
        assert not (tmp_path / "events.json").exists()

    run(main)


def test_one_endpoint_in_use_leaves_no_other_bound(tmp_path):
    async def main():
        async with serving(tmp_path, {}) as hub:
            taken = of(hub)["bind"]
            ends = [{"bind": f"ipc://{tmp_path}/p"}, {"bind": taken}]
            with pytest.raises(ConfigError, match=r"'a1'.*bind.*Address already in use"):
                async with serving(tmp_path, *ends):
                    pass

    run(main)


def test_changes_wait_for_others_only_as_long_as_the_audience_allows(tmp_path):
    async def main():
        async with serving(tmp_path, {"coalesce": "50ms"}, {}) as hub:
            for number in range(50):
                hub.publish([event(number)])
                await asyncio.sleep(0)
            assert of(hub, 1)["batches"] == 50
            await until(lambda: of(hub)["events"] == 50)
            assert of(hub)["batches"] < 10
            assert await folded(hub) == await folded(hub, 1)

    run(main)

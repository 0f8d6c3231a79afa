"""The publisher and its replay dialogue over real sockets on loopback and ipc."""

import asyncio
import os
import stat
import struct
import time
from contextlib import asynccontextmanager

import pytest
import zmq

from kvtierd.config.audiences import Audience, Events
from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    block_key,
)
from kvtierd.edges import replay as replay_module
from kvtierd.edges.hub import EventHub
from kvtierd.edges.sequence import SequenceStore
from kvtierd.errors import ConfigError
from kvtierd.testing.clock import until
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.testing.hub_rig import run
from kvtierd.wire.kvevents import decode_batch
from kvtierd.wire.stream import END, encode_sequence

H = 0xF100000000000000
TCP = "tcp://127.0.0.1:0"


def event(number, kind=EventKind.STORED, tier="cpu", medium=Medium.CPU, locality=None, tokens=4):
    parent = H + number - 1 if number % 100 else None
    meta = BlockMeta(hashes=(H + number,), parent=parent, token_ids=tuple(range(tokens)), block_size=tokens)
    block = Block.of(BlockId("ns", block_key(number.to_bytes(8, "big"))), 4096, meta)
    return TierEvent(kind, tier, medium, locality, block)


@asynccontextmanager
async def publishing(tmp_path, *, scheme="tcp", grace=5.0, settings=None, **options):
    binds = {"bind": TCP, "replay": TCP}
    if scheme == "ipc":
        binds = {"bind": f"ipc://{tmp_path}/p", "replay": f"ipc://{tmp_path}/r"}
    audience = Audience(**{"name": "default", **binds, **(settings or {})})
    hub = hub_of(tmp_path, audience, **options)
    hub.start(asyncio.get_running_loop())
    try:
        yield hub
    finally:
        await hub.close(grace)


def hub_of(tmp_path, *audiences, heartbeat=0.0, **options):
    """A hub as the daemon makes it; ``heartbeat`` 0 (none) is not to be had from a tier file."""
    limits = {"ring_batches": 1000, "ring_bytes": 1 << 30, **options}
    events = Events.model_construct(
        enabled=True, audiences=audiences, model="m", heartbeat=heartbeat, **limits
    )
    return EventHub(
        events, tiers={"cpu": "cpu", "disk": "fs"}, state_dir=tmp_path, clock=time.time, environ={}
    )


@asynccontextmanager
async def sockets():
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


async def subscribed(publisher, *consumers, probe=10_000_000):
    """Publish until every consumer hears it: a PUB socket sends nothing to who is not there yet."""
    async with asyncio.timeout(10):
        while not all(c.counts["batches"] for c in consumers):
            publisher.publish([event(probe)])
            publisher.publish([event(probe, EventKind.REMOVED)])
            await asyncio.sleep(0.002)
            for consumer in consumers:
                consumer.poll()


async def caught_up(consumer, publisher):
    last = publisher.statistics()["sequence"]
    await until(lambda: (consumer.poll(), consumer.expected == last + 1)[1])


def following(publisher):
    consumer = ReferenceConsumer()
    ends = publisher.bound_endpoints()
    consumer.connect(ends["bind"], ends["replay"])
    return consumer


async def replayed(context, endpoint, start, kind=zmq.DEALER):
    """The raw replies to one request, end marker included."""
    dealer = context.socket(kind)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", encode_sequence(start)] if kind == zmq.DEALER else [encode_sequence(start)])
    replies = []
    while not replies or replies[-1][-2] != END:
        await until(lambda: dealer.poll(0), "a reply")
        replies.append(dealer.recv_multipart())
        if kind == zmq.REQ:
            break
    dealer.close(linger=0)
    return replies


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_replay_has_the_live_frames_byte_for_byte_and_then_the_end_marker(tmp_path, scheme):
    """L17, L24: topic, number and payload; a repeated request gives the same bytes."""

    async def main():
        settings = {"topic": "kv@pod@model"}
        async with publishing(tmp_path, scheme=scheme, settings=settings) as publisher, sockets() as context:
            ends = publisher.bound_endpoints()
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
            sub.connect(ends["bind"])
            live = []
            number = 0
            async with asyncio.timeout(10):
                while len(live) < 20:
                    publisher.publish([event(number)])
                    number += 1
                    await asyncio.sleep(0.001)
                    while sub.poll(0):
                        live.append(sub.recv_multipart())
            first = struct.unpack(">Q", live[0][1])[0]
            assert [frames[1] for frames in live] == [encode_sequence(first + i) for i in range(len(live))]
            replies = await replayed(context, ends["replay"], first)
            assert [reply[0] for reply in replies] == [b""] * len(replies)
            assert [reply[1:] for reply in replies[: len(live)]] == live
            assert {reply[1] for reply in replies[:-1]} == {b"kv@pod@model"}
            assert replies[-1] == [b"", b"", END, b""]
            assert await replayed(context, ends["replay"], first) == replies
            assert await replayed(context, ends["replay"], 1 << 62) == [[b"", b"", END, b""]]

    run(main)


def test_a_req_client_gets_its_first_reply(tmp_path):
    async def main():
        async with publishing(tmp_path) as publisher, sockets() as context:
            publisher.publish([event(1)])
            ((topic, number, payload),) = await replayed(
                context, publisher.bound_endpoints()["replay"], 0, zmq.REQ
            )
            assert (topic, number) == (b"", encode_sequence(0))
            assert decode_batch(payload).events[0].block_hashes == (H + 1,)

    run(main)


@pytest.mark.parametrize(
    "request_frames",
    [
        [b""],
        [b"", b""],
        [b"", b"1234567"],
        [b"", b"x" * 9],
        [b"y", b"x" * 8],
        [b"", b"x" * 8, b""],
        [b"x" * 8],
    ],
)
def test_a_malformed_request_is_ignored_and_counted(tmp_path, request_frames):
    """L24."""

    async def main():
        async with publishing(tmp_path) as publisher, sockets() as context:
            publisher.publish([event(1)])
            dealer = context.socket(zmq.DEALER)
            dealer.connect(publisher.bound_endpoints()["replay"])
            dealer.send_multipart(request_frames)
            await until(lambda: publisher.statistics()["replay_malformed"] == 1)
            assert len(await replayed(context, publisher.bound_endpoints()["replay"], 0)) == 2
            assert not dealer.poll(0)

    run(main)


def test_one_store_and_then_silence_is_out_within_100_ms(tmp_path):
    """L26: nothing waits for the next turn."""

    async def main():
        async with publishing(tmp_path) as publisher:
            with following(publisher) as consumer:
                await subscribed(publisher, consumer)
                await caught_up(consumer, publisher)
                waits = []
                for number in range(5):
                    begin = time.monotonic()
                    publisher.publish([event(number)])
                    await until(lambda: (consumer.poll(), len(consumer.resident) > len(waits))[1])
                    waits.append(time.monotonic() - begin)
                assert min(waits) < 0.1

    run(main)


def test_a_late_joiner_of_a_silent_stream_catches_up_by_the_heartbeat(tmp_path):
    """L22 in small: the ring has wrapped, and nothing new happens."""

    async def main():
        async with publishing(tmp_path, heartbeat=0.05, ring_batches=5) as publisher:
            for number in range(100):
                publisher.publish([event(number)])
            publisher.publish([event(99, EventKind.REMOVED)])
            with following(publisher) as consumer:
                await until(lambda: (consumer.poll(), consumer.counts["replays"])[1])
                await caught_up(consumer, publisher)
                assert {entry.hash for entry in consumer.resident} == {H + n for n in range(99)}
            assert publisher.statistics()["heartbeats"] >= 1

    run(main)


def test_lost_messages_are_replayed_and_the_state_is_exact(tmp_path):
    """L18: a proxy that drops 1 % between publisher and consumer."""

    async def main():
        async with publishing(tmp_path, ring_batches=200) as publisher, sockets() as context:
            ends = publisher.bound_endpoints()
            sub, pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(ends["bind"])
            pub.bind(TCP)
            consumer = ReferenceConsumer()
            consumer.connect(pub.getsockopt_string(zmq.LAST_ENDPOINT), ends["replay"])
            passed = 0

            def forward():
                nonlocal passed
                while sub.poll(0):
                    frames = sub.recv_multipart()
                    passed += 1
                    if passed % 100:
                        pub.send_multipart(frames)
                consumer.poll()
                return consumer.counts["batches"]

            async with asyncio.timeout(10):
                while not forward():
                    publisher.publish([event(10_000_000 + publisher.statistics()["batches"])])
                    await asyncio.sleep(0.001)
            for number in range(3000):
                gone = [event(number - 50, EventKind.REMOVED)] if number > 50 else []
                publisher.publish([event(number), *gone])
                if number % 10 == 0:
                    forward()
                    await asyncio.sleep(0)
            publisher.publish([event(5000)])
            last = publisher.statistics()["sequence"]
            while passed % 100 in (98, 99):  # the last one must not be the one that is dropped
                publisher.publish([event(5000 + passed)])
                last = publisher.statistics()["sequence"]
                passed += 1
            await until(lambda: (forward(), consumer.expected == last + 1)[1])
            assert len(consumer.resident) == publisher.statistics()["announced"]
            assert consumer.counts["gaps"] >= 10
            assert consumer.counts["resets"] == 0
            consumer.close()

    run(main)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_close_lets_everything_queued_out(tmp_path, scheme):
    """L28: 500 events queued, then the end."""

    async def main():
        async with publishing(tmp_path, scheme=scheme) as publisher:
            consumer = following(publisher)
            await subscribed(publisher, consumer)
            await caught_up(consumer, publisher)
            for number in range(500):
                publisher.publish([event(number)])
            last = publisher.statistics()["sequence"]
            await publisher.close(5.0)
            publisher.publish([event(600)])
            assert publisher.statistics()["after_close"] == 1
        consumer.wait_for(lambda c: c.expected == last + 1, what="all 500")
        consumer.close()
        assert len(consumer.resident) == 500
        assert not consumer.counts["gaps"]

    run(main)


def test_close_ends_within_its_grace_whoever_is_connected(tmp_path):
    """L29: a subscriber that never reads and a replay client that went silent."""

    async def main():
        async with publishing(tmp_path, settings={"hwm": 10}) as publisher, sockets() as context:
            ends = publisher.bound_endpoints()
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.RCVHWM, 1)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(ends["bind"])
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.connect(ends["replay"])
            for number in range(900):
                publisher.publish([event(number, tokens=20_000)])
            dealer.send_multipart([b"", encode_sequence(0)])
            await until(lambda: publisher.statistics()["replay_batches"] > 50)
            await until(lambda: publisher.statistics()["replays_active"] == 1)
            begin = time.monotonic()
            await publisher.close(1.0)
            assert time.monotonic() - begin < 2.0
            assert publisher.statistics()["replays_abandoned"] == 1

    run(main)


def test_publishing_goes_on_while_a_large_replay_runs(tmp_path):
    """L22: no slice of a replay holds the loop for long; the client gets all of it in the end."""

    async def main():
        async with publishing(tmp_path, ring_batches=10) as publisher, sockets() as context:
            for at in range(0, 30_000, 300):
                publisher.publish([event(n) for n in range(at, at + 300)])
            task = asyncio.create_task(replayed(context, publisher.bound_endpoints()["replay"], 0))
            await until(lambda: publisher.statistics()["replays_active"])
            turns, most, before = 0, 0, publisher.statistics()["replay_batches"]
            while not task.done():
                publisher.publish([event(100_000 + turns)])
                await asyncio.sleep(0)
                now = publisher.statistics()["replay_batches"]
                most, before = max(most, now - before), now
                turns += 1
            replies = await task
            assert turns > 5
            smallest = min(len(reply[-1]) for reply in replies[:-1])
            assert (most - 1) * smallest < replay_module.SLICE_BYTES
            stored = sum(len(decode_batch(reply[-1]).events) for reply in replies[:-1])
            assert stored == 30_000
            assert publisher.statistics()["replays_done"] == 1

    run(main)


def test_a_client_that_stops_reading_is_given_up_and_hinders_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_module, "STALLED", 0.2)

    async def main():
        async with publishing(tmp_path) as publisher, sockets() as context:
            for number in range(900):
                publisher.publish([event(number, tokens=20_000)])
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.connect(publisher.bound_endpoints()["replay"])
            dealer.send_multipart([b"", encode_sequence(0)])
            await until(lambda: publisher.statistics()["replay_batches"] > 50)
            assert len(await replayed(context, publisher.bound_endpoints()["replay"], 890)) == 11
            await until(lambda: publisher.statistics()["replays_abandoned"] == 1)

    run(main)


def test_many_requests_of_one_client_are_answered_one_after_the_other(tmp_path):
    async def main():
        async with publishing(tmp_path) as publisher, sockets() as context:
            for number in range(300):
                publisher.publish([event(number)])
            dealer = context.socket(zmq.DEALER)
            dealer.connect(publisher.bound_endpoints()["replay"])
            for _ in range(5):
                dealer.send_multipart([b"", encode_sequence(0)])
            numbers = []
            async with asyncio.timeout(10):
                while numbers.count(END) < 5:
                    await until(lambda: dealer.poll(0), "a reply")
                    numbers.append(dealer.recv_multipart()[-2])
            assert numbers == [*[encode_sequence(n) for n in range(300)], END] * 5

    run(main)


def test_an_audience_filter_costs_no_batches_and_no_numbers(tmp_path):
    async def main():
        async with publishing(tmp_path, settings={"media": ["CPU"]}) as publisher, sockets() as context:
            on_disk = {"tier": "disk", "medium": Medium.STORAGE, "locality": Locality.LOCAL}
            publisher.publish([event(1)])
            publisher.publish([event(1, **on_disk)])
            publisher.publish([])
            publisher.publish([event(1, EventKind.REMOVED)])
            replies = await replayed(context, publisher.bound_endpoints()["replay"], 0)
            assert [len(decode_batch(reply[-1]).events) for reply in replies[:-1]] == [1, 1]

    run(main)


def test_the_array_form_is_sent_where_the_audience_asks_for_it(tmp_path):
    async def main():
        async with publishing(tmp_path, settings={"form": "array"}) as publisher, sockets() as context:
            publisher.publish([event(1)])
            replies = await replayed(context, publisher.bound_endpoints()["replay"], 0)
            assert b"\x9c\xabBlockStored" in replies[0][-1]

    run(main)


def test_numbers_go_on_after_an_orderly_close_and_after_a_crash_they_only_rise(tmp_path):
    async def main():
        for _ in range(2):
            async with publishing(tmp_path) as publisher:
                publisher.publish([event(1)])
        assert publisher.statistics()["sequence"] == 1
        crashed = SequenceStore(tmp_path, wall_clock=time.time)
        assert crashed.next() == 2
        async with publishing(tmp_path) as publisher, sockets() as context:
            publisher.publish([event(1)])
            assert publisher.statistics()["sequence"] == 3
            replay = publisher.bound_endpoints()["replay"]
            assert [int.from_bytes(r[2], "big") for r in await replayed(context, replay, 3)] == [
                3,
                (1 << 64) - 1,
            ]
            behind = await replayed(context, replay, 2)
            assert int.from_bytes(behind[0][2], "big") == 3, "what it missed is not known: it has to see that"

    run(main)


def test_after_the_end_of_the_machine_unused_numbers_are_skipped_and_empty(tmp_path):
    async def main():
        async with publishing(tmp_path) as publisher:
            publisher.publish([event(1)])
        crashed = SequenceStore(tmp_path, wall_clock=time.time)
        assert crashed.next() == 1
        (tmp_path / "next-sequence-default").unlink()
        async with publishing(tmp_path) as publisher, sockets() as context:
            publisher.publish([event(1)])
            assert publisher.statistics()["sequence"] == 1 + (1 << 13)
            replies = await replayed(context, publisher.bound_endpoints()["replay"], 0)
            assert len(replies) == 3 + (1 << 13)

    run(main)


def test_an_ipc_endpoint_is_private_to_the_pods_group(tmp_path):
    async def main():
        async with publishing(tmp_path, scheme="ipc") as publisher:
            for endpoint in publisher.bound_endpoints().values():
                mode = os.stat(endpoint.removeprefix("ipc://")).st_mode
                assert stat.S_IMODE(mode) == 0o660

    run(main)


def test_an_endpoint_in_use_is_refused_with_its_name(tmp_path):
    async def main():
        async with publishing(tmp_path) as publisher:
            taken = {"bind": publisher.bound_endpoints()["bind"]}
            with pytest.raises(ConfigError, match=r"'default'.*bind.*Address already in use"):
                async with publishing(tmp_path, settings=taken):
                    pass

    run(main)

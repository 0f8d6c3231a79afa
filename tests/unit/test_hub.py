"""Several audiences on one daemon: what they share, what each hears, and what readers end with."""

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager

import pytest
import uvloop
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
from kvtierd.errors import ConfigError
from kvtierd.testing.consumer import ReferenceConsumer, Residency
from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvtierd.wire.stream import END, encode_sequence

H = 0xF100000000000000
TCP = "tcp://127.0.0.1:0"


def event(number, kind=EventKind.STORED, tier="cpu", medium=Medium.CPU, locality=None, rank=0):
    parent = H + number - 1 if number % 100 else None
    meta = BlockMeta(hashes=(H + number,), parent=parent, token_ids=(number, 2, 3, 4), block_size=4)
    block = Block(BlockId("ns", block_key(number.to_bytes(8, "big"))), 4096, meta, rank)
    return TierEvent(kind, tier, medium, locality, block)


def gone(number, **where):
    return event(number, EventKind.REMOVED, **where)


DISK = {"tier": "disk", "medium": Medium.STORAGE, "locality": Locality.LOCAL}


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def until(condition):
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110  # sockets and counters have no event to wait for
            await asyncio.sleep(0.001)


def made(folder, *audiences, **options):
    several = tuple(
        Audience.model_validate({"name": f"a{i}", "bind": TCP, "replay": TCP, **settings}, strict=False)
        for i, settings in enumerate(audiences)
    )
    settings = {"heartbeat": 0.0, "ring_batches": 1000, "ring_bytes": 1 << 30, "model": "m", **options}
    environ = {"POD_IP": "10.0.0.1"}
    tiers = {"cpu": "cpu", "disk": "fs", "lake": "object"}
    return EventHub(
        Events.model_construct(audiences=several, **settings),
        tiers=tiers,
        state_dir=folder,
        clock=time.time,
        environ=environ,
        endpoints_file=folder / "events.json",
    )


@asynccontextmanager
async def serving(folder, *audiences, **options):
    hub = made(folder, *audiences, **options)
    hub.start(asyncio.get_running_loop())
    try:
        yield hub
    finally:
        await hub.close(2.0)


def of(hub, index=0):
    return hub.statistics()["audiences"][f"a{index}"]


async def replayed(endpoint, start=0):
    """All replies to one request as (topic, number, batch), the end marker left out."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", encode_sequence(start)])
    replies = []
    async with asyncio.timeout(10):
        while True:
            if not dealer.poll(0):
                await asyncio.sleep(0.001)
                continue
            _, topic, number, payload = dealer.recv_multipart()
            if number == END:
                break
            replies.append((topic, int.from_bytes(number, "big"), payload))
    context.destroy(linger=0)
    return replies


async def events_of(hub, index=0, start=0):
    replies = await replayed(of(hub, index)["replay"], start)
    return [told for _, _, payload in replies for told in decode_batch(payload).events]


async def folded(hub, index=0):
    """What a reader that joins now ends with."""
    consumer = ReferenceConsumer()
    for _, _, payload in await replayed(of(hub, index)["replay"]):
        consumer.fold(decode_batch(payload))
    assert not consumer.counts["unknown_removals"]
    return consumer.resident


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


# -- other publishers' events


def gpu(*numbers, kind=BlockStored, **more):
    hashes = tuple(H + n for n in numbers)
    if kind is BlockRemoved:
        return BlockRemoved(block_hashes=hashes, medium="GPU")
    tokens = tuple(token for n in numbers for token in (n, 2, 3, 4))
    parent = H + numbers[0] - 1 if numbers[0] % 100 else None
    return BlockStored(hashes, parent, tokens, 4, None, "GPU", None, **more)


def test_injected_events_come_before_what_they_caused_and_without_what_readers_stumble_over(tmp_path):
    async def main():
        async with serving(tmp_path, {}, {"media": ["CPU"]}, {"form": "array"}) as hub:
            odd = {"ownership": "o", "session_id": "s", "lookahead_token_ids": ((1,),)}
            hub.inject(0, [gpu(0, 1, **odd)])
            hub.publish([event(0), event(1)])
            told = await events_of(hub)
            assert [(one.medium, one.block_hashes[0] - H) for one in told] == [
                ("GPU", 0),
                ("GPU", 1),
                ("CPU", 0),
                ("CPU", 1),
            ]
            assert told[1].parent_block_hash == H
            assert all(one.ownership is one.session_id is one.lookahead_token_ids is None for one in told)
            assert {one.medium for one in await events_of(hub, 1)} == {"CPU"}
            assert [one.medium for one in await events_of(hub, 2)] == ["GPU", "GPU", "CPU", "CPU"]
            assert of(hub)["foreign_events"] == 2
            assert of(hub)["foreign"] == 2

    run(main)


def test_injected_events_are_a_set_whatever_the_engine_repeats(tmp_path):
    async def main():
        async with serving(tmp_path, {}, ring_batches=1) as hub:
            hub.inject(0, [gpu(0, 1), gpu(1)])
            hub.inject(1, [gpu(0)])
            hub.inject(0, [gpu(1, kind=BlockRemoved), gpu(1, kind=BlockRemoved), gpu(9, kind=BlockRemoved)])
            hub.publish([event(5)])
            assert await folded(hub) == {
                Residency(H, 0, "GPU", None, 0),
                Residency(H, 0, "GPU", None, 1),
                Residency(H + 5, 0, "CPU", None, 0),
            }
            assert of(hub)["foreign_repeats"] == 3

    run(main)


def test_everything_cleared_by_an_engine_is_the_end_of_its_rank_and_of_nothing_else(tmp_path):
    """L122: removals, leaf first; the pool's blocks and the other rank's stay."""

    async def main():
        async with serving(tmp_path, {}) as hub:
            hub.inject(0, [gpu(0, 1, 2)])
            hub.inject(1, [gpu(0, 1)])
            hub.publish([event(0)])
            start = of(hub)["sequence"] + 1
            hub.inject(0, [AllBlocksCleared()])
            told = await events_of(hub, start=start)
            assert [(type(one), one.block_hashes[0] - H) for one in told] == [
                (BlockRemoved, n) for n in (2, 1, 0)
            ]
            assert {(entry.medium, entry.dp_rank) for entry in await folded(hub)} == {("GPU", 1), ("CPU", 0)}

    run(main)


def test_what_readers_knew_from_an_earlier_run_is_not_told_but_replayed_and_taken_back(tmp_path):
    async def main():
        async with serving(tmp_path, {}) as hub:
            hub.publish([event(9)])
        async with serving(tmp_path, {}) as hub:
            hub.seed([event(1, **DISK), event(2, **DISK)])
            hub.inject(0, [gpu(3)], announce=False)
            assert of(hub)["batches"] == 0
            assert len(await folded(hub)) == 3, "a reader that joins before the first batch knows it too"
            hub.publish([gone(1, **DISK), event(4)])
            hub.inject(0, [gpu(3, kind=BlockRemoved)])
            first = of(hub)["sequence"] - 1
            assert first == 1
            assert [type(one) for one in await events_of(hub, start=first)] == [
                BlockRemoved,
                BlockStored,
                BlockRemoved,
            ]
            assert {entry.hash - H for entry in await folded(hub)} == {2, 4}

    run(main)


# -- dp ranks


EACH = {"shared_blocks": "each_rank"}


async def settled(hub, ranks):
    hub.set_ranks(ranks)
    await until(lambda: all(p._sweep is None and p._sweeping is None for p in hub._publishers))


def test_a_rank_that_comes_is_told_everything_and_one_that_goes_takes_only_its_own_away(tmp_path):
    """L119, L122."""

    async def main():
        async with serving(tmp_path, EACH, {}) as hub:
            for at in range(0, 3000, 100):
                hub.publish([event(n) for n in range(at, at + 100)])
            hub.inject(1, [gpu(0)])
            await settled(hub, [0, 1, 2])
            hub.publish([event(5000)])
            state = await folded(hub)
            for rank in range(3):
                mine = {entry.hash - H for entry in state if entry.dp_rank == rank and entry.medium == "CPU"}
                assert mine == {*range(3000), 5000}
            await settled(hub, [0, 2])
            state = await folded(hub)
            assert {(entry.medium, entry.dp_rank) for entry in state} == {("CPU", 0), ("CPU", 2), ("GPU", 1)}
            await settled(hub, [])
            assert await folded(hub) == state, "nobody left: the pool is still there"
            assert {e.dp_rank for e in await folded(hub, 1) if e.medium == "CPU"} == {0}, "told once"

    run(main)


def test_a_rank_that_comes_hears_parents_first_while_blocks_come_and_go(tmp_path):
    async def main():
        async with serving(tmp_path, EACH) as hub:
            rng = random.Random(3)
            there, left = set(range(5000)), set()
            hub.publish([event(n) for n in range(5000)])
            start = of(hub)["sequence"] + 1
            hub.set_ranks([0, 1])
            while hub._publishers[0]._sweep is not None or hub._publishers[0]._sweeping is not None:
                await asyncio.sleep(0)
                leaving = rng.sample(sorted(there), 5)
                there -= set(leaving)
                left |= set(leaving)
                hub.publish([gone(n) for n in leaving])
                new = [n for n in rng.sample(range(8000), 5) if n not in there]
                there |= set(new)
                hub.publish([event(n) for n in new])
            known = set()
            for _, _, payload in await replayed(of(hub)["replay"], start):
                batch = decode_batch(payload)
                for told in batch.events if batch.data_parallel_rank == 1 else ():
                    (one,) = told.block_hashes
                    if isinstance(told, BlockStored):
                        assert one not in known
                        parent = told.parent_block_hash
                        assert parent in {None} | known or parent - H >= 5000 or parent - H in left
                        known.add(one)
                    else:
                        known.remove(one)
            assert {h - H for h in known} == there

    run(main)


def test_ranks_that_readers_know_survive_a_restart(tmp_path):
    async def main():
        async with serving(tmp_path, EACH) as hub:
            hub.publish([event(1)])
            await settled(hub, [0, 3])
        async with serving(tmp_path, EACH) as hub:
            hub.seed([event(1)])
            assert {entry.dp_rank for entry in await folded(hub)} == {0, 3}
            await settled(hub, [0])
            assert {entry.dp_rank for entry in await folded(hub)} == {0}

    run(main)


def test_ranks_with_ports_of_their_own_have_streams_of_their_own(tmp_path):
    """L119."""

    async def main():
        names = {"bind": f"ipc://{tmp_path}/p", "replay": f"ipc://{tmp_path}/r"}
        audience = Audience.model_construct(**{**Audience(name="x").model_dump(), **names, **EACH})
        for rank in range(2):
            plans = made(tmp_path, {**EACH, "rank_ports": 2, "bind": "tcp://127.0.0.1:6000", "replay": None})
            outlet = plans._publishers[rank].outlets[0].plan
            assert outlet.bind == f"tcp://127.0.0.1:{6000 + rank}"
            assert plans._publishers[rank].plan.view.rank == rank
        assert audience.bind == names["bind"]

    run(main)


# -- replays


class SequenceChecker:
    """A reader with llm-d's rules: everything from 0 at once, no hole, lower numbers are a new start."""

    def __init__(self, hub):
        self.hub, self.last, self.live, self.consumer, self.resets = hub, None, None, ReferenceConsumer(), 0

    async def replay(self, start):
        for _, number, payload in await replayed(of(self.hub)["replay"], start):
            assert number == (0 if self.last is None else self.last + 1), "a hole"
            self.consumer.fold(decode_batch(payload))
            self.last = number

    async def feed(self, number, payload):
        if self.live is not None and number < self.live:
            self.consumer, self.last, self.resets = ReferenceConsumer(), None, self.resets + 1
            await self.replay(0)
        self.live = number
        if self.last is None:
            await self.replay(0)
        if number > self.last + 1:
            await self.replay(self.last + 1)
        if number == self.last + 1:
            self.consumer.fold(decode_batch(payload))
            self.last = number


def test_numbers_that_begin_anew_keep_replays_from_0_short_and_such_readers_right(tmp_path):
    async def main():
        (tmp_path / "sequence-a0").write_text(str((1 << 16) - 50))
        async with serving(tmp_path, {"renumber_after": 1 << 16}, ring_batches=10) as hub:
            reader, context = SequenceChecker(hub), zmq.Context()
            follower = ReferenceConsumer(renumbers=True)
            follower.connect(of(hub)["bind"], of(hub)["replay"])
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(of(hub)["bind"])
            hub.publish([event(n) for n in range(2000)])
            there, number = set(range(2000)), 3000
            while of(hub)["sequence"] > 1000 or of(hub)["sequence"] < 40:
                hub.publish([event(number), gone(number - 2500)])
                there = there - {number - 2500} | {number}
                number += 1
                await asyncio.sleep(0.001)
                follower.poll()
                while sub.poll(0):
                    frames = sub.recv_multipart()
                    await reader.feed(int.from_bytes(frames[1], "big"), frames[2])
            await until(lambda: sub.poll(0) or reader.last == of(hub)["sequence"])
            while sub.poll(0):
                frames = sub.recv_multipart()
                await reader.feed(int.from_bytes(frames[1], "big"), frames[2])
            await until(lambda: (follower.poll(), follower.expected == reader.last + 1)[1])
            assert of(hub)["renumbered"] == 1
            assert reader.resets == 1
            assert {entry.hash - H for entry in reader.consumer.resident} == there
            assert len(await replayed(of(hub)["replay"])) < 100
            context.destroy(linger=0)
            assert follower.resident == reader.consumer.resident
            assert follower.counts["new_starts"] == 1
            follower.close()

    run(main)


def test_a_peer_that_floods_the_replay_endpoint_is_limited_and_costs_little(tmp_path, monkeypatch):
    """L132: a thousand requests a second, huge numbers, rubbish."""
    monkeypatch.setattr(replay_module, "RATE", 1.0)

    async def main():
        async with serving(tmp_path, {}) as hub:
            for number in range(100):
                hub.publish([event(number)])
            context = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(of(hub)["replay"])
            for at in range(1000):
                start = encode_sequence(at) if at % 3 else b"\xff" * 8
                dealer.send_multipart([b"", start] if at % 5 else [b"snapshot", b"", b"now"])
            await until(lambda: of(hub)["replay_malformed"] == 200)
            await until(lambda: of(hub)["replay_requests"] == 800)
            assert of(hub)["replays_limited"] + of(hub)["replays_refused"] >= 700
            await until(lambda: of(hub)["replays_active"] == 0)
            hub.publish([event(200)])
            assert of(hub)["dropped"] == 0
            context.destroy(linger=0)

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
            frames = None
            async with asyncio.timeout(10):
                while frames is None or not decode_batch(frames[2]).events:
                    await asyncio.sleep(0.001)
                    frames = sub.recv_multipart() if sub.poll(0) else frames
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

"""The relay over real sockets: an engine's events join the stream of every audience, in order."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import uvloop

from kvtierd.config.audiences import Audience, Events
from kvtierd.config.relay import Relay
from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Medium, TierEvent, block_key
from kvtierd.edges import relay as relay_module
from kvtierd.edges.hub import EventHub
from kvtierd.edges.merge import MergedStream
from kvtierd.errors import ConfigError
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.testing.fake_publisher import FakePublisher
from kvtierd.testing.local_daemon import free_port
from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Form

H = 0xF100000000000000
TCP = "tcp://127.0.0.1:0"


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def until(condition):
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110  # sockets and counters have no event to wait for
            await asyncio.sleep(0.001)


def gpu(*numbers, parent=None):
    return BlockStored(
        tuple(H + n for n in numbers),
        None if parent is None else H + parent,
        tuple(range(4 * len(numbers))),
        4,
        None,
        "GPU",
        None,
    )


def gone(*numbers):
    return BlockRemoved(tuple(H + n for n in numbers), "GPU")


def tier_event(number, kind=EventKind.STORED, medium=Medium.CPU, rank=0):
    meta = BlockMeta(hashes=(H + number,), parent=None, token_ids=(1, 2, 3, 4), block_size=4)
    block = Block.of(BlockId("ns", block_key(number.to_bytes(8, "big"))), 4096, meta, rank)
    return TierEvent(kind, "cpu" if medium is Medium.CPU else "disk", medium, None, block)


class Rig:
    """A hub with relays, and a reader of its only audience."""

    def __init__(self, hub, merged):
        self.hub, self.merged = hub, merged
        self.reader = ReferenceConsumer()
        ends = hub.bound_endpoints()
        self.reader.connect(ends["bind"], ends["replay"])
        self.order = []
        fold = self.reader.fold

        def recorded(batch):
            self.order += [
                (type(event).__name__, event.medium, h - H, batch.data_parallel_rank)
                for event in batch.events
                for h in event.block_hashes
            ]
            fold(batch)

        self.reader.fold = recorded

    def tell(self, events, *, committed):
        self.merged.committed = committed
        self.merged.publish(events)

    def engine(self, index=0):
        return self.merged.statistics()["engines"][index]

    def on(self, medium="GPU", rank=0):
        """The blocks that the reader knows on a medium."""
        self.reader.poll()
        found = [e for e in self.reader.resident if e.medium == medium and e.dp_rank == rank]
        return {e.hash - H for e in found}

    async def followed(self, publisher, index=0):
        """Wait until everything published was heard and the reader heard it too."""
        await until(lambda: self.engine(index)["sequence"] == publisher.number - 1)
        await self.quiet()

    async def quiet(self):
        await until(lambda: all(not e["unsent"] and not e["replaying"] for e in self.engines))
        await until(
            lambda: (
                self.reader.poll(),
                self.reader.expected == (self.hub.statistics()["sequence"] or 0) + 1,
            )[1]
        )

    @property
    def engines(self):
        return self.merged.statistics()["engines"]


@asynccontextmanager
async def relaying(tmp_path, *relays):
    audience = Audience(name="default", bind=TCP, replay=TCP)
    limits = {"ring_batches": 1000, "ring_bytes": 1 << 30, "heartbeat": 0.05}
    events = Events.model_construct(enabled=True, audiences=(audience,), model="m", relay=relays, **limits)
    hub = EventHub(events, tiers={"cpu": "cpu"}, state_dir=tmp_path, clock=time.time, environ={})
    loop = asyncio.get_running_loop()
    merged = MergedStream(hub, relays, tmp_path)
    merged.open(loop)
    merged.load()
    hub.start(loop)
    merged.start()
    rig = Rig(hub, merged)
    try:
        await until(lambda: (rig.reader.poll(), rig.reader.counts["batches"])[1])
        yield rig
    finally:
        merged.close()
        await hub.close(5.0)
        rig.reader.close()


@pytest.fixture
def ends(tmp_path):
    """The endpoints of an engine."""
    return {"connect": f"ipc://{tmp_path}/e", "replay": f"ipc://{tmp_path}/r"}


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    """Times that a test can wait for."""
    for name, seconds in (("REPLAY_TIMEOUT", 0.5), ("SILENCE", 0.2), ("DEPARTED", 0.1)):
        monkeypatch.setattr(relay_module, name, seconds)


def publisher(ends, **options):
    return FakePublisher(ends["connect"], ends.get("replay"), **options)


@pytest.mark.parametrize("form", list(Form))
def test_what_an_engine_says_reaches_readers(tmp_path, ends, form):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends, form=form) as engine:
                engine.publish(gpu(1, 2))
                engine.publish(gone(2), gpu(3, parent=1))
                await rig.followed(engine)
                assert rig.on() == {1, 3}
                assert rig.engine()["gpu_blocks"] == 2

    run(main())


@pytest.mark.parametrize("early", [True, False], ids=["engine first", "kvtierd first"])
@pytest.mark.parametrize("topic_frame", [True, False], ids=["0.26", "0.24"])
def test_either_may_start_first_and_a_late_join_is_replayed(tmp_path, ends, early, topic_frame):
    async def main():
        engine = publisher(ends, topic_frame=topic_frame) if early else None
        if engine is not None:
            engine.publish(gpu(1, 2))
            engine.publish(gone(1))
        async with relaying(tmp_path, Relay(**ends)) as rig:
            if engine is None:
                engine = publisher(ends, topic_frame=topic_frame)
                engine.publish(gpu(1, 2))
                engine.publish(gone(1))
            await rig.followed(engine)
            assert rig.on() == {2}
            engine.close()

    run(main())


@pytest.mark.parametrize("topic_frame", [True, False], ids=["0.26", "0.24"])
def test_a_gap_is_replayed(tmp_path, ends, topic_frame):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends, topic_frame=topic_frame) as engine:
                engine.publish(gpu(1))
                await rig.followed(engine)
                engine.publish(gpu(2), lost=True)
                engine.publish(gone(1), lost=True)
                engine.publish(gpu(3))
                await rig.followed(engine)
                assert rig.on() == {2, 3}
                assert rig.engine()["gaps"] == 1
                assert not rig.engine()["unrepaired"]

    run(main())


def test_a_lost_last_batch_is_found_after_a_silence(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1))
                await rig.followed(engine)
                engine.publish(gone(1), lost=True)
                await rig.followed(engine)
                assert rig.on() == set()

    run(main())


def test_without_a_replay_a_gap_costs_what_was_known(tmp_path, ends):
    async def main():
        del ends["replay"]
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                while rig.engine()["sequence"] is None:  # a PUB socket sends nothing to who is not there yet
                    engine.publish(gpu(1))
                    await asyncio.sleep(0.01)
                await rig.followed(engine)
                engine.publish(gone(1), lost=True)
                engine.publish(gpu(3))
                await rig.followed(engine)
                assert rig.on() == {3}
                assert rig.engine()["unrepaired"] == 1

    run(main())


def test_a_replay_that_is_not_answered_is_given_up(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends, mute=True) as engine:
                while rig.engine()["sequence"] is None:
                    engine.publish(gpu(1))
                    await asyncio.sleep(0.01)
                engine.publish(gpu(2))
                await rig.followed(engine)
                assert rig.on() == {1, 2}
                assert rig.engine()["replay_timeouts"] >= 1

    run(main())


def test_an_engine_that_restarts_loses_its_old_blocks_and_is_followed(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            rig.tell([tier_event(1)], committed=False)
            with publisher(ends) as engine:
                engine.publish(gpu(1, 2, 3))
                await rig.followed(engine)
            with publisher(ends) as engine:
                engine.publish(gpu(7))
                await rig.followed(engine)
                await until(lambda: rig.on() == {7})
                assert rig.on("CPU") == {1}
                removed = [h for kind, medium, h, _ in rig.order if (kind, medium) == ("BlockRemoved", "GPU")]
                assert removed == [3, 2, 1]

    run(main())


def test_an_engine_that_left_has_no_blocks_any_more(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1, 2, 3))
                await rig.followed(engine)
            await until(lambda: rig.on() == set())
            assert rig.engine()["departures"] == 1
            assert not rig.engine()["connected"]

    run(main())


def test_an_engine_that_connects_is_listened_to_by_binding(tmp_path, ends):
    async def main():
        port = free_port()
        relay = Relay(bind=f"tcp://127.0.0.1:{port}", replay=ends["replay"])
        async with relaying(tmp_path, relay) as rig:
            with FakePublisher(f"tcp://127.0.0.1:{port}", ends["replay"], connect=True) as engine:
                engine.publish(gpu(1))
                engine.publish(gpu(2))
                await rig.followed(engine)
                assert rig.on() == {1, 2}
                assert rig.engine()["connected"]
            await until(lambda: rig.on() == set())

    run(main())


def test_cleared_becomes_removals_and_the_tiers_stay(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1), gpu(2, parent=1))
                await rig.followed(engine)
                rig.tell([tier_event(1), tier_event(2)], committed=True)
                engine.publish(AllBlocksCleared(), gpu(5))
                await rig.followed(engine)
                assert (rig.on(), rig.on("CPU")) == ({5}, {1, 2})
                removed = [h for kind, medium, h, _ in rig.order if (kind, medium) == ("BlockRemoved", "GPU")]
                assert removed == [2, 1]

    run(main())


def test_garbage_is_counted_and_costs_nothing_else(tmp_path, ends):
    """L123."""

    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1))
                await rig.followed(engine)
                for frames in (
                    [b""],
                    [b"t", b"short", b""],
                    [b"t", b"\xff" * 8, b""],
                    [b"t", bytes(8), b"", b""],
                ):
                    engine.send(frames)
                engine.publish(payload=b"\xc1 garbage")
                engine.publish(gpu(2))
                await rig.followed(engine)
                assert rig.on() == {1, 2}
                assert rig.engine()["malformed"] == 5
                assert not rig.engine()["restarts"]

    run(main())


def test_each_rank_has_its_events_and_one_that_leaves_takes_only_its_own(tmp_path):
    """L119, L120, L122: two ranks (of whatever pipeline depth: the engine has one publisher for each)."""

    async def main():
        ports = free_port(), free_port()
        relays = [
            Relay(connect=f"tcp://127.0.0.1:{port}", replay=f"ipc://{tmp_path}/r{rank}", dp_rank=rank)
            for rank, port in enumerate(ports)
        ]
        async with relaying(tmp_path, *relays) as rig:
            first, second = (
                FakePublisher(relay.connect, relay.replay, rank=rank) for rank, relay in enumerate(relays)
            )
            first.publish(gpu(1, 2))
            second.publish(gpu(2, 3))
            await rig.followed(first, 0)
            await rig.followed(second, 1)
            assert (rig.on(rank=0), rig.on(rank=1)) == ({1, 2}, {2, 3})
            second.close()
            await until(lambda: rig.on(rank=1) == set())
            assert rig.on(rank=0) == {1, 2}
            first.publish(AllBlocksCleared())
            await rig.followed(first, 0)
            assert rig.on(rank=0) == set()
            first.close()

    run(main())


def test_a_whole_cache_that_goes_leaves_the_loop_time_for_others(tmp_path, ends):
    async def main():
        count, chunk = 20_000, 500
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                for first in range(0, count, chunk):
                    engine.publish(gpu(*range(first, first + chunk)))
                await rig.followed(engine)
                engine.publish(AllBlocksCleared())
                beats = 0
                await until(lambda: rig.engine()["cleared"])
                while rig.engine()["unsent"]:
                    await asyncio.sleep(0)
                    beats += 1
                assert beats >= count // relay_module.TELL_SLICE // 2
                await rig.followed(engine)
                assert rig.on() == set()

    run(main())


def test_a_block_in_the_pool_is_told_after_the_engines_own_event(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends, hold="1s")) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1))
                await rig.followed(engine)
                rig.tell([tier_event(2), tier_event(2, medium=Medium.STORAGE)], committed=True)
                rig.tell([tier_event(1, EventKind.REMOVED)], committed=False)
                assert rig.merged.statistics()["holding"] == 3
                engine.publish(gpu(2))
                await rig.followed(engine)
                assert [what[:3] for what in rig.order[1:4]] == [
                    ("BlockStored", "GPU", 2),
                    ("BlockStored", "CPU", 2),
                    ("BlockStored", "STORAGE", 2),
                ]
                assert rig.merged.statistics()["hold_timeouts"] == 0

    run(main())


def test_a_block_whose_engine_says_nothing_is_told_after_the_hold(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends, hold="50ms")) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1))
                await rig.followed(engine)
                begun = asyncio.get_running_loop().time()
                rig.tell([tier_event(9)], committed=True)
                await until(lambda: rig.on("CPU") == {9})
                took = asyncio.get_running_loop().time() - begun
                assert took >= 0.0499  # the loop rounds to its clock
                assert rig.merged.statistics()["hold_timeouts"] == 1
                assert rig.merged.statistics()["longest_hold_seconds"] >= 0.0499

    run(main())


def test_nothing_is_held_while_no_engine_is_heard(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends, hold="1s")) as rig:
            rig.tell([tier_event(1)], committed=True)
            assert rig.merged.statistics()["holding"] == 0
            with publisher(ends) as engine:
                engine.publish(gpu(2))
                await rig.followed(engine)
                rig.tell([tier_event(3)], committed=True)
                assert rig.merged.statistics()["holding"] == 1
            await until(lambda: not rig.merged.statistics()["holding"])
            assert rig.merged.statistics()["hold_timeouts"] == 0

    run(main())


def test_a_late_reader_is_told_what_engines_have(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1, 2))
                engine.publish(gone(1))
                await rig.followed(engine)
                known = set(rig.reader.resident)
                late = Rig(rig.hub, rig.merged)
                await late.quiet()
                assert late.reader.resident == known
                late.reader.close()

    run(main())


def test_an_address_that_is_taken_is_refused_with_its_name(tmp_path):
    async def main():
        port = free_port()
        relay = Relay(bind=f"tcp://127.0.0.1:{port}")
        async with relaying(tmp_path, relay):
            other = MergedStream(None, [relay])
            with pytest.raises(ConfigError, match=f"relay: cannot listen at tcp://127.0.0.1:{port}"):
                other.open(asyncio.get_running_loop())

    run(main())


def test_a_clean_end_takes_back_what_engines_have(tmp_path, ends):
    async def main():
        async with relaying(tmp_path, Relay(**ends)) as rig:
            with publisher(ends) as engine:
                engine.publish(gpu(1, 2))
                await rig.followed(engine)
                rig.merged.close()
                await until(lambda: rig.on() == set())
                assert (tmp_path / "relay").read_bytes() == b""

    run(main())

"""A real daemon listens to an engine's own events; the engine's sockets are the fake publisher's."""

import json

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, Router, chain, keys_of, store
from kvtierd.testing.fake_publisher import FakePublisher
from kvtierd.testing.local_daemon import free_port
from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored


class Engine:
    """An engine that computes a block, says so, and stores it in the pool, in the order of a real one."""

    def __init__(self, rig: DaemonRig, rank: int = 0) -> None:
        relay = relays_of(rig)[rank]
        self.publisher = FakePublisher(relay["connect"], relay["replay"], rank=rank)
        self.session = rig.attach(dp_rank=rank, engine_id=f"e{rank}")

    def compute(self, blocks, *, say=True):
        """Compute blocks and store them; with ``say`` the engine's own event comes first."""
        if say:
            self.publisher.publish(*map(on_device, blocks))
        return store(self.session, blocks)

    def close(self):
        self.publisher.close()
        self.session.close()


def all_left(rig):
    """Wait until no engine's own blocks are known, so that the stream is the daemon's inventory again."""
    wait_for(lambda: not rig.status()["events"]["foreign"], "the engines to have left")


def relays_of(rig):
    return json.loads(rig.daemon.config.read_text())["events"]["relay"]


def with_relays(make, ranks=1, **audience):
    """A rig, started, whose daemon listens to so many engines."""
    rig = make()
    relays = [
        {
            "connect": f"tcp://127.0.0.1:{free_port()}",
            "replay": f"ipc://{rig.folder}/replay{rank}",
            "dp_rank": rank,
            "hold": "300ms",
        }
        for rank in range(ranks)
    ]

    def change(body):
        body["events"]["relay"] = relays
        body["events"]["audiences"][0].update(audience)

    rig.edit(change)
    return rig.start()


def on_device(block):
    meta = block.meta
    return BlockStored(
        meta.hashes, meta.parent, meta.token_ids, meta.block_size, None, "GPU", None, group_idx=0
    )


def hashes(blocks):
    return {h for block in blocks for h in block.meta.hashes}


def known(router, medium, rank=0):
    router.poll()
    return {entry.hash for entry in router.resident if (entry.medium, entry.dp_rank) == (medium, rank)}


def has(router, medium, blocks, rank=0):
    """Wait until a router knows exactly these blocks on a medium."""
    wait_for(lambda: known(router, medium, rank) == hashes(blocks), f"{len(blocks)} blocks on {medium}")


def hears(publisher):
    """Wait until the daemon has subscribed: for what is published before it depends on the ring."""
    wait_for(lambda: publisher.subscribed, "the relay to subscribe")


def test_one_stream_has_device_pool_and_disk_and_each_cause_before_its_effect(make):
    rig = with_relays(make)
    engine = Engine(rig)
    hears(engine.publisher)
    blocks = chain(12)
    for block in blocks:
        engine.compute([block])
    has(rig.router, "GPU", blocks)
    has(rig.router, "STORAGE", blocks)
    for block in blocks:
        assert [medium for kind, medium, _ in rig.router.told(block)] == ["GPU", "CPU", "STORAGE"]
    assert rig.status()["events"]["relay"]["hold_timeouts"] == 0

    engine.session.evict(keys_of(blocks[6:]), ["cpu"])
    engine.publisher.publish(BlockRemoved(blocks[11].meta.hashes, "GPU", 0))
    has(rig.router, "GPU", blocks[:11])
    has(rig.router, "CPU", blocks[:6])
    engine.publisher.publish(AllBlocksCleared())
    has(rig.router, "GPU", [])
    has(rig.router, "CPU", blocks[:6])
    has(rig.router, "STORAGE", blocks)
    engine.close()
    all_left(rig)


def test_an_engine_that_restarts_keeps_what_is_in_the_tiers(make):
    rig = with_relays(make)
    engine = Engine(rig)
    hears(engine.publisher)
    blocks = chain(4)
    engine.compute(blocks)
    has(rig.router, "GPU", blocks)
    engine.close()
    engine = Engine(rig)
    has(rig.router, "GPU", [])
    engine.publisher.publish(on_device(blocks[0]))
    has(rig.router, "GPU", blocks[:1])
    has(rig.router, "CPU", blocks)
    engine.close()
    all_left(rig)


def test_the_daemon_goes_on_without_the_engine_and_finds_it_when_it_is_back_itself(make):
    rig = with_relays(make)
    blocks = chain(6)
    with rig.attach() as session:
        store(session, blocks[:2])
    has(rig.router, "CPU", blocks[:2])
    assert rig.status()["events"]["relay"]["held"] == 0

    engine = Engine(rig)
    hears(engine.publisher)
    engine.compute(blocks[2:4])
    has(rig.router, "GPU", blocks[2:4])
    assert rig.daemon.stop() == 0
    has(rig.router, "GPU", [])
    engine.publisher.publish(on_device(blocks[4]))  # the engine does not notice
    engine.publisher.publish(BlockRemoved(blocks[2].meta.hashes, "GPU", 0))
    rig.start()
    has(rig.router, "GPU", blocks[3:5])
    engine.publisher.close()
    all_left(rig)


@pytest.mark.parametrize("shared", ["once", "each_rank"])
def test_a_rank_that_leaves_takes_only_what_is_its_own(make, shared):
    """L119, L120, L122."""
    rig = with_relays(make, ranks=2, shared_blocks=shared)
    engines = [Engine(rig, rank) for rank in range(2)]
    for engine in engines:
        hears(engine.publisher)
    first, second = chain(3, "first"), chain(3, "second")
    engines[0].compute(first)
    engines[1].compute(second)
    has(rig.router, "GPU", first, rank=0)
    has(rig.router, "GPU", second, rank=1)
    both = [*first, *second]
    for rank, own in enumerate((first, second)):
        has(rig.router, "CPU", both if shared == "each_rank" else own, rank)
    engines[1].close()
    has(rig.router, "GPU", [], rank=1)
    has(rig.router, "GPU", first, rank=0)
    if shared == "each_rank":
        has(rig.router, "CPU", [], rank=1)
        has(rig.router, "CPU", both, rank=0)
    else:  # what it stored is still in the pool, for the others
        has(rig.router, "CPU", second, rank=1)
    engines[0].close()
    all_left(rig)
    rig.client.close()
    assert rig.daemon.stop() == 0


@pytest.mark.parametrize("restarts", [False, True], ids=["goes on", "restarts"])
def test_a_killed_daemon_tells_what_the_engine_did_meanwhile(make, restarts):
    """The engine's ring reaches back only over the time without a daemon: the rest was recorded."""
    rig = with_relays(make)
    relay = relays_of(rig)[0]
    blocks = chain(10)
    engine = FakePublisher(relay["connect"], relay["replay"], ring=3)
    hears(engine)
    for block in blocks[:8]:
        engine.publish(on_device(block))
    has(rig.router, "GPU", blocks[:8])
    rig.daemon.kill()
    if restarts:
        engine.close()
        engine = FakePublisher(relay["connect"], relay["replay"])
        for _ in range(10):  # further than the old one was
            engine.publish(on_device(blocks[9]))
        left = blocks[9:]
    else:
        engine.publish(BlockRemoved(blocks[7].meta.hashes, "GPU", 0))
        engine.publish(on_device(blocks[8]))
        left = [*blocks[:7], blocks[8]]
    rig.daemon.start()  # the router that was there stays
    has(rig.router, "GPU", left)
    with Router() as late:
        rig.follow(late)
        has(late, "GPU", left)
    state = rig.status()["events"]["relay"]["engines"][0]
    assert (state["restarts"], state["unrepaired"], state["unrecorded"]) == (int(restarts), 0, None)
    engine.close()
    all_left(rig)
    has(rig.router, "GPU", [])


def test_a_stop_that_keeps_leaves_readers_all_and_the_next_start_tells_the_difference(make):
    """`events.on_stop: keep`: what the engine removed meanwhile, and what the pool lost."""
    rig = with_relays(make)
    rig.edit(lambda body: (body["pool"].update(backing="file"), body["events"].update(on_stop="keep")))
    rig.restart()
    engine = Engine(rig)
    hears(engine.publisher)
    blocks = chain(4)
    engine.compute(blocks)
    for medium in ("GPU", "CPU", "STORAGE"):
        has(rig.router, medium, blocks)
    rig.settle()
    engine.session.close()
    before = rig.router.counts["BlockRemoved"]
    assert rig.daemon.stop() == 0
    rig.router.poll(0.3)
    assert rig.router.counts["BlockRemoved"] == before
    engine.publisher.publish(BlockRemoved(blocks[3].meta.hashes, "GPU", 0))
    rig.start()
    has(rig.router, "GPU", blocks[:3])
    has(rig.router, "STORAGE", blocks)
    engine.publisher.close()
    all_left(rig)
    rig.router.counts.pop("unknown_removals", None)  # changes of the last second are taken back once more
    rig.agree()


@pytest.mark.parametrize("on_stop", ["remove", "keep"])
def test_without_a_record_of_the_engine_a_clean_stop_takes_its_blocks_back(make, on_stop):
    """`unrecorded`: the next run could not tell the difference, so nothing is left to differ."""
    rig = with_relays(make)
    rig.edit(lambda body: (body["pool"].update(backing="file"), body["events"].update(on_stop=on_stop)))
    assert rig.daemon.stop() == 0
    (rig.folder / "state" / "relay-0").unlink()
    (rig.folder / "state" / "relay-0").mkdir()
    rig.start()
    engine = Engine(rig)
    hears(engine.publisher)
    blocks = chain(3)
    engine.compute(blocks)
    has(rig.router, "GPU", blocks)
    assert "relay-0" in rig.status()["events"]["relay"]["engines"][0]["unrecorded"]
    rig.settle()
    engine.session.close()
    assert rig.daemon.stop() == 0
    has(rig.router, "GPU", [])
    rig.start()
    has(rig.router, "GPU", blocks)  # the engine's own replay tells it anew
    engine.publisher.close()
    all_left(rig)
    rig.router.counts.pop("unknown_removals", None)

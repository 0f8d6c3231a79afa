"""What joins the stream beside the tiers: engines' own events, earlier runs, dp ranks that come and go."""

import asyncio
import random

from kvtierd.config.audiences import Audience
from kvtierd.testing.clock import until
from kvtierd.testing.consumer import Residency
from kvtierd.testing.hub_rig import DISK, H, event, events_of, folded, gone, made, of, replayed, run, serving
from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch


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

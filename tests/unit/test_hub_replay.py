"""Replays of a hub: readers that want every number, and peers that ask too often."""

import asyncio

import zmq

from kvtierd.edges import replay as replay_module
from kvtierd.testing.clock import until
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.testing.hub_rig import H, event, gone, of, replayed, run, serving
from kvtierd.wire.kvevents import decode_batch
from kvtierd.wire.stream import encode_sequence


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
                await asyncio.sleep(0)  # the sockets' turn
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

"""One Unix socket of the daemon: whose turn it is, and what a connection may hold."""

import asyncio
import contextlib
import itertools
import logging
import os

import pytest

from kvtierd.core.effects import Attached, Done, ErrorCode, LookedUp
from kvtierd.core.model import Group, KeyState, Layout, block_key
from kvtierd.core.stimuli import Attach, Lookup, Touch
from kvtierd.edges.connection import PORTION_FRAMES
from kvtierd.edges.engine import EngineServer, Limits
from kvtierd.edges.liveness import Liveness
from kvtierd.edges.peers import Allowed
from kvtierd.edges.unix_socket import Permissions
from kvtierd.wire.framing import Deframer, frame
from kvtierd.wire.messages import Hello, StatusRequest, decode_server, encode

LAYOUT = Layout(model="m", dtype="f", layout="l", groups=(Group(tokens_per_block=1, block_bytes=1),))
ATTACH = Attach(id=2, layout=LAYOUT, engine_id="e", process=b"p")
ATTACHED = Attached(
    id=2,
    session=1,
    namespace="n",
    pool_id="p",
    pool_bytes=1,
    unit_bytes=1,
    slot_bytes=1,
    payload_bytes=(1,),
    rank_offsets=((0,),),
    fence=0,
    tiers=("cpu",),
)
HELLO = frame(encode(Hello(id=1, versions=(1, 1))))


def lookup(number, keys=1):
    return frame(encode(Lookup(id=number, keys=(block_key(bytes(3)),) * keys)))


def touch(number, keys=1):
    return frame(encode(Touch(id=number, keys=tuple(block_key(bytes([0, 0, k % 256])) for k in range(keys)))))


class Scene:
    """A server whose turns are recorded and answered with ``done``, and clients of it."""

    def __init__(self, folder, allowed=None, **limits):
        self.turns = []
        self.glances = []
        self.server = EngineServer(
            folder / "s",
            turn=self.turn,
            glance=self.glance,
            status=lambda: {"turns": len(self.turns)},
            liveness=Liveness(asyncio.get_running_loop(), lambda process: None),
            pool_fd=0,
            limits=Limits(**limits),
            permissions=Permissions(),
            allowed=allowed or Allowed(),
            daemon="test",
            numbers=itertools.count(1),
        )
        self.clients = []

    def glance(self, session, request):
        """Find every key of a lookup at sight, and know nothing of lookups of none."""
        if isinstance(request, Lookup) and request.keys:
            self.glances.append(session)
            return LookedUp(
                id=request.id, found=bytes((KeyState.HIT,)) * len(request.keys), prefix=len(request.keys)
            )
        return None

    def turn(self, asked):
        self.turns.append([(one.session, getattr(one, "request", None)) for one in asked])
        for one in asked:
            request = getattr(one, "request", None)
            if isinstance(request, Attach):
                self.server.deliver(one.session, [ATTACHED])
            if isinstance(request, Touch):
                self.server.deliver(one.session, [Done(id=request.id)])

    async def connect(self, data=HELLO):
        client = Client(*await asyncio.open_unix_connection(str(self.server.path)))
        self.clients.append(client)
        client.writer.write(data)
        return client

    async def attach(self):
        client = await self.connect(HELLO + frame(encode(ATTACH)))
        assert [(await client.receive()).id for _ in range(2)] == [1, 2]
        self.turns.clear()
        return client

    def connection(self, number):
        return self.server.connections[number]


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self._deframer, self._ready = Deframer(), []

    async def receive(self):
        while not self._ready:
            data = await self.reader.read(1 << 16)
            if not data:
                return None
            self._ready += map(decode_server, self._deframer.feed(data))
        return self._ready.pop(0)

    async def closed(self):
        with contextlib.suppress(ConnectionError):
            while await self.receive() is not None:
                pass
        return True


@pytest.fixture
def play(tmp_path):
    def run(scene, **options):
        async def whole():
            stage = Scene(tmp_path, **options)
            await stage.server.start()
            try:
                await asyncio.wait_for(scene(stage), 20)
            finally:
                for client in stage.clients:
                    client.writer.close()
                stage.server.liveness.close()
                await stage.server.stop_listening()
                stage.server.close()
                await until(lambda: not stage.server.connections)

        asyncio.run(whole())

    return run


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the condition is somebody else's state
        await asyncio.sleep(0)


def test_a_flood_is_served_in_portions_and_others_in_between(play):
    async def scene(stage):
        flood, other = await stage.attach(), await stage.attach()
        flood.writer.write(b"".join(touch(n) for n in range(2, 2002)))
        other.writer.write(touch(7))
        assert (await other.receive()).id == 7
        assert [(await flood.receive()).id for _ in range(2000)] == list(range(2, 2002)), "all, in order"
        assert max(map(len, stage.turns)) <= PORTION_FRAMES
        mine = next(i for i, turn in enumerate(stage.turns) if turn[0][0] == 2)
        assert mine < 60, "it did not wait for the flood's end"

    play(scene)


def test_two_floods_take_turns(play):
    async def scene(stage):
        floods = [await stage.attach() for _ in range(2)]
        for flood in floods:
            flood.writer.write(b"".join(touch(n) for n in range(2, 1002)))
        for flood in floods:
            assert [(await flood.receive()).id for _ in range(1000)] == list(range(2, 1002))
        middle = [turn[0][0] for turn in stage.turns][10:-30]
        assert 0.3 < middle.count(1) / len(middle) < 0.7

    play(scene)


def test_a_status_is_a_portion_of_its_own(play):
    async def scene(stage):
        client = await stage.attach()
        client.writer.write(frame(encode(StatusRequest(id=2))) * 3 + touch(9))
        got = [(await client.receive()).id for _ in range(4)]
        assert got == [2, 2, 2, 9]
        assert len(stage.turns) == 1

    play(scene)


def test_no_more_is_read_of_a_flood_than_what_waits_in_line(play):
    """1 MB of requests from a client that does not read: the daemon holds a small part of it."""

    async def scene(stage):
        flood = await stage.attach()
        flood.writer.write(touch(2) * 30_000)
        most = 0
        while len(stage.turns) < 800:
            await asyncio.sleep(0)
            most = max(most, stage.connection(1).holds())
        assert most < 600_000

    play(scene)


def test_the_oldest_that_never_attached_makes_room(play, caplog):
    async def scene(stage):
        first, second, third = [await stage.connect() for _ in range(3)]
        for client in (first, second, third):
            await client.receive()
        fourth = await stage.connect()
        assert (await fourth.receive()).version == 1
        assert await first.closed()
        assert len(stage.server.connections) == 3
        assert stage.server.counters["refused"] == 1
        for client in (second, third, fourth):
            client.writer.write(touch(5))
            assert (await client.receive()).id == 5

    play(scene, max_connections=3)
    assert "newer ones need its place" in caplog.text


def test_the_attached_keep_their_places(play):
    async def scene(stage):
        engines = [await stage.attach() for _ in range(2)]
        assert await (await stage.connect()).closed()
        for client in engines:
            client.writer.write(touch(5))
            assert (await client.receive()).id == 5

    play(scene, max_connections=2)


def test_who_is_late_with_hello_or_the_rest_of_a_message_is_closed(play):
    """Slow loris: it may trickle for as long as the message may take, and no longer."""

    async def scene(stage):
        _, half, idle = await stage.connect(b""), await stage.connect(), await stage.connect()
        await half.receive(), await idle.receive()
        half.writer.write(touch(2)[:7])
        await until(lambda: stage.connection(2).holds() == 7)
        now = asyncio.get_running_loop().time()
        assert [stage.connection(n).late(now + 4) for n in (1, 2, 3)] == ["", "", ""]
        assert "no hello within 5 s" in stage.connection(1).late(now + 6)
        half.writer.write(touch(2)[7:9])
        await until(lambda: stage.connection(2).holds() == 9)
        assert "half a message for 30 s" in stage.connection(2).late(now + 32), "a trickle is no progress"
        assert stage.connection(3).late(now + 1e6) == "", "an idle engine owes nothing"
        half.writer.write(touch(2)[9:])
        assert (await half.receive()).id == 2
        assert stage.connection(2).late(now + 1e6) == ""
        half.writer.write(touch(2)[:7])
        await until(lambda: stage.connection(2).holds() == 7)
        assert stage.connection(2).late(now + 20) == "", "counted from this message on"

    play(scene)


def test_the_one_that_holds_most_is_closed_when_all_hold_too_much(play, caplog):
    async def scene(stage):
        small, large = await stage.connect(), await stage.connect()
        await small.receive(), await large.receive()
        small.writer.write((1 << 20).to_bytes(4, "big") + bytes(20_000))
        large.writer.write((1 << 20).to_bytes(4, "big") + bytes(90_000))
        assert await large.closed()
        assert stage.server.counters["shed"] == 1
        assert 20_004 <= stage.server.buffered <= 100_000
        assert list(stage.server.connections) == [1]

    play(scene, max_buffered=100_000)
    assert "engine.max_buffered" in caplog.text


def test_what_is_answered_at_sight_takes_no_turn_and_is_counted(play):
    async def scene(stage):
        client = await stage.attach()
        before = len(stage.turns)
        client.writer.write(lookup(3))
        assert await client.receive() == LookedUp(id=3, found=bytes((KeyState.HIT,)), prefix=1)
        client.writer.write(lookup(4) + lookup(5) + lookup(6))
        assert [(await client.receive()).id for _ in range(3)] == [4, 5, 6]
        assert len(stage.turns) == before
        assert stage.server.requests.as_dict()["verbs"]["lookup"] == {"ok": 4, "refused": 0}
        assert sum(stage.server.requests.durations["lookup"].counts) == 4
        assert stage.server.statistics()["unanswered"] == 0

    play(scene)


def test_nothing_overtakes_a_request_that_needs_a_turn(play):
    """It may change what the lookup behind it finds."""

    async def scene(stage):
        client = await stage.attach()
        client.writer.write(lookup(3) + touch(4) + lookup(5))
        assert [(await client.receive()).id for _ in range(2)] == [3, 4]
        assert stage.glances == [1]
        assert [request.id for _, request in stage.turns[-1]] == [4, 5]

    play(scene)


def test_answers_that_nobody_reads_are_kept_in_order_and_counted(play):
    async def scene(stage):
        client = await stage.attach()
        client.reader._transport.pause_reading()
        for number in range(3, 103):
            client.writer.write(lookup(number, 8000))
            await client.writer.drain()
        connection = stage.server.connections[1]
        await until(lambda: connection.held > 0)
        client.reader._transport.resume_reading()
        assert [(await client.receive()).id for _ in range(100)] == list(range(3, 103))
        client.writer.write(lookup(103))
        assert (await client.receive()).id == 103
        assert stage.server.buffered == connection.held == 0, "all was read"

    play(scene)


def test_too_many_unanswered_requests_are_busy(play):
    async def scene(stage):
        client = await stage.attach()
        for number in range(4):  # lookups, which this scene never answers
            client.writer.write(frame(encode(Lookup(id=number + 3, keys=()))))
        client.writer.write(touch(8) + frame(encode(StatusRequest(id=9))))
        busy, status = await client.receive(), await client.receive()
        assert (busy.id, busy.code) == (8, ErrorCode.BUSY)
        assert "engine.max_requests" in busy.message
        assert status.id == 9, "a status needs no turn"

    play(scene, max_requests=4)


def test_liveness_pipes_are_bounded(play):
    """Each attach costs a descriptor here for as long as the other side keeps its end."""

    async def scene(stage):
        kept = []
        liveness = stage.server.liveness
        kept += [liveness.hand_out(b"hoarder") for _ in range(8)]
        client = await stage.connect(HELLO + frame(encode(ATTACH)))
        assert (await client.receive()).id == 1
        assert (await client.receive()).code is ErrorCode.BUSY
        for pipe in kept:
            os.close(pipe)
        await until(lambda: liveness.pipes == 0)
        client.writer.write(frame(encode(ATTACH)))
        assert (await client.receive()).namespace == "n"
        liveness.close()

    play(scene, max_connections=2)


def test_who_is_not_on_the_list_hears_why_and_nothing_else(play, caplog):
    async def scene(stage):
        client = await stage.connect(HELLO + touch(2))
        refused = await client.receive()
        assert refused.code is ErrorCode.NOT_ALLOWED
        assert f"uid {os.getuid()}" in refused.message
        assert await client.closed()
        assert stage.turns == []
        assert stage.server.counters["not_allowed"] == 1

    play(scene, allowed=Allowed(uids=(os.getuid() + 1,)))
    assert "may not" in caplog.text


def test_strangers_cannot_fill_the_log(play, caplog):
    async def scene(stage):
        for _ in range(60):
            assert await (await stage.connect(b"GET / HTTP/1.1\r\n\r\n")).closed()
        assert stage.server.counters["protocol_errors"] == 60
        assert stage.server.counters["unlogged"] >= 20

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert 20 <= len(caplog.records) <= 45

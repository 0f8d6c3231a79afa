"""What a verb costs, counted: messages, system calls, and calls of Python, whatever the number of blocks."""

import asyncio
import os
import socket
import sys
from collections import Counter

import pytest
import uvloop

import kvtierd
from kvtierd.client import Client, KeyState
from kvtierd.core.effects import Answer
from kvtierd.edges.engine import EngineServer, Limits
from kvtierd.edges.liveness import Liveness
from kvtierd.edges.peers import Allowed
from kvtierd.edges.unix_socket import Permissions
from kvtierd.testing.rig import LAYOUT, LadderRig, key

PRODUCT = os.path.dirname(kvtierd.__file__)
LOOKUPS = 50
CLIENT_CALLS = 20
DAEMON_CALLS = 20


class Meter:
    """Counts what a thread calls while it is set: our own functions, and those of sockets by name."""

    def __init__(self):
        self.ours, self.system = 0, Counter()

    def __call__(self, frame, event, argument):
        if event == "call":
            self.ours += frame.f_code.co_filename.startswith(PRODUCT)
        elif event == "c_call" and isinstance(getattr(argument, "__self__", None), socket.socket):
            self.system[argument.__name__] += 1

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


class Stage:
    """A ladder behind a real socket, in this thread; its client in another."""

    def __init__(self, path, blocks):
        self.rig = LadderRig(slots=blocks, attach=False)
        self.pool = os.memfd_create("pool")
        os.ftruncate(self.pool, self.rig.ladder.pool_bytes)
        self.turns = 0
        self.liveness = Liveness(asyncio.get_running_loop(), lambda process: None)
        self.server = EngineServer(
            path,
            turn=self.turn,
            glance=self.rig.ladder.glance,
            status=dict,
            liveness=self.liveness,
            pool_fd=self.pool,
            limits=Limits(),
            permissions=Permissions(),
            allowed=Allowed(),
            daemon="test",
        )

    def turn(self, batch):
        self.turns += 1
        for stimulus in batch:
            for effect in self.rig.ladder.handle(stimulus, 0.0):
                assert isinstance(effect, Answer)
                self.server.deliver(effect.session, [effect.reply])

    async def close(self):
        await self.server.stop_listening()
        self.server.close()
        while self.server.connections:  # noqa: ASYNC110 - the loop's own work
            await asyncio.sleep(0)
        self.liveness.close()
        os.close(self.pool)


async def measured(path, blocks, verb, times):
    """Return what ``times`` calls of a verb on resident blocks call in client and daemon, and their turns."""
    stage = Stage(path, 2 * blocks)
    await stage.server.start()
    client = Client(path, deadline=100.0)  # so long that no pause of the machine changes a wait by a part
    try:
        session = await asyncio.to_thread(client.attach, LAYOUT, engine_id="e")
        stage.rig.session = session.attached.session
        stage.rig.store(*range(blocks))
        keys = [key(number) for number in range(blocks)]

        def ask():
            verb(session, keys)
            with Meter() as meter:
                for _ in range(times):
                    verb(session, keys)
            return meter

        turns = stage.turns
        with Meter() as daemon:
            client_meter = await asyncio.to_thread(ask)
        turns = stage.turns - turns
    finally:
        await asyncio.to_thread(client.close)
        await stage.close()
    return client_meter, daemon, turns


@pytest.fixture
def count(tmp_path):
    return lambda verb, blocks, times: uvloop.run(measured(tmp_path / "s", blocks, verb, times))


def look(session, keys):
    assert session.lookup(keys).states == (KeyState.HIT,) * len(keys)


def load(session, keys):
    with session.load(keys) as loaded:
        assert len(loaded.keys) == len(keys)


def store(session, keys):
    """Store as many blocks anew, and take them away."""
    others = [key(1000 + number) for number in range(len(keys))]
    assert len(session.prepare_store(others).commit()) == len(keys)
    assert session.evict(others) == len(keys)


@pytest.mark.parametrize(("verb", "messages"), [(look, 1), (load, 2), (store, 3)])
@pytest.mark.parametrize("blocks", [1, 64])
def test_a_verb_is_so_many_messages_each_way_whatever_the_blocks(count, verb, messages, blocks):
    """A lookup one, a load and its release two, a store two (and its eviction one): never one per block."""
    client, daemon, turns = count(verb, blocks, 5)
    assert client.system == {"send": 5 * messages, "recv_into": 5 * messages}
    assert daemon.system == {"send": 6 * messages}, "with the one that was not measured"
    assert turns == (0 if verb is look else 6 * messages)


def test_a_lookup_calls_as_little_for_many_keys_as_for_few(count):
    """No line of Python for each key, on neither side."""
    few, many = count(look, 16, LOOKUPS), count(look, 512, LOOKUPS)
    for name, side, bound in (("client", 0, CLIENT_CALLS), ("daemon", 1, DAEMON_CALLS)):
        calls = [meters[side].ours / LOOKUPS for meters in (few, many)]
        assert max(calls) < bound + 1, f"{name}: {calls} calls a lookup"
        assert abs(calls[0] - calls[1]) < 1, f"{name}: {calls} calls a lookup of 16 and of 512 keys"

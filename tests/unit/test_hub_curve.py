"""ZeroMQ CURVE on an audience, tried with real clients: who has the keys hears, nobody else does."""

import asyncio
import os
import time
from contextlib import asynccontextmanager

import pytest
import uvloop
import zmq
import zmq.auth

from kvtierd.config.audiences import Audience, Events
from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Medium, TierEvent, block_key
from kvtierd.edges.hub import EventHub
from kvtierd.errors import ConfigError
from kvtierd.wire.stream import END, encode_sequence

TCP = "tcp://127.0.0.1:0"
EVENT = TierEvent(
    EventKind.STORED,
    "cpu",
    Medium.CPU,
    None,
    Block.of(BlockId("ns", block_key(b"k" * 8)), 4096, BlockMeta(hashes=(1 << 63,), token_ids=(7, 8))),
)


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.fixture
def keys(tmp_path):
    """Key files as pyzmq writes them, by owner: (public file, secret file)."""
    folder = tmp_path / "keys"
    folder.mkdir()
    made = {}
    for name in ("server", "friend", "stranger"):
        public, secret = zmq.auth.create_certificates(folder, name)
        made[name] = (folder / os.path.basename(public), folder / os.path.basename(secret))
    return made


@asynccontextmanager
async def serving(folder, curve):
    audience = Audience(name="private", bind=TCP, replay=TCP, curve=curve)
    settings = {"heartbeat": 0.01, "ring_batches": 100, "ring_bytes": 1 << 20, "model": None}
    events = Events.model_construct(audiences=(audience,), **settings)
    hub = EventHub(events, tiers={"cpu": "cpu"}, state_dir=folder, clock=time.time, environ={})
    hub.start(asyncio.get_running_loop())
    try:
        yield hub
    finally:
        await hub.close(2.0)


async def hears(hub, keys, who, server="server", seconds=5.0):
    """Whether a client gets a live message and a whole replay; ``who`` None: it speaks no CURVE."""
    context = zmq.Context()
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    for socket, key in ((sub, "bind"), (dealer, "replay")):
        if who is not None:
            socket.curve_publickey, socket.curve_secretkey = zmq.auth.load_certificate(keys[who][1])
            socket.curve_serverkey = zmq.auth.load_certificate(keys[server][0])[0]
        socket.connect(hub.bound_endpoints()[key])
    dealer.send_multipart([b"", encode_sequence(0)])
    live = ended = False
    try:
        async with asyncio.timeout(seconds):
            while not (live and ended):
                await asyncio.sleep(0.001)
                live = live or bool(sub.poll(0))
                while dealer.poll(0):
                    ended = ended or dealer.recv_multipart()[-2] == END
    except TimeoutError:
        assert not live, "live messages got through"
        assert not ended, "a replay got through"
        return False
    finally:
        context.destroy(linger=0)
    return True


def test_only_clients_on_the_list_hear_anything(tmp_path, keys):
    async def main():
        curve = {"secret_key_file": keys["server"][1], "allowed_clients": [keys["friend"][0]]}
        async with serving(tmp_path, curve) as hub:
            hub.publish([EVENT])
            assert await hears(hub, keys, "friend")
            assert not await hears(hub, keys, "stranger", seconds=0.5)
            assert not await hears(hub, keys, None, seconds=0.5)
            assert not await hears(hub, keys, "friend", server="stranger", seconds=0.5)
            assert hub.statistics()["curve_refused"] > 0

    run(main)


def test_without_a_list_the_servers_public_key_is_the_pass(tmp_path, keys):
    async def main():
        async with serving(tmp_path, {"secret_key_file": keys["server"][1]}) as hub:
            hub.publish([EVENT])
            assert await hears(hub, keys, "stranger")
            assert not await hears(hub, keys, None, seconds=0.5)

    run(main)


def test_key_files_that_are_none_are_refused_and_never_shown(tmp_path, keys):
    wrong = tmp_path / "wrong"
    for content in ("", "hunter2", "h" * 41, 'secret-key = "short"'):
        wrong.write_text(content)
        with pytest.raises(ConfigError, match="holds no CURVE") as caught:
            made(tmp_path, {"secret_key_file": wrong})
        assert not content or content not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        made(tmp_path, {"secret_key_file": tmp_path / "missing"})
    with pytest.raises(ConfigError, match="holds no CURVE public"):
        made(tmp_path, {"secret_key_file": keys["server"][1], "allowed_clients": [wrong]})


def made(folder, curve):
    audience = Audience(name="private", bind=TCP, replay=TCP, curve=curve)
    settings = {"heartbeat": 1.0, "ring_batches": 1, "ring_bytes": 1, "model": None}
    events = Events.model_construct(audiences=(audience,), **settings)
    return EventHub(events, tiers={}, state_dir=folder, clock=time.time, environ={})

"""The engine socket as strangers and both clients find it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import uvloop

from kvtierd.client import (
    AsyncClient,
    AsyncSession,
    BlockMeta,
    Client,
    KeyState,
    RequestRefused,
    Scope,
    Session,
    SkipReason,
    block_key,
)
from kvtierd.core import effects, stimuli
from kvtierd.core.effects import ErrorCode
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.on_disk import copies
from kvtierd.testing.workload import payload
from kvtierd.wire.framing import Deframer, frame
from kvtierd.wire.messages import Hello, StatusReport, StatusRequest, SurveyRequest, decode_server, encode

Make = Callable[..., DaemonRig]


class Raw:
    """A connection without a client's manners."""

    def __init__(self, path: str, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5.0)
        self.socket.connect(path)
        self._deframer = Deframer()
        self._ready: list[bytes] = []
        if hello:
            assert self.ask(Hello(id=1, versions=(1, 1))).id == 1

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Any:
        while not self._ready:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                raise ConnectionResetError
            self._ready += self._deframer.feed(data)
        return decode_server(self._ready.pop(0))

    def ask(self, request: Any) -> Any:
        self.send(frame(encode(request)))
        return self.receive()

    def attach(self) -> effects.Attached:
        request = stimuli.Attach(id=2, layout=LAYOUT, engine_id="raw", process=os.urandom(16))
        attached = self.ask(request)
        assert isinstance(attached, effects.Attached)
        return attached

    def closed(self) -> bool:
        """Whether the daemon has hung up."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            return True
        return True


@pytest.fixture
def connect(rig: DaemonRig) -> Iterator[Callable[..., Raw]]:
    """Open raw connections to the rig's daemon."""
    with contextlib.ExitStack() as stack:

        def open_one(**options: Any) -> Raw:
            raw = Raw(rig.daemon.socket, **options)
            stack.callback(raw.socket.close)
            return raw

        yield open_one


Connect = Callable[..., Raw]

STRANGERS = {
    "http": (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, "TLS"),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n", "pickle"),
    "zmq": (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "ZeroMQ"),
    "random": (bytes(range(255, 155, -1)), "another protocol"),
    "4GiB": (b"\xff\xff\xff\xff", "frame length of 4294967295"),
    "empty": (b"\0\0\0\0", "length 0"),
    "no msgpack": (frame(b"\xc1\xc1\xc1"), "closed"),
}


def test_strangers_are_shown_the_door_with_a_reason(rig: DaemonRig, connect: Connect) -> None:
    """L39: closed at once, one log line that names the reason, nothing allocated, nobody else harmed."""
    made = chain(3)
    session = rig.attach()
    store(session, made)
    before, _ = rig.resources()
    errors = rig.status()["engine"]["protocol_errors"]
    for name, (hello, reason) in STRANGERS.items():
        lines = len(rig.daemon.log.read_text().splitlines())
        raw = connect(hello=False)
        raw.send(hello)
        assert raw.closed(), name
        new = wait_for(lambda: rig.daemon.log.read_text().splitlines()[lines:], "the line")  # noqa: B023
        assert len(new) == 1, (name, new)
        assert "WARNING" in new[0]
        assert reason in new[0], name
    after, _ = rig.resources()
    assert after - before < 8 << 20
    assert rig.status()["engine"]["protocol_errors"] == errors + len(STRANGERS)
    assert load(session, made) == ["cpu"] * 3


def test_half_a_frame_costs_nobody_anything(rig: DaemonRig, connect: Connect) -> None:
    """L38: cut after 1, 3, 4 and 7 bytes, greeted or not; no spin while it hangs, gone when it closes."""
    session = rig.attach()
    whole = frame(encode(Hello(id=1, versions=(1, 1))))
    cut = [connect(hello=False) for _ in range(4)] + [connect() for _ in range(4)]
    for raw, count in zip(cut, (1, 3, 4, 7) * 2, strict=True):
        raw.send(whole[:count])
    status = rig.status()["engine"]
    assert status["connections"] >= 9
    heard, (_, used) = rig.router.counts["batches"], rig.resources()
    rig.router.wait_for(lambda r: r.counts["batches"] >= heard + 4, what="four heartbeats")
    assert rig.resources()[1] - used < 0.2
    assert store(session, loose(2)) == tuple(keys_of(loose(2)))
    for raw in cut:
        raw.socket.close()
    wait_for(lambda: rig.status()["engine"]["connections"] <= 2, "the connections to end")
    assert rig.status()["engine"]["protocol_errors"] == status["protocol_errors"]


def test_a_request_in_single_bytes_is_a_request(connect: Connect) -> None:
    """Frames may come in pieces of any size."""
    raw = connect()
    for byte in frame(encode(StatusRequest(id=9))):
        raw.send(bytes([byte]))
    assert raw.receive().id == 9


def test_versions_are_agreed_or_refused_in_words(connect: Connect) -> None:
    """L37."""
    for versions in ((1, 1), (0, 9), (1, 7)):
        assert connect(hello=False).ask(Hello(id=1, versions=versions)).version == 1
    for versions in ((2, 5), (0, 0)):
        reply = connect(hello=False).ask(Hello(id=1, versions=versions))
        assert reply.code is ErrorCode.BAD_VERSION
        assert f"the client speaks {versions[0]}-{versions[1]}, this daemon 1-1" in reply.message


def test_what_a_newer_client_adds_is_ignored_or_answered(connect: Connect) -> None:
    """L37: unknown fields are skipped; unknown and misplaced requests get a coded answer."""
    early = connect(hello=False)
    assert early.ask(StatusRequest(id=3)).code is ErrorCode.NOT_ATTACHED
    raw = connect()
    body = msgspec.msgpack.encode({"type": "status", "id": 4, "shiny": {"new": [1, 2]}})
    raw.send(frame(body))
    assert raw.receive().id == 4
    raw.send(frame(msgspec.msgpack.encode({"type": "teleport", "id": 5})))
    assert raw.receive().code is ErrorCode.BAD_REQUEST
    assert raw.ask(stimuli.Lookup(id=6, keys=())).code is ErrorCode.NOT_ATTACHED
    raw.attach()
    assert raw.ask(stimuli.Lookup(id=7, keys=())).id == 7
    assert raw.ask(Hello(id=8, versions=(1, 1))).code is ErrorCode.NOT_ALLOWED


def test_requests_are_pipelined_and_each_gets_its_answer(connect: Connect) -> None:
    """The issue: every request gets an answer."""
    raw = connect()
    raw.attach()
    asked = [stimuli.Lookup(id=number, keys=(block_key(b"k"),)) for number in range(10, 2010)]
    raw.send(b"".join(frame(encode(request)) for request in asked))
    assert [raw.receive().id for _ in asked] == [request.id for request in asked]


def test_a_request_with_the_number_of_an_attach_harms_nobody(rig: DaemonRig, connect: Connect) -> None:
    """Numbers are the client's; one used twice must not leave a session that nobody closes."""
    raw = connect()
    attach = stimuli.Attach(id=2, layout=LAYOUT, engine_id="raw", process=os.urandom(16))
    raw.send(
        b"".join(frame(encode(request)) for request in (attach, SurveyRequest(id=2), StatusRequest(id=2)))
    )
    kinds = {type(raw.receive()) for _ in range(3)}
    assert kinds == {effects.Attached, effects.Refused, StatusReport}
    assert raw.ask(stimuli.Lookup(id=3, keys=(block_key(b"k"),))).id == 3
    raw.socket.close()
    wait_for(lambda: not rig.status()["sessions"], "the end of the session")


def test_a_client_that_does_not_read_harms_only_itself(rig: DaemonRig, connect: Connect) -> None:
    """Bounded answers: the daemon stops reading from it and serves the others."""
    raw = connect()
    raw.socket.settimeout(0.5)
    request = frame(encode(StatusRequest(id=1)))
    with contextlib.suppress(TimeoutError):
        for _ in range(400):
            raw.send(request * 100)
    session = rig.attach()
    assert store(session, loose(2)) == tuple(keys_of(loose(2)))
    assert load(session, loose(2)) == ["cpu"] * 2
    assert rig.resources()[0] < 250 << 20


def test_a_commit_for_another_pool_or_generation_is_not_stored(rig: DaemonRig, connect: Connect) -> None:
    """DESIGN 4: after a restart workers still hold the old mapping."""
    raw = connect()
    pool_id = raw.attach().pool_id
    key = block_key(b"k" * 32)
    for wrong in ({"pool_id": "0" * 32}, {"generation": 77}):
        prepared = raw.ask(stimuli.PrepareStore(id=5, keys=(key,)))
        right = {"job": prepared.job, "generation": prepared.generation, "pool_id": pool_id}
        assert raw.ask(stimuli.Commit(id=6, **{**right, **wrong})).code is ErrorCode.STALE_POOL
        assert raw.ask(stimuli.Lookup(id=7, keys=(key,))).states == (KeyState.MISS,)
        assert raw.ask(stimuli.Commit(id=8, **right)).code is ErrorCode.UNKNOWN_JOB
    raw.ask(stimuli.Goodbye(id=9))
    assert rig.settle()["quarantined_slots"] == 0


def test_engines_cannot_attach_at_the_control_socket(rig: DaemonRig) -> None:
    """It is for people and probes."""
    with pytest.raises(RequestRefused, match=r"not_allowed.*engine\.sock"):
        Client(rig.folder / "run" / "control.sock").attach(LAYOUT, engine_id="e0")


def test_mistakes_are_refused_and_change_nothing(rig: DaemonRig) -> None:
    """L91, L123, L126: a wrong scope, tier, group, metadata, or a block that is its own parent."""
    session = rig.attach()
    (block,) = loose(1)
    itself = BlockMeta(hashes=(5,), parent=5, token_ids=(1, 2, 3, 4), block_size=4)
    scope = Scope(store_to=("dsik",))
    for wrong, code in (
        (lambda: session.prepare_store([block.key], scope=scope), "unknown_tier"),
        (lambda: session.load([block.key], scope=Scope(load_from=("dsik",))), "unknown_tier"),
        (lambda: session.evict([block.key], ["dsik"]), "unknown_tier"),
        (lambda: session.inventory("dsik"), "unknown_tier"),
        (lambda: session.lookup([block_key(b"k", 1)]), "bad_request"),
        (lambda: session.lookup([block_key(b"")]), "bad_request"),
        (lambda: session.lookup([block_key(b"k" * 65)]), "bad_request"),
        (lambda: session.prepare_store([block.key], meta=[itself]), "bad_request"),
        (lambda: rig.client.attach(LAYOUT, engine_id="e1", rank=1), "bad_request"),
    ):
        with pytest.raises(RequestRefused, match=code):
            wrong()
    status = rig.settle()
    assert (status["jobs"], status["tiers"][0]["blocks"]) == (0, 0)
    assert rig.router.events == []
    assert session.connected


def test_hostile_names_stay_names(make: Make) -> None:
    """L126: models and tenants that look like paths; what is written stays below the root."""
    rig = make().start()
    for name in ("../x", "/etc", "a/../../b", "nul\0", "x" * 4096):
        layout = msgspec.structs.replace(LAYOUT, model=name, tenant=name)
        with rig.attach(layout, engine_id=name) as session:
            assert session.put(block_key(b"../../../k"), b"p" * 4096)
            rig.settle()
    disk = rig.folder / "disk"
    assert {path.name for path in rig.folder.iterdir()} == {
        "run",
        "state",
        "disk",
        "kvtierd.yaml",
        "kvtierd.log",
    }
    assert {path.name for path in disk.iterdir()} == {"v1", "quarantine", "lock"}
    spaces = [path.name for path in (disk / "v1").iterdir()]
    assert all(len(name) == 32 for name in spaces)
    assert [len(copies(disk, name)) for name in spaces] == [1] * 5


def test_the_inventory_comes_in_pages(make: Make) -> None:
    """More entries than fit a page, exact and without repeats."""
    rig = make(slots=10_000, tiers=[], paranoid=False).start()
    session = rig.attach()
    made = loose(10_000)
    assert len(store(session, made)) == 10_000
    entries = session.inventory("cpu")
    assert sorted(entry.key for entry in entries) == sorted(keys_of(made))


def everything(session: Session) -> None:
    """One walk over all verbs of the blocking client."""
    made = chain(6)
    job = session.prepare_store(keys_of(made[:4]), meta=[block.meta for block in made[:4]])
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, len(view))
    assert job.commit() == tuple(keys_of(made[:4]))
    again = session.prepare_store(keys_of(made[:5]), meta=[block.meta for block in made[:5]])
    assert [skip.reason for skip in again.skipped] == [SkipReason.RESIDENT] * 4
    again.abort()
    found = session.lookup(keys_of(made), lease=5.0)
    assert (found.prefix, found.leased, found.states[4]) == (4, 4, KeyState.MISS)
    found.release()
    assert session.put(made[4].key, payload(made[4].key, 4096), made[4].meta)
    assert session.get(made[4].key) == payload(made[4].key, 4096)
    assert session.get(made[5].key) is None
    wait_for(lambda: len(session.inventory("disk")) == 5, "the files")
    assert session.touch(keys_of(made)) == 10
    with session.load(keys_of(made)) as held:
        assert session.renew(held) == 1
    assert session.renew(held) == 0
    assert session.evict(keys_of(made[:5]), ["cpu"]) == 5
    assert session.prefetch(keys_of(made[:2])) == 2
    wait_for(lambda: session.lookup(keys_of(made)).states[:2] == (KeyState.HIT,) * 2, "the prefetch")
    with session.load(keys_of(made), deadline=5.0) as got:
        assert got.sources == ("cpu", "cpu", "disk", "disk", "disk")
        assert [bytes(view) for view in got.views()] == [payload(key, 4096) for key in got.keys]
    assert session.reset(["disk"]) == 5
    assert session.reset() == 5
    assert session.inventory() == []


async def everything_async(session: AsyncSession) -> None:
    """The same walk with the asyncio client."""
    made = chain(6)
    job = await session.prepare_store(keys_of(made[:4]), meta=[block.meta for block in made[:4]])
    for key, view in zip(job.keys, job.views(), strict=True):
        view[:] = payload(key, len(view))
    assert await job.commit() == tuple(keys_of(made[:4]))
    again = await session.prepare_store(keys_of(made[:5]), meta=[block.meta for block in made[:5]])
    assert [skip.reason for skip in again.skipped] == [SkipReason.RESIDENT] * 4
    await again.abort()
    async with await session.lookup(keys_of(made), lease=5.0) as found:
        assert (found.prefix, found.leased, found.states[4]) == (4, 4, KeyState.MISS)
    assert await session.put(made[4].key, payload(made[4].key, 4096), made[4].meta)
    assert await session.get(made[4].key) == payload(made[4].key, 4096)
    assert await session.get(made[5].key) is None
    await until(lambda: session.inventory("disk"), lambda entries: len(entries) == 5)
    assert await session.touch(keys_of(made)) == 10
    reserved = await session.prepare_store(keys_of(loose(2, "renewed")))
    assert await session.renew(reserved) == 1
    await reserved.abort()
    assert await session.renew(reserved) == 0
    assert await session.evict(keys_of(made[:5]), ["cpu"]) == 5
    assert await session.prefetch(keys_of(made[:2])) == 2
    await until(lambda: session.lookup(keys_of(made)), lambda found: found.states[:2] == (KeyState.HIT,) * 2)
    async with await session.load(keys_of(made), deadline=5.0) as got:
        assert got.sources == ("cpu", "cpu", "disk", "disk", "disk")
        assert [bytes(view) for view in got.views()] == [payload(key, 4096) for key in got.keys]
    many = await asyncio.gather(*(session.lookup([block.key]) for block in made for _ in range(50)))
    assert sum(found.prefix for found in many) == 250
    assert await session.reset(["disk"]) == 5
    assert await session.reset() == 5
    assert await session.inventory() == []


async def until(ask: Callable[[], Any], enough: Callable[[Any], bool]) -> None:
    """Ask again until the answer will do."""
    async with asyncio.timeout(10):
        while not enough(await ask()):
            pass


def test_every_verb_with_both_clients(rig: DaemonRig) -> None:
    """The issue: the same verbs, the same answers; asyncio and uvloop."""
    rig.layouts.add(LAYOUT)

    async def walk() -> None:
        async with AsyncClient(rig.daemon.socket, deadline=10.0) as client:
            async with await client.attach(LAYOUT, engine_id="async") as session:
                await everything_async(session)
            assert (await client.status())["state"] == "ready"

    everything(rig.attach())
    asyncio.run(walk())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(walk())


def test_the_asyncio_client_waits_out_a_crash_too(rig: DaemonRig) -> None:
    """L112: misses at once while the daemon is away, then back by itself with the new pool."""
    made = chain(3)
    store(rig.attach(), made)
    rig.settle()

    async def live() -> None:
        async with AsyncClient(rig.daemon.socket, deadline=10.0) as client:
            session = await client.attach(LAYOUT, engine_id="async")
            pool_id = session.pool_id
            rig.daemon.kill()
            async with asyncio.timeout(1.0):
                for _ in range(20):
                    assert (await session.lookup(keys_of(made))).prefix == 0
                assert await session.get(made[0].key) is None
                assert await session.put(made[0].key, b"x" * 4096) is False
            await asyncio.to_thread(rig.restart, crash=True)
            await until(lambda: session.lookup(keys_of(made)), lambda found: found.prefix == 3)
            assert session.pool_id != pool_id
            assert await session.get(made[0].key) == payload(made[0].key, 4096)

    asyncio.run(live())

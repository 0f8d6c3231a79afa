"""What a hard day brings: subscribers that stall, rubbish on every port, no descriptors left."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq

from kvtierd.client import Client, Group, KeyState, block_key, hash_of
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, Router, chain, fs_tier, keys_of, load, loose, store
from kvtierd.testing.workload import WorkBlock, payload
from kvtierd.wire.kvevents import BlockStored
from kvtierd.wire.stream import END, encode_sequence

Make = Callable[..., DaemonRig]


def test_without_descriptors_reads_fail_and_no_file_is_lost(rig: DaemonRig) -> None:
    """L43, L81: EMFILE is a passing fault: a miss now, a hit when it is over; stores to the pool go on."""
    session = rig.attach()
    made = loose(5)
    store(session, made)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    with rig.descriptors(0):
        assert load(session, made) == []
        assert store(session, loose(3, "new")) == tuple(keys_of(loose(3, "new")))
        assert load(session, loose(3, "new")) == ["cpu"] * 3
    wait_for(lambda: load(session, made) == ["disk"] * 5, "the disk to be asked again")
    rig.settle()
    assert not any(
        told[0] == "BlockRemoved" and told[1] == "STORAGE" for b in made for told in rig.router.told(b)
    )


def test_too_many_connections_hurt_only_the_last_ones(rig: DaemonRig) -> None:
    """L81: the daemon lives, its clients are served, and there is room again afterwards."""
    session = rig.attach()
    made = loose(3)
    store(session, made)
    rig.settle()
    with ExitStack() as stack, rig.descriptors(12):
        for _ in range(60):
            extra = stack.enter_context(socket.socket(socket.AF_UNIX))
            extra.connect(rig.daemon.socket)
        for _ in range(20):
            assert load(session, made) == ["cpu"] * 3
    wait_for(lambda: rig.status()["engine"]["connections"] <= 3, "the connections to end")
    assert rig.attach(engine_id="later").connected


def test_descriptors_do_not_leak(rig: DaemonRig) -> None:
    """L81, L101: sessions that come and go, promotions, failed reads."""
    made = loose(4)

    def cycle(count: int) -> None:
        for number in range(count):
            with rig.attach(engine_id=f"e{number}") as session:
                store(session, made)
                rig.settle()
                session.evict(keys_of(made), ["cpu"])
                rig.copies()[made[0].key].remove()
                assert load(session, made[1:]) == ["disk"] * 3
                assert load(session, made) == []

    def opened() -> int:
        return len(os.listdir(f"/proc/{rig.daemon.pid}/fd"))

    cycle(5)
    before = opened()
    cycle(20)
    assert wait_for(lambda: opened() <= before + 1, "descriptors to be closed")


def test_a_stalled_subscriber_costs_the_engine_nothing(make: Make) -> None:
    """L20, L27: high-water mark 1 and nobody reads; other routers lose nothing for good."""
    rig = make(slots=64, tiers=[], paranoid=False)
    rig.edit(lambda body: body["events"]["audiences"][0].update(hwm=1))
    rig.start()
    session = rig.attach()

    def stores(prefix: str) -> float:
        times = []
        for block in loose(500, prefix):
            start = time.perf_counter()
            store(session, [block])
            times.append(time.perf_counter() - start)
        return sorted(times)[494]

    alone = stores("alone")
    with zmq.Context() as context, context.socket(zmq.SUB) as stalled:
        stalled.setsockopt(zmq.RCVHWM, 1)
        stalled.setsockopt(zmq.LINGER, 0)
        stalled.subscribe(b"")
        stalled.connect(rig.daemon.endpoint)
        stalled.recv_multipart()
        crowded = stores("crowded")
    assert crowded < max(4 * alone, 0.005)
    rig.agree()


def test_rubbish_on_the_stream_s_ports_is_survived(rig: DaemonRig) -> None:
    """L24, L130, L132: raw bytes, malformed and absurd replay requests; the stream goes on."""
    ports = [int(end.rpartition(":")[2]) for end in (rig.daemon.endpoint, rig.daemon.replay)]
    with ExitStack() as stack:
        for port in ports:
            for rubbish in (
                b"\0" * 64,
                b"GET / HTTP/1.1\r\n\r\n",
                b"\xff" + os.urandom(200),
                os.urandom(4096),
            ):
                stream = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                stream.sendall(rubbish)
        context = stack.enter_context(zmq.Context())
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(rig.daemon.replay)
        for frames in (
            [b""],
            [b"x"],
            [b"", b""],
            [b"", b"short"],
            [b"", b"\xff" * 8],
            [b"", b"a", b"b", b"c"],
        ):
            dealer.send_multipart(frames)
        store(rig.attach(), chain(4))
        rig.settle()
        dealer.send_multipart([b"", encode_sequence(0)])
        while (reply := dealer.recv_multipart())[-1] or END not in reply:
            pass
    rig.agree(rig.catch_up(rig.follow(rig.router)))


def test_every_group_and_rank_of_a_layout_has_its_own_bytes(rig: DaemonRig) -> None:
    """L07, L33: events name group and block size; equal hashes of two groups are two blocks."""
    layout = msgspec.structs.replace(
        LAYOUT,
        model="hybrid",
        groups=(Group(tokens_per_block=16, block_bytes=1500), Group(tokens_per_block=64, block_bytes=700)),
        ranks=2,
    )
    with rig.attach(layout) as session:
        made = chain(3)
        for group, size in ((0, 1500), (1, 700)):
            for block in made:
                key = block_key(hash_of(block.key), group)
                assert session.put(key, payload(key, 2 * size), block.meta)
        rig.settle()
        session.reset(["cpu"])
        for group, size in ((0, 1500), (1, 700)):
            for block in made:
                key = block_key(hash_of(block.key), group)
                assert session.get(key, deadline=5.0) == payload(key, 2 * size)
        rig.settle()
        told = {(e.block_hashes[0], e.group_idx) for e in rig.router.events if isinstance(e, BlockStored)}
        assert told == {(block.meta.hashes[0], group) for block in made for group in (0, 1)}
        rig.agree()


def test_a_daemon_without_events_serves(make: Make) -> None:
    """L96: no stream is bound, everything else works."""
    rig = make()
    rig.edit(lambda body: body["events"].update(enabled=False))
    rig.daemon.start()
    with rig.client.attach(LAYOUT, engine_id="e0") as session:
        made = chain(5)
        store(session, made)
        assert load(session, made) == ["cpu"] * 5
    port = int(rig.daemon.endpoint.rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    rig.client.close()
    assert rig.daemon.stop() == 0


def test_a_tier_without_events_is_silent(make: Make) -> None:
    """L96: its copies are used and never announced."""
    rig = make()
    rig.edit(lambda body: body["tiers"][1].update(events=False))
    rig.start()
    session = rig.attach()
    made = chain(3)
    store(session, made)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made) == ["disk"] * 3
    rig.settle()
    assert {event.medium for event in rig.router.events} == {"CPU"}


def test_token_ids_stay_home_when_told_so(make: Make) -> None:
    """L125: no token id appears in any batch, replayed ones included."""
    rig = make()
    rig.edit(lambda body: body["events"]["audiences"][0].update(tokens=False))
    rig.start()
    store(rig.attach(), chain(5))
    rig.settle()
    with Router() as late:
        rig.follow(late)
        for router in (rig.router, late):
            stored = [event for event in router.events if isinstance(event, BlockStored)]
            assert len(stored) == 10
            assert {event.token_ids for event in stored} == {()}


def test_disks_have_their_own_content_and_a_reset_of_one_leaves_the_other(make: Make) -> None:
    """Scopes and resets are by tier; a load falls back to the next tier that has the block."""
    rig = make()
    below = [
        fs_tier(rig.folder, name, locality=where) for name, where in (("near", "LOCAL"), ("far", "REMOTE"))
    ]
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], *below]))
    rig.start()
    session = rig.attach()
    made: list[WorkBlock] = chain(6)
    store(session, made)
    rig.settle()
    session.evict(keys_of(made), ["cpu"])
    session.evict([block.key for block in made[3:]], ["near"])
    assert load(session, made) == ["near"] * 3 + ["far"] * 3
    session.reset(["cpu", "near"])
    rig.settle()
    assert not list(Path(rig.folder, "near", "v1").rglob("*.0"))
    assert load(session, made) == ["far"] * 6
    session.reset()
    assert session.lookup(keys_of(made)).states == (KeyState.MISS,) * 6


def test_status_is_there_for_anybody_on_both_sockets(rig: DaemonRig) -> None:
    """It needs no attach and counts what happened."""
    store(rig.attach(), chain(3))
    rig.settle()
    for name in ("engine.sock", "control.sock"):
        status = Client(rig.folder / "run" / name).status()
        assert status["state"] == "ready"
        assert [(tier["name"], tier["blocks"]) for tier in status["tiers"]] == [("cpu", 3), ("disk", 3)]
        assert status["pool"]["prefaulted_bytes"] == status["pool"]["bytes"]

"""Bad neighbours on the sockets: floods, trickles, mutated frames; and what an engine notices of them."""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvtierd.client import Client, RequestRefused, Session
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.fuzz import Mutator, client_seeds

Make = Callable[..., DaemonRig]

FRAMES = int(os.environ.get("KVTIERD_FUZZ_FRAMES", "20000"))

FLOOD = """
import socket, sys, time
from kvtierd.client import Client
from kvtierd.core.stimuli import Lookup
from kvtierd.testing.daemon_rig import LAYOUT, keys_of, loose
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import Hello, StatusRequest, encode

hello = frame(encode(Hello(id=1, versions=(1, 1))))
loris = []
for _ in range(40):
    one = socket.socket(socket.AF_UNIX); one.connect(sys.argv[1]); one.sendall(hello + b"\\0\\1\\0")
    loris.append(one)
client = Client(sys.argv[1], deadline=20.0)
session = client.attach(LAYOUT, engine_id="flood")
line = session._line
keys = tuple(keys_of(loose(100)))
many = b"".join(frame(encode(Lookup(id=n, keys=keys))) for n in range(1, 500))
status = socket.socket(socket.AF_UNIX); status.connect(sys.argv[1]); status.sendall(hello)
channel = line.channel.sock
for one in (channel, status): one.setblocking(False)
print("busy", flush=True)
floods = [[channel, many, b""], [status, frame(encode(StatusRequest(id=7))) * 50, b""]]
while True:
    for flood in floods:
        one, data, rest = flood
        rest = rest or data
        try: flood[2] = rest[one.send(rest):]
        except BlockingIOError: flood[2] = rest
        try: one.recv(1 << 20)
        except BlockingIOError: pass
    for one in loris[:4]:
        try: one.send(b"\\0")
        except OSError: pass
    time.sleep(0.0005)
"""


def waited(rig: DaemonRig) -> float:
    """Return the seconds that the daemon's loop and this thread have waited for a core: not their doing."""
    tasks = (f"/proc/{rig.daemon.pid}/task/{rig.daemon.pid}", "/proc/thread-self")
    return sum(int(Path(task, "schedstat").read_text().split()[1]) for task in tasks) / 1e9


def tail_of_lookups(rig: DaemonRig, session: Session, seconds: float) -> float:
    """Return the 99th percentile of what a small lookup takes, in seconds, waits for a core left out."""
    keys = keys_of(loose(8))
    took = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        queued, begin = waited(rig), time.perf_counter()
        assert len(session.lookup(keys).states) == 8
        took.append(time.perf_counter() - begin - (waited(rig) - queued))
        rig.router.poll()
    assert len(took) > 100
    return statistics.quantiles(took, n=100)[98]


@pytest.mark.slow
def test_floods_and_trickles_are_not_felt_by_others(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The issue: at most half as long again at the 99th percentile, noise of a busy machine apart."""
    rig = make(slots=64, paranoid=False).start()
    session = rig.attach()
    store(session, loose(8))
    rig.settle()
    best = None
    for _ in range(3):
        alone = tail_of_lookups(rig, session, 1.5)
        with subprocess.Popen(
            [sys.executable, "-c", FLOOD, rig.daemon.socket], stdout=subprocess.PIPE, text=True
        ) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == "busy\n"
                busy = tail_of_lookups(rig, session, 2.0)
            finally:
                flood.kill()
        best = (busy / alone, alone, busy) if best is None or busy / alone < best[0] else best
        wait_for(lambda: rig.status()["engine"]["in_line"] == 0, "the flood to be over")
        verbs = rig.status()["engine"]["requests"]["verbs"]
        assert min(verbs["status"]["ok"], verbs["lookup"]["ok"]) > 300, "it was no flood"
        if best[0] < 1.5 or best[2] < best[1] + 0.0005:
            break
    assert best is not None
    with capsys.disabled():
        print(f"\np99 of a lookup: {best[1] * 1e3:.2f} ms alone, {best[2] * 1e3:.2f} ms in a flood", end="")
    assert best[0] < 1.5 or best[2] < best[1] + 0.0005
    wait_for(lambda: rig.status()["engine"]["connections"] <= 2, "the flood to be gone")
    assert load(session, loose(8)) == ["cpu"] * 8


@pytest.mark.soak
@pytest.mark.timeout(FRAMES / 100 + 60)
def test_mutated_frames_end_their_connection_with_one_line(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """L124: every invariant after every turn; the daemon serves on, and does not grow."""
    seed = int(os.environ.get("KVTIERD_SOAK_SEED", random.SystemRandom().getrandbits(32)))
    rng = random.Random(seed)
    mutator = Mutator(rng, client_seeds())
    rig = make(slots=64).start()
    session = rig.attach()
    made = chain(4)
    store(session, made)
    rig.settle()
    peers = before = 0
    while mutator.frames < FRAMES:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5.0)
            peer.connect(rng.choice((rig.daemon.socket, str(rig.folder / "run" / "control.sock"))))
            said = [mutator.conversation() for _ in range(rng.choice((1, 1, 10)))]
            with suppress(OSError):
                peer.sendall(b"".join(said))
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass
            peers += 1
        if peers % 50 == 0:
            rig.router.poll()
            if load(session, made) != ["cpu"] * 4:  # a mutated evict or reset of the same namespace
                store(session, made)
        if peers == 100:
            before = rig.resources()[0]
    engine, control = rig.status()["engine"], rig.status()["control"]
    errors = engine["protocol_errors"] + control["protocol_errors"]
    lines = [line for line in rig.daemon.log.read_text().splitlines() if " closed: " in line]
    unlogged = engine["unlogged"] + control["unlogged"]
    with capsys.disabled():
        print(f"\nseed {seed}: {mutator.frames} frames of {peers} peers, {errors} of them closed", end="")
    assert errors > 0
    assert len(lines) + unlogged >= errors
    assert len(lines) <= errors + engine["shed"] + engine["timeouts"] + engine["refused"]
    assert rig.resources()[0] - before < 32 << 20
    wait_for(lambda: rig.status()["engine"]["connections"] <= 2, "the peers to be gone")
    # This process is all of the peers and lives: what they reserved stays aside, and nothing else is held.
    status = rig.status()
    assert (status["jobs"], status["leases"], status["loads_waiting"]) == (0, 0, 0)
    assert rig.complaints() == []


def test_raw_bytes_on_the_streams_ports_harm_nobody(rig: DaemonRig) -> None:
    """L130: PUB and ROUTER under garbage, half of it behind a right greeting."""
    rng = random.Random(7)
    mutator = Mutator(rng, [b"\xff" + bytes(8) + b"\x01\x7f\x03\x01NULL" + bytes(48)])
    ports = [int(where.rpartition(":")[2]) for where in (rig.daemon.endpoint, rig.daemon.replay)]
    for _ in range(300):
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", rng.choice(ports)), timeout=2.0) as peer,
        ):
            peer.sendall(rng.choice((mutator.payload, mutator.bytes))())
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(rig.daemon.replay)
        for _ in range(300):
            dealer.send_multipart([rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 5))])
    store(rig.attach(), chain(4))
    rig.agree()


def test_only_those_on_the_list_attach(make: Make) -> None:
    """The list names other users: we may not; root and the daemon's own user could read its memory anyway."""
    rig = make()
    stranger = os.getuid() + 12345
    rig.edit(lambda body: body.update(access={"engine": {"uids": [stranger]}}))
    rig.start()
    assert rig.attach().connected, "the daemon's own user is always let in"


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: another user's connection needs root")
def test_another_user_who_is_not_listed_hears_why(make: Make) -> None:
    """L113, L129: the kernel says who it is."""
    rig = make()
    rig.edit(
        lambda body: body.update(
            access={"mode": "0666", "engine": {"uids": [4242]}, "control": {"uids": [4242]}}
        )
    )
    os.chmod(rig.folder.parent, 0o755)
    rig.folder.chmod(0o755)
    (rig.folder / "run").chmod(0o755)
    rig.start()
    assert os.stat(rig.daemon.socket).st_mode & 0o777 == 0o666
    for uid, welcome in ((4242, True), (4243, False)):
        os.seteuid(uid)
        try:
            if welcome:
                assert Client(rig.daemon.socket).status()["state"] == "ready"
            else:
                with pytest.raises(RequestRefused, match=f"not_allowed.*uid {uid}.*access"):
                    Client(rig.daemon.socket).status()
        finally:
            os.seteuid(0)
    assert rig.status()["engine"]["not_allowed"] == 1

"""``kvtierd events watch`` beside a real daemon: it says that all is equal, or what differs."""

import json
import subprocess
import sys

import pytest

from kvtierd.cli.events_watch import _line, _verdicts
from kvtierd.client import Client, Group, Layout
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.testing.local_daemon import LocalDaemon, free_port, short_folder
from kvtierd.testing.workload import Chain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

BLOCK = 4096
LAYOUT = Layout(
    model="m", dtype="uint8", layout="test", groups=(Group(tokens_per_block=4, block_bytes=BLOCK),)
)


def ends():
    return {key: f"tcp://127.0.0.1:{free_port()}" for key in ("bind", "replay")}


AUDIENCES = [
    {"name": "plain", **ends()},
    {"name": "gateway", "preset": "aibrix", **ends()},
    {"name": "old", "preset": "vllm-0.26", **ends()},
    {"name": "ranks", "preset": "dynamo", **ends()},
]


@pytest.fixture
def daemon():
    changes = {"events": {"heartbeat": "200ms", "audiences": AUDIENCES}}
    with (
        short_folder("watch") as folder,
        LocalDaemon(folder, pool_bytes=40 * BLOCK, disk_bytes=4 << 20, changes=changes) as running,
    ):
        yield running


def store(session, first, count):
    chain = Chain(4, b"watch")
    chain.extend(range(first, first + 4 * count))
    keys = [block.key for block in chain.blocks]
    job = session.prepare_store(keys, meta=[block.meta for block in chain.blocks])
    assert job.commit()


def watch(daemon, audience, *more):
    command = [sys.executable, "-m", "kvtierd", "events", "watch", "--socket"]
    done = subprocess.run(
        [*command, str(daemon.folder / "run" / "control.sock"), "--audience", audience, "--once", *more],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_every_audience_is_equal_to_the_inventory_while_blocks_come_and_go(daemon):
    with Client(daemon.socket, deadline=5.0) as client, Client(daemon.socket, deadline=5.0) as other:
        session = client.attach(LAYOUT, engine_id="engine-0")
        other.attach(LAYOUT, engine_id="engine-1", dp_rank=1)
        for first in range(0, 800, 40):  # several times what the pool holds
            store(session, first, 10)
        for audience in AUDIENCES:
            code, out = watch(daemon, audience["name"], "--json")
            verdict = json.loads(out)
            assert verdict["equal"], verdict
            assert code == 0
            assert verdict["residencies"] > 0
        assert "equal to the daemon's inventory" in watch(daemon, "plain")[1]


def test_what_a_reader_missed_or_made_up_is_listed(daemon):
    with Client(daemon.socket, deadline=5.0) as client, ReferenceConsumer() as consumer:
        store(client.attach(LAYOUT, engine_id="engine-0"), 0, 5)
        consumer.connect(AUDIENCES[0]["bind"], AUDIENCES[0]["replay"])
        consumer.wait_for(lambda c: len(c.resident) == 10)
        lost = consumer.resident.pop()
        consumer.resident.add(lost._replace(hash=1 << 63))
        consumer.resident.add(lost._replace(hash=1, medium="GPU"))
        control = Client(str(daemon.folder / "run" / "control.sock"), deadline=5.0)
        verdict = next(_verdicts(control, consumer, "plain", 0.1))
        assert not verdict["equal"]
        assert [name[:16] for name in verdict["missing"]] == [f"{lost.hash:016x}"]
        assert [name[:16] for name in verdict["extra"]] == ["8000000000000000"]
        assert "1 missing, 1 too many" in _line(verdict)


def test_an_unknown_audience_and_a_silent_daemon_are_said_in_words(daemon):
    socket = str(daemon.folder / "run" / "control.sock")
    command = [sys.executable, "-m", "kvtierd", "events", "watch", "--socket"]
    unknown = subprocess.run(
        [*command, socket, "--audience", "x"], capture_output=True, text=True, timeout=30, check=False
    )
    assert unknown.returncode == 78
    assert "plain, gateway, old, ranks" in unknown.stderr
    nobody = subprocess.run([*command, socket + "x"], capture_output=True, text=True, timeout=30, check=False)
    assert nobody.returncode == 69

"""The whole daemon over a real object server: blocks outlive it, others find them, faults hurt nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import msgspec
import pytest

from kvtierd.client import KeyState
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, chain, keys_of, load, loose, store
from kvtierd.testing.fault_proxy import Fault, Kind
from kvtierd.testing.local_daemon import short_folder
from kvtierd.testing.object_server import ACCESS_KEY, SECRET_KEY


@pytest.fixture
def make(proxy, prefix, keys):
    """A function that makes daemons with a tier in the test's own prefix, behind the proxy."""
    rigs = []
    with short_folder("lake") as folder:

        def build(**settings):
            lake = {
                "name": "lake",
                "type": "object",
                "url": f"s3://blocks/{prefix}",
                "endpoint": proxy.endpoint,
                "locality": "REMOTE",
                "credentials": {
                    "access_key_variable": "LAKE_ACCESS_KEY",
                    "secret_key_variable": "LAKE_SECRET_KEY",
                },
                "connect_timeout": "300ms",
                "request_timeout": "1s",
                "deadline": "2s",
            }
            path = folder / str(len(rigs))
            path.mkdir()
            rigs.append(DaemonRig(path, tiers=[lake | settings]))
            return rigs[-1].start()

        try:
            yield build
            proxy.set(None)
            proxy.release()
            for rig in rigs:
                shown = rig.daemon.log.read_text() + rig.daemon.config.read_text()
                if rig.daemon.pid is not None:
                    rig.agree()
                    shown += json.dumps(rig.status())
                assert rig.complaints() == []
                assert SECRET_KEY not in shown  # L86
                assert ACCESS_KEY not in shown
        finally:
            for rig in rigs:
                rig.close()


def settled(rig, count):
    """Wait for a quiet point, at which the tier holds ``count`` blocks."""
    rig.settle()
    assert rig.tier("lake")["blocks"] == count


def test_blocks_come_back_from_the_bucket_and_are_announced(make):
    rig = make()
    session = rig.attach()
    made = chain(6)
    store(session, made)
    settled(rig, 6)
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made) == ["lake"] * 6
    assert rig.router.told(made[0])[1] == ("BlockStored", "STORAGE", "REMOTE")


def test_another_daemon_finds_what_is_in_a_shared_bucket(make):
    first = make()
    made = chain(5)
    store(first.attach(), made)
    settled(first, 5)
    second = make()
    session = second.attach()
    wanted = keys_of(made)
    wait_for(
        lambda: session.lookup(wanted, promote=True).states == (KeyState.HIT,) * 5,
        "the second daemon to have looked and promoted",
    )
    second.settle()
    assert second.tier("lake")["blocks"] == 5
    session.evict(wanted, ["cpu"])
    assert load(session, made) == ["lake"] * 5
    assert second.router.told(made[0])[0] == ("BlockStored", "STORAGE", "REMOTE")


def test_tools_look_after_the_bucket_of_a_stopped_daemon(make):
    rig = make()
    store(rig.attach(), chain(4))
    settled(rig, 4)
    rig.client.close()
    assert rig.daemon.stop() == 0
    for tool, told in (("verify", "4"), ("gc", "tiny")):
        command = [sys.executable, "-m", "kvtierd", tool, "--config", str(rig.daemon.config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        assert told in done.stdout
        assert SECRET_KEY not in done.stdout + done.stderr


def test_a_bucket_of_our_own_is_listed_at_start(make):
    rig = make(shared=False)
    made = chain(5)
    store(rig.attach(), made)
    settled(rig, 5)
    rig.client.close()
    rig.restart(crash=True)
    settled(rig, 5)
    assert load(rig.attach(), made) == ["lake"] * 5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(Kind.REFUSE, 403, "AccessDenied"), "access denied (403 AccessDenied)"),
        (Fault(Kind.REFUSE, 404, "NoSuchBucket"), "the bucket does not exist (404 NoSuchBucket)"),
        (Fault(Kind.HANG), "no answer in time"),
        (Fault(Kind.RESET), "the connection was reset"),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Fault) else "",
)
def test_a_store_that_fails_from_the_start_costs_only_its_own_hits(make, proxy, fault, reason):
    """L84, L87: the daemon starts, serves from the pool at once, says why, and stops in its grace."""
    proxy.set(fault)
    rig = make()
    session = rig.attach()
    made = loose(8)
    began = time.monotonic()
    store(session, made)
    assert load(session, made) == ["cpu"] * 8
    assert session.lookup(keys_of(loose(8, "absent"))).states == (KeyState.MISS,) * 8
    assert time.monotonic() - began < 1.0
    wait_for(lambda: reason in json.dumps(rig.tier("lake")), "the reason in the status")
    rig.client.close()
    began = time.monotonic()
    assert rig.daemon.stop() == 0
    assert time.monotonic() - began < 8


def test_a_third_of_requests_throttled_loses_no_block(make, proxy):
    """L85."""
    proxy.set(lambda seen: Fault(Kind.REFUSE) if seen.number % 10 in (1, 4, 8) else None)
    rig = make(deadline="20s", retries=8)
    session = rig.attach()
    made = chain(16)
    store(session, made)
    settled(rig, 16)
    session.evict(keys_of(made), ["cpu"])
    assert load(session, made, deadline=20.0) == ["lake"] * 16


def test_tenants_with_equal_hashes_never_meet_in_the_bucket(make):
    """L127: a miss for the other one, also after a restart; a hit, from the bucket, for the same one."""
    rig, made = make(), chain(3)
    names = [msgspec.structs.replace(LAYOUT, tenant=name) for name in "ab"]
    first, second = (rig.attach(layout, engine_id=layout.tenant) for layout in names)
    store(first, made)
    rig.settle()
    for _ in range(2):
        for session, state in ((second, KeyState.MISS), (first, KeyState.HIT), (second, KeyState.MISS)):
            session.lookup(keys_of(made), promote=True)  # makes it look in the bucket where it does not know
            wait_for(
                lambda s=session, state=state: s.lookup(keys_of(made), promote=True).states == (state,) * 3,
                "it to have looked",
            )
            rig.settle()
        assert load(second, made) == []
        first.evict(keys_of(made), ["cpu"])
        assert load(first, made) == ["lake"] * 3
        rig.restart()
        first, second = (rig.attach(layout, engine_id=layout.tenant) for layout in names)

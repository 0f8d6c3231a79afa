"""Ranks, groups and tenants of one daemon: what one of them fails or names concerns no other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import msgspec
import pytest

from kvtierd.client import Group, KeyState, block_key, hash_of
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, chain, keys_of, load, store
from kvtierd.testing.workload import payload

Make = Callable[..., DaemonRig]


def test_a_block_that_one_rank_could_not_copy_is_nowhere_and_the_rank_is_named(make: Make) -> None:
    """L121: rank 1 fails every copy: misses, not an event, and its number in the status and the metrics."""
    rig = make(slots=32)
    rig.start()
    layout = msgspec.structs.replace(LAYOUT, ranks=2)
    scheduler = rig.attach(layout)
    ranks = [rig.attach(layout, role="worker", rank=rank) for rank in (0, 1)]
    made = chain(4)
    job = scheduler.prepare_store(keys_of(made), meta=[block.meta for block in made])
    for rank, view in itertools.product((0, 1), job.views()):
        offset = scheduler.rank_offsets[0][rank]
        view[offset : offset + 4096] = bytes([rank]) * 4096
    assert ranks[1].fail(job.job, keys_of(made))
    assert job.commit() == ()
    assert scheduler.lookup(keys_of(made)).states == (KeyState.MISS,) * 4
    assert load(scheduler, made) == []
    rig.settle()
    assert rig.router.events == []
    assert rig.copies() == {}
    assert rig.status()["failed_copies"] == {"0": 0, "1": 4}
    assert len(store(scheduler, made)) == 4, "the next try is free to succeed"


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "crash"])
def test_every_group_of_a_layout_of_many_hits_after_a_restart(make: Make, crash: bool) -> None:
    """L72: five groups of 4 to 256 tokens a block, two ranks: all hit, not the first group's blocks alone."""
    sizes = ((4, 1024), (16, 4096), (32, 4096), (64, 700), (256, 16384))
    groups = tuple(Group(tokens_per_block=tokens, block_bytes=size) for tokens, size in sizes)
    layout = msgspec.structs.replace(LAYOUT, model="many", groups=groups, ranks=2)
    rig = make(layout=layout, slots=4096).start()
    keys = {
        block_key(hash_of(block.key), group): block.meta
        for group in range(len(groups))
        for block in chain(20, f"group{group}")
    }
    session = rig.attach(layout)
    for key, meta in keys.items():
        assert session.put(key, payload(key, 2 * sizes[int.from_bytes(key[-4:], "big")][1]), meta)
    rig.settle()
    rig.restart(crash=crash)
    rig.settle()  # until the disk is indexed, what it has is no hit
    session = rig.attach(layout)
    for key in keys:
        assert session.get(key, deadline=5.0) == payload(key, 2 * sizes[int.from_bytes(key[-4:], "big")][1])
    rig.settle()
    assert rig.counter("disk", "read_ok") == len(keys)


def test_a_client_of_one_tenant_cannot_name_another(rig: DaemonRig) -> None:
    """L131: the tenant is bound at attach and part of the namespace; no later message has a place for one."""
    a, b = (msgspec.structs.replace(LAYOUT, tenant=name) for name in "ab")
    made = chain(3)
    store(rig.attach(b, engine_id="b"), made)
    session = rig.attach(a)
    (shown,) = [s for s in rig.status()["sessions"] if s["engine_id"] == "e0"]
    assert shown["namespace"] == a.namespace() != b.namespace()
    assert session.lookup(keys_of(made)).states == (KeyState.MISS,) * 3
    assert load(session, made) == []
    assert session.evict(keys_of(made)) == session.reset() == 0
    assert load(rig.attach(b, engine_id="again"), made) == ["cpu"] * 3


def test_the_log_says_once_in_what_two_engines_of_a_model_differ(make: Make) -> None:
    """A namespace that nobody meant to be another one is a cache that never hits."""
    rig = make(changes={"log": {"format": "json"}}).start()
    rig.attach().close()
    other = msgspec.structs.replace(LAYOUT, layout="other", revision="2")
    rig.attach(other, engine_id="b")
    rig.attach(other, engine_id="b", role="worker")
    rig.attach(msgspec.structs.replace(LAYOUT, model="another", layout="other"), engine_id="c")
    lines = map(json.loads, rig.daemon.log.read_text().splitlines())
    (line,) = [line for line in lines if line["event"] == "layouts_differ"]
    assert line["fields"] == ["revision", "layout"]
    assert "revision: '2', not ''; layout: 'other', not 'test'" in line["message"]

"""What a session sees of the daemon's content without asking it."""

from __future__ import annotations

from collections.abc import Callable

from kvtierd.client import Session
from kvtierd.core.model import BlockKey
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, keys_of, store

Make = Callable[..., DaemonRig]


def seen(session: Session, keys: list[BlockKey]) -> list[bool]:
    """Which of the keys may be somewhere."""
    return [session.may_hold([key]) for key in keys]


def test_a_block_shows_as_long_as_some_tier_has_it(make: Make) -> None:
    rig = make(slots=64).start()
    session, other = rig.attach(), rig.attach(engine_id="other")
    blocks = chain(8)
    keys = keys_of(blocks)
    assert not session.may_hold(keys)
    store(session, blocks[:4])
    rig.settle()
    for each in (session, other):
        assert seen(each, keys) == [True] * 4 + [False] * 4
    session.evict(keys[:4], tiers=["cpu"])
    assert seen(session, keys) == [True] * 4 + [False] * 4
    session.evict(keys[:4])
    assert not session.may_hold(keys)


def test_a_slot_that_was_only_reserved_shows_too_and_then_no_more(make: Make) -> None:
    rig = make(slots=64).start()
    session, keys = rig.attach(), keys_of(chain(4))
    job = session.prepare_store(keys)
    assert seen(session, keys) == [True] * 4
    job.abort()
    assert not session.may_hold(keys)


def test_after_a_daemon_that_ended_one_has_to_ask_and_the_next_one_shows_what_was_kept(make: Make) -> None:
    rig = make(slots=64)
    rig.edit(lambda body: body["pool"].update(backing="file"))
    rig.start()
    session, blocks = rig.attach(), chain(8)
    keys = keys_of(blocks)
    store(session, blocks[:4])
    rig.settle()
    rig.restart(crash=True)
    epoch = session.epoch

    def back() -> bool:
        session.poll()
        return session.connected and session.epoch > epoch

    session.poll()
    assert session.connected or seen(session, keys) == [True] * 8
    wait_for(back, "the session to come back")
    assert seen(session, keys) == [True] * 4 + [False] * 4


def test_a_connection_that_another_daemon_took_over_has_to_ask(make: Make) -> None:
    rig = make(slots=64).start()
    session, keys = rig.attach(), keys_of(chain(4))
    assert not session.may_hold(keys)
    assert rig.daemon.take_over() == 0
    wait_for(lambda: rig.status()["state"] == "ready", "the new daemon")
    assert seen(session, keys) == [True] * 4
    assert seen(rig.attach(engine_id="new"), keys) == [False] * 4

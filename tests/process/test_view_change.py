"""An audience filtered otherwise after a restart: its readers, left connected, end with the new view."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.cli.events_watch import _expected
from kvtierd.client import Client
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, Router, chain, keys_of, store

Make = Callable[..., DaemonRig]

CHANGES: tuple[dict[str, Any], ...] = (
    {"media": ["CPU"]},
    {"media": None},
    {"media": ["STORAGE"]},
    {"medium_names": {"fs": "FS"}},
    {"media": None, "medium_names": {}, "shared_blocks": "each_rank"},
    {"shared_blocks": "once", "tokens": False},
    {"tokens": True},
)


def restarted(rig: DaemonRig, *, crash: bool, **audience: Any) -> None:
    """Start the daemon anew with another audience, with every reader left connected."""
    wait_for(lambda: rig.status()["events"]["journal"]["settled"], "the journal to settle")
    rig.edit(lambda body: body["events"]["audiences"][0].update(audience))
    if crash:
        rig.daemon.kill()
    else:
        assert rig.daemon.stop() == 0
    rig.daemon.start()
    rig.client.close()
    rig.client = Client(rig.daemon.socket, deadline=10.0)


def end_right(rig: DaemonRig, *readers: Router) -> None:
    """Wait until readers know what the audience shows of the inventory, and so does one who joins."""

    with Client(str(rig.folder / "run" / "control.sock"), deadline=10.0) as control, Router() as late:
        late.connect(rig.daemon.endpoint, rig.daemon.replay)
        everybody = (*readers, late)

        def right() -> bool:
            for reader in everybody:  # all of them: a SUB socket subscribes again only while it is polled
                reader.poll(0.005)
            expected = _expected(control, "default")
            return all(reader.wanted is None and reader.resident == expected for reader in everybody)

        try:
            wait_for(right, "the readers")
        except TimeoutError:
            wrong = [reader.resident ^ _expected(control, "default") for reader in everybody]
            found = [(len(some), list(some)[:2], r.counts) for some, r in zip(wrong, everybody, strict=True)]
            raise AssertionError(found) from None


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("crash", [False, True], ids=["stop", "kill"])
def test_a_filter_that_was_widened_or_narrowed_is_told_as_a_difference(make: Make, crash: bool) -> None:
    rig = make(slots=32).start()
    with Router() as bare:
        bare.connect(rig.daemon.endpoint)
        bare.following = True
        rig.follow(bare)
        fill(rig)
        for change in CHANGES if crash else CHANGES[:2]:
            restarted(rig, crash=crash, **change)
            end_right(rig, rig.router, bare)
            with rig.attach() as session:
                store(session, chain(2, json.dumps(change)))
            end_right(rig, rig.router, bare)
    resets = rig.router.counts["resets"]
    assert crash or not resets, "a kill may lose a heartbeat, and what was removed then nobody can tell"
    restarted(rig, crash=crash, form="array")  # cannot say a locality: who can ask starts over
    end_right(rig, rig.router)
    assert rig.router.counts["resets"] > resets
    restarted(rig, crash=crash, form="map")
    wait_for(lambda: not rig.status()["events"]["untold"], "the difference to be told")
    end_right(rig, rig.router)
    rig.settle()
    rig.router.counts.pop("unknown_removals", None)  # changes of the last moment before a kill


def fill(rig: DaemonRig) -> None:
    """Have blocks in both tiers and in one of them."""
    with rig.attach() as session:
        store(session, chain(8))
        rig.settle()
        session.evict(keys_of(chain(8)[6:]), ["cpu"])
    rig.settle()


def test_an_audience_as_before_is_told_nothing(make: Make) -> None:
    rig = make(slots=32, heartbeat="800ms").start()
    with rig.attach() as session:
        store(session, chain(4))
    rig.settle()
    before = rig.router.counts["BlockStored"]
    restarted(rig, crash=False)
    end_right(rig, rig.router)
    assert rig.router.counts["BlockStored"] == before
    assert rig.router.counts["resets"] == 0

"""What may stand in ``events.relay``."""

import pytest
from pydantic import ValidationError

from kvtierd.config.relay import Relay
from kvtierd.config.schema import TierFile

ENGINE = {"connect": "ipc:///run/engine", "replay": "ipc:///run/replay"}


def tier_file(*relays, **events):
    return TierFile.model_validate(
        {
            "version": 1,
            "pool": {"bytes": "1GiB"},
            "tiers": [{"name": "cpu", "type": "cpu"}],
            "events": {"relay": list(relays), **events},
        }
    )


def test_a_relay_has_a_short_hold_and_takes_the_rank_of_its_batches():
    (relay,) = tier_file(ENGINE).events.relay
    assert relay == Relay(**ENGINE, bind=None, dp_rank=None, hold="20ms")
    assert tier_file({**ENGINE, "hold": None}).events.relay[0].hold is None


@pytest.mark.parametrize(
    ("problem", "relays"),
    [
        ("relay.0.connect: write either connect, or bind", [{}]),
        ("relay.0.connect: write either connect, or bind", [{**ENGINE, "bind": "tcp://127.0.0.1:9"}]),
        ("relay.0.bind: write a loopback address", [{"bind": "tcp://*:5559"}]),
        ("relay.0.bind: write a loopback address", [{"bind": "tcp://127.0.0.1:0"}]),
        ("relay.0.connect: write the engine's own", [{"connect": "tcp://*:5559"}]),
        ("relay.0.replay: write the engine's own", [{**ENGINE, "replay": "tcp://127.0.0.1:0"}]),
        ("relay.0.connect: is an address that an audience", [{"connect": "tcp://127.0.0.1:5557"}]),
        ("relay.0.replay: is an address that an audience", [{**ENGINE, "replay": "tcp://127.0.0.1:5558"}]),
        ("relay.0.bind: is the same address as", [{"bind": "tcp://127.0.0.1:5557"}]),
        ("relay.0.hold: is at most 1s", [{**ENGINE, "hold": "2s"}]),
        ("relay.1.dp_rank: with several", [{**ENGINE, "dp_rank": 0}, {"connect": "ipc:///run/b"}]),
        ("relay.1.dp_rank: another", [{**ENGINE, "dp_rank": 0}, {"bind": "ipc:///b", "dp_rank": 0}]),
        ("relay.1.connect: another relay listens", [{**ENGINE, "dp_rank": 0}, {**ENGINE, "dp_rank": 1}]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(problem, relays):
    with pytest.raises(ValidationError) as refused:
        tier_file(*relays)
    assert f"events.{problem}" in str(refused.value)


def test_ranks_have_relays_of_their_own():
    relays = [{"connect": f"tcp://127.0.0.1:{5600 + rank}", "dp_rank": rank} for rank in range(4)]
    assert [relay.dp_rank for relay in tier_file(*relays).events.relay] == [0, 1, 2, 3]

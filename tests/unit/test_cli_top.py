"""``kvtierd top``: what it shows of two looks at a status, and how it ends."""

from __future__ import annotations

import copy

import pytest
from rich.console import Console

import kvtierd.client
from kvtierd.cli.main import main
from kvtierd.cli.top_view import Screen
from kvtierd.errors import ExitCode, Unavailable

STATUS = {
    "version": "0.1.0",
    "pid": 7,
    "state": "ready",
    "uptime_seconds": 60.0,
    "tiers": [
        {
            "name": "cpu",
            "blocks": 1200,
            "used_bytes": 3 << 20,
            "capacity_bytes": 4 << 20,
            "stored": 2000,
            "removed": 800,
            "loads": 10,
            "counters": {"lookup_hits": 30, "lookup_misses": 10},
        },
        {
            "name": "disk[x]",
            "blocks": 7,
            "used_bytes": 1 << 20,
            "capacity_bytes": None,
            "condition": "degraded",
            "reason": "no space left",
            "counters": {"lookup_hits": 0},
        },
    ],
    "sessions": [{"engine_id": "vllm-0"}, {"engine_id": "vllm-0"}, {"engine_id": "bad\x1b[2J"}],
    "leases": 3,
    "events": {
        "audiences": {"a": {"bind": "tcp://127.0.0.1:5557", "events": 100, "sequence": 4, "dropped": 2}}
    },
}


def later(**counters: int) -> dict:
    """The status a while after: the primary's lookup counters and what it stored."""
    status = copy.deepcopy(STATUS)
    status["tiers"][0]["counters"] = {"lookup_hits": counters["hits"], "lookup_misses": counters["misses"]}
    status["tiers"][0]["stored"] = counters["stored"]
    return status


def drawn(screen: Screen, width: int = 120) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(screen.render(width))
    return capture.get()


@pytest.fixture
def screen():
    made = Screen()
    made.take(STATUS, 10.0)
    return made


def test_two_looks_make_rates_and_a_hit_rate(screen):
    screen.take(later(hits=90, misses=30, stored=2500), 12.0)
    [cpu] = [line for line in drawn(screen).splitlines() if line.startswith("cpu")]
    assert cpu.split()[-5:] == ["30", "0", "250", "0", "ok"]
    assert "75 %" in drawn(screen)


def test_what_is_full_and_what_is_in_trouble_can_be_seen(screen):
    picture = drawn(screen)
    assert "1,200" in picture
    assert "unlimited" in picture
    assert "degraded" in picture
    assert "no space left" in picture
    assert "2 batches dropped" in picture
    assert "███████████████░░░░░" in picture


def test_what_an_engine_calls_itself_does_not_command_the_terminal(screen):
    picture = drawn(screen)
    assert "\x1b" not in picture
    assert "disk[x]" in picture
    assert "vllm-0" in picture


def test_another_daemon_starts_new_rates(screen):
    screen.take({**later(hits=1, misses=1, stored=1), "pid": 8}, 12.0)
    [cpu] = [line for line in drawn(screen).splitlines() if line.startswith("cpu")]
    assert cpu.split()[-5:] == ["0", "0", "0", "0", "ok"]


def test_a_daemon_that_went_away_is_said_and_the_last_look_stays(screen):
    screen.lose("no daemon answers")
    picture = drawn(screen)
    assert "no daemon answers" in picture
    assert "1,200" in picture


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_the_terminal(screen, width):
    picture = drawn(screen, width).splitlines()
    assert all(len(line) <= width for line in picture)
    assert "…" not in "".join(line for line in picture if line.startswith(("tier", "cpu", "disk")))
    assert any("degraded" in line for line in picture)


class Answers:
    """A client that answers with what is given, then with nothing."""

    def __init__(self, *statuses: dict) -> None:
        self.left = list(statuses)

    def __call__(self, *_: object, **__: object) -> Answers:
        return self

    def status(self) -> dict:
        if not self.left:
            raise Unavailable("no daemon answers")
        return self.left.pop(0)

    def close(self) -> None:
        pass


def test_without_a_terminal_it_looks_twice_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(kvtierd.client, "Client", Answers(STATUS, later(hits=90, misses=30, stored=2500)))
    assert main(["top", "--socket", "/nowhere", "--interval", "0.01"]) == ExitCode.OK
    assert "75 %" in capsys.readouterr().out


def test_without_a_daemon_it_ends_with_69(monkeypatch, capsys):
    monkeypatch.setattr(kvtierd.client, "Client", Answers())
    assert main(["top", "--socket", "/nowhere"]) == ExitCode.UNAVAILABLE
    assert "no daemon answers" in capsys.readouterr().err

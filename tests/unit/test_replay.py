"""Traces, their simulation through the real ladder, the best possible figure, and the command."""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from pathlib import Path

import pytest

from kvtierd.cli.main import main
from kvtierd.core.model import hash_of
from kvtierd.errors import ExitCode
from kvtierd.testing.simulate import SimulatedTier, Simulation, best_possible
from kvtierd.testing.trace import Asked, BadTrace, read_trace
from kvtierd.testing.workload import Workload

PUBLIC_TRACE = "conversation_trace.jsonl"
PUBLISHED = {
    1_000: (0.0445, 0.0558),
    3_000: (0.0653, 0.0940),
    10_000: (0.2116, 0.2252),
    30_000: (0.3257, 0.3257),
}
"""By capacity: hit share of lru, and the best of lru, arc and s3fifo, on that trace."""

BELADY = {1_000: 0.1907, 3_000: 0.2945, 10_000: 0.3664, 30_000: 0.3664}


def chat(requests: int = 150, seed: int = 1) -> list[Asked]:
    work = Workload(seed=seed, requests=requests, block_size=2)
    return [
        Asked(float(moment), tuple(hash_of(block.key).hex() for block in request.prompt))
        for moment, request in enumerate(work)
    ]


def asked(*prompts: str) -> list[Asked]:
    """One request a second; each prompt is a string of one-letter blocks."""
    return [Asked(float(moment), tuple(prompt)) for moment, prompt in enumerate(prompts)]


def flat_lru(requests: list[Asked], capacity: int) -> int:
    """Touch the hits, insert the misses, both from the last block to the first; know nothing of chains."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for request in requests:
        found = sum(1 for _ in itertools.takewhile(cache.__contains__, request.blocks))
        hits += found
        for block in (*reversed(request.blocks[:found]), *reversed(request.blocks[found:])):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def replayed(requests: list[Asked], *tiers: SimulatedTier, **options: float):
    return Simulation(tiers, **options).run(requests)  # type: ignore[arg-type]


# -- traces ---------------------------------------------------------------------------------------------


def test_a_trace_is_read_with_times_in_seconds_and_empty_lines_skipped():
    lines = [
        '{"timestamp": 0, "hash_ids": [1, 2], "input_length": 9}',
        "",
        '{"timestamp": 2500, "hash_ids": []}',
    ]
    assert read_trace(lines) == [Asked(0.0, (1, 2)), Asked(2.5, ())]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"timestamp": 9000}', "hash_ids"),
        ('{"timestamp": "now", "hash_ids": []}', "timestamp"),
        ('{"timestamp": 9000, "hash_ids": [1.5]}', "hash_ids"),
        ('{"timestamp": 9000, "hash_ids": [7, 7]}', "twice"),
        ('{"timestamp": 9000, "hash_ids": [2, 1]}', "not prefix ids"),
        ('{"timestamp": 1, "hash_ids": []}', "before 8000"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(line, words):
    good = '{"timestamp": 8000, "hash_ids": [1, 2]}'
    with pytest.raises(BadTrace, match=r"t\.jsonl, line 3: ") as caught:
        read_trace([good, good, line], "t.jsonl")
    assert words in str(caught.value)


def test_an_empty_trace_is_an_error():
    with pytest.raises(BadTrace, match="no request"):
        read_trace(["", "\n"])


# -- simulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [200, 400, 800])
def test_lru_through_the_ladder_is_lru(capacity):
    requests = chat()
    share = sum(len(request.blocks) for request in requests)
    got = replayed(requests, SimulatedTier("cpu", capacity, "lru"))
    assert got.hits / share == pytest.approx(flat_lru(requests, capacity) / share, abs=0.002)


@pytest.mark.parametrize("policy", ["auto", "lru", "s3fifo", "arc"])
def test_with_room_for_everything_every_policy_is_the_best_possible(policy):
    requests = chat()
    got = replayed(requests, SimulatedTier("cpu", 10_000, policy))
    assert got.hits == best_possible(requests, 10_000) == best_possible(requests, None)
    assert got.tiers[0].evicted == 0
    assert got.tiers[0].resident == got.tiers[0].stored == got.blocks - got.hits


@pytest.mark.parametrize("policy", ["auto", "lru", "s3fifo", "arc"])
@pytest.mark.parametrize("capacity", [150, 300, 600])
def test_no_policy_beats_the_best_possible(policy, capacity):
    requests = chat()
    got = replayed(requests, SimulatedTier("cpu", capacity, policy))
    assert got.hits <= best_possible(requests, capacity)
    assert got.tiers[0].stored - got.tiers[0].evicted == got.tiers[0].resident <= capacity


def test_the_best_possible_keeps_what_comes_back_first():
    assert best_possible(asked("ab", "cd", "ab", "cd"), 2) == 2
    assert best_possible(asked("abc", "xyz", "abc"), 3) == 3
    assert best_possible(asked("abc", "abx", "abc"), 3) == 5, "only a prefix counts"
    assert best_possible(asked("abc", "abx", "abc"), 2) == 4
    assert best_possible(asked("ab", "ab"), 0) == 0


def test_a_second_tier_serves_what_the_first_evicted():
    requests = chat()
    cpu, disk = SimulatedTier("cpu", 250), SimulatedTier("disk", None)
    got = replayed(requests, cpu, disk)
    assert got.hits == best_possible(requests, None)
    assert got.tiers[1].hits > 0
    assert got.tiers[1].stored == len({block for request in requests for block in request.blocks})
    assert got.waited == 0


def test_storage_that_takes_time_is_waited_for_and_shows():
    requests = chat(80)
    got = replayed(requests, SimulatedTier("cpu", 250), SimulatedTier("disk", 1000), latency=0.01)
    assert got.waited > 0
    assert got.tiers[1].hits > 0


# -- the command ----------------------------------------------------------------------------------------


def write(path: Path, requests: list[Asked]) -> Path:
    lines = [json.dumps({"timestamp": 1000 * each.at, "hash_ids": each.blocks}) for each in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_command_prints_each_policy_and_tier_beside_the_best_possible(tmp_path, capsys):
    trace = write(tmp_path / "t.jsonl", chat(60))
    arguments = ["replay", str(trace), "--tiers", "cpu=200,disk=unlimited", "--policy", "auto,lru"]
    assert main([*arguments, "--block-bytes", "1048576"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("t.jsonl: 60 requests for ")
    rows = [line.split()[:2] for line in out.splitlines()[3:9]]
    assert rows == [[policy, tier] for policy in ("auto", "lru") for tier in ("cpu", "disk", "together")]
    assert "MiB" in out


def test_the_figures_as_json_add_up(tmp_path, capsys):
    requests = chat(60)
    trace = write(tmp_path / "t.jsonl", requests)
    assert main(["replay", str(trace), "--tiers", "cpu=200,disk=500", "--json"]) == ExitCode.OK
    figures = json.loads(capsys.readouterr().out)
    tiers = figures["policies"]["auto"]["tiers"]
    assert [tier["name"] for tier in tiers] == ["cpu", "disk"]
    assert (
        sum(tier["served"] for tier in tiers) / figures["blocks"] == figures["policies"]["auto"]["hit_rate"]
    )
    assert tiers[1]["hit_rate_up_to_here"] == figures["policies"]["auto"]["hit_rate"]
    assert tiers[0]["best_possible_up_to_here"] * figures["blocks"] == best_possible(requests, 200)
    assert tiers[1]["best_possible_up_to_here"] * figures["blocks"] == best_possible(requests, 700)


@pytest.mark.parametrize(
    "tiers", ["", "cpu", "cpu=", "cpu=0", "cpu=unlimited", "cpu=5,cpu=6", "CPU=5", "cpu=5,", "cpu=5;disk=6"]
)
def test_tiers_that_make_no_sense_are_refused(tiers, tmp_path, capsys):
    assert main(["replay", str(tmp_path / "t"), "--tiers", tiers]) == ExitCode.USAGE
    assert "--tiers" in capsys.readouterr().err


def test_an_unknown_policy_a_missing_file_and_a_bad_line_are_errors_in_words(tmp_path, capsys):
    """L95: no other policy than the one that was asked for."""
    trace = tmp_path / "t.jsonl"
    assert main(["replay", str(trace), "--tiers", "cpu=9", "--policy", "fifo"]) == ExitCode.USAGE
    assert "no policy 'fifo'" in capsys.readouterr().err
    assert main(["replay", str(trace), "--tiers", "cpu=9"]) == ExitCode.IO
    assert "t.jsonl: No such file" in capsys.readouterr().err
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\nrubbish\n')
    assert main(["replay", str(trace), "--tiers", "cpu=9"]) == ExitCode.GENERIC
    assert "t.jsonl, line 2: " in capsys.readouterr().err


# -- the public trace -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def public_trace() -> list[Asked]:
    """The conversation trace of Mooncake's FAST'25 release; no part of it is in this repository."""
    beside = Path(__file__).parents[3] / "shared" / "traces"
    path = Path(os.environ.get("KVTIERD_TRACES", beside)) / PUBLIC_TRACE
    if not path.is_file():
        pytest.skip(
            f"NOT TESTED against the public trace: set KVTIERD_TRACES to the folder of {PUBLIC_TRACE}"
        )
    with path.open("rb") as lines:
        return read_trace(lines, path.name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capacity", PUBLISHED)
def test_the_public_trace_gives_the_published_figures_and_the_default_beats_them(public_trace, capacity):
    lru, best_classic = PUBLISHED[capacity]
    share = {
        policy: (got := replayed(public_trace, SimulatedTier("cpu", capacity, policy))).hits / got.blocks
        for policy in ("lru", "auto")
    }
    asked_for = sum(len(request.blocks) for request in public_trace)
    assert share["lru"] == pytest.approx(lru, abs=0.002)
    assert best_possible(public_trace, capacity) / asked_for == pytest.approx(BELADY[capacity], abs=0.0001)
    assert share["auto"] >= 0.95 * best_classic
    if capacity <= 3_000:
        assert share["auto"] > 1.2 * best_classic

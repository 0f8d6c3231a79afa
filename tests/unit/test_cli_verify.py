"""``kvtierd verify``: every block is proved, the bad ones are named, and the exit code tells."""

from __future__ import annotations

import io
import json

import pytest

from kvtierd.cli import progress as progress_module
from kvtierd.cli.main import main
from kvtierd.cli.progress import Progress
from kvtierd.cli.verify import Report, _printer, check, json_lines, lines
from kvtierd.core.model import BlockId, block_key
from kvtierd.core.stimuli import Outcome, Status
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.errors import ExitCode
from kvtierd.testing.backend_kit import block, payload, write
from kvtierd.testing.clock import ManualClock
from kvtierd.testing.faults import FaultyBackend


def stored(count):
    backend = MemoryBackend("ram")
    for number in range(count):
        write(backend, block(number), payload(number))
    return backend


def flip(backend, number):
    raw = bytearray(backend.store[block(number).id])
    raw[-1] ^= 1
    backend.store[block(number).id] = bytes(raw)


def verified(backend, *, remove=False):
    report, bad = Report("disk"), []
    with Progress("verify", 0, stream=io.StringIO()) as progress:
        check(backend, report, progress, bad.append, remove=remove)
    return report, bad


def test_good_blocks_are_counted_with_their_bytes():
    report, bad = verified(stored(5))
    assert (report.good, report.bad, bad) == (5, 0, [])
    assert report.bytes == 5 * MemoryBackend("x").estimate(block(1))


def test_a_storage_without_a_check_of_its_own_is_scanned_and_read():
    backend = stored(5)
    flip(backend, 3)
    report, bad = verified(backend)
    assert (report.good, report.corrupt, report.reasons) == (4, 1, {"payload checksum differs": 1})
    assert [(outcome.id, outcome.status) for outcome in bad] == [(block(3).id, Status.CORRUPT)]
    assert block(3).id in backend.store, "nothing is changed without --remove"


def test_remove_takes_corrupt_blocks_out_and_leaves_unreadable_ones():
    inner = stored(5)
    flip(inner, 3)
    backend = FaultyBackend(inner)
    backend.fail("read", Status.FAILED, ids=[block(4).id], reason="EIO: Input/output error")
    report, _ = verified(backend, remove=True)
    assert (report.good, report.corrupt, report.unreadable, report.removed) == (3, 1, 1, 1)
    assert set(inner.store) == {block(number).id for number in (0, 1, 2, 4)}


class Checking(MemoryBackend):
    """Has a check of its own, as the filesystem tier does."""

    def namespaces(self):
        return []

    def remove_namespace(self, namespace):
        raise AssertionError

    stale_temporaries = quarantined = remove_namespace

    def scan(self):
        raise AssertionError("the backend's own check is to be used")

    def verify(self):
        yield [Outcome(block(1).id, Status.OK, 8192), Outcome(block(2).id, Status.CORRUPT, 0, "too short")]
        yield [Outcome(block(3).id, Status.FAILED, 0, "EACCES: Permission denied")]


def test_a_backends_own_check_is_used_where_it_has_one():
    report, _ = verified(Checking("disk"))
    assert (report.good, report.corrupt, report.unreadable, report.bytes) == (1, 1, 1, 8192)


@pytest.mark.parametrize(
    ("report", "left", "said"),
    [
        (Report("disk", good=3), 0, "every block is good"),
        (Report("disk", corrupt=1), 1, "1 block is not good"),
        (Report("disk", corrupt=2, unreadable=1), 3, "3 blocks are not good"),
        (Report("disk", corrupt=1, removed=1), 0, "1 block was not good and was taken out"),
        (Report("disk", corrupt=3, removed=3), 0, "3 blocks were not good and were taken out"),
        (
            Report("disk", corrupt=2, unreadable=1, removed=2),
            1,
            "3 blocks were not good: 2 taken out, 1 still there",
        ),
    ],
)
def test_the_last_line_says_what_is_left(report, left, said):
    assert report.left == left
    assert list(lines([report]))[-1] == said


class Nameless(Checking):
    """Has blocks that do not say whose they are."""

    def verify(self):
        for number in range(3):
            reason = f"too short (v1/blocks/{'e' * 32}/packed/7:{number})"
            yield [Outcome(BlockId("e" * 32, block_key(b"")), Status.CORRUPT, reason=reason)]


def test_reasons_can_be_counted_and_places_are_told_apart_from_them(capsys):
    report = Report("disk")
    with Progress("verify", 0, stream=io.StringIO()) as progress:
        for as_json in (True, False):
            check(Nameless("disk"), report, progress, _printer("disk", as_json=as_json), remove=False)
    assert report.reasons == {"too short": 6}
    *rows, first, _, _ = capsys.readouterr().out.splitlines()
    places = [json.loads(row)["place"] for row in rows]
    assert places == [f"v1/blocks/{'e' * 32}/packed/7:{number}" for number in range(3)]
    assert {json.loads(row)["reason"] for row in rows} == {"too short"}
    assert first == f"disk: corrupt v1/blocks/{'e' * 12}…/packed/7:0: too short"


def test_the_table_and_the_json_say_the_same():
    report, _ = verified(Checking("disk"))
    report.seconds = 2.0
    shown = list(lines([report]))
    assert [line.split() for line in shown[:2]] == [
        ["tier", "good", "corrupt", "unreadable", "removed", "bytes", "per", "second"],
        ["disk", "1", "1", "1", "0", "8.0", "KiB", "4.0", "KiB"],
    ]
    assert shown[2] == "2 blocks are not good"
    (row,) = map(json.loads, json_lines([report]))
    assert row == {
        "tier": "disk",
        "good": 1,
        "corrupt": 1,
        "unreadable": 1,
        "removed": 0,
        "bytes": 8192,
        "seconds": 2.0,
        "reasons": {"too short": 1, "EACCES: Permission denied": 1},
    }
    assert list(lines([Report("disk", good=1)]))[-1] == "every block is good"


def test_a_tier_that_is_not_there_is_an_error(tmp_path, capsys):
    config = tmp_path / "tiers.yaml"
    tiers = [{"name": "cpu", "type": "cpu"}, {"name": "lake", "type": "object", "url": "memory://lake"}]
    body = {"version": 1, "runtime_dir": str(tmp_path), "pool": {"bytes": "1MiB"}, "tiers": tiers}
    config.write_text(json.dumps(body))
    assert main(["verify", "--config", str(config), "--tier", "cpu"]) == ExitCode.CONFIG
    assert "no tier below the pool is named 'cpu'; there are: lake" in capsys.readouterr().err
    assert main(["verify", "--config", str(config)]) == ExitCode.OK
    assert "every block is good" in capsys.readouterr().out


# -- progress -------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_a_terminal_gets_a_bar_that_is_wiped_at_the_end():
    clock, stream = ManualClock(), Terminal()
    with Progress("verify disk", 200, stream=stream, clock=clock) as progress:
        clock.advance(2)
        progress.advance(50, 100 << 20)
    first, *_, last = stream.getvalue().split("\r")[1:]
    assert first.rstrip() == (
        "verify disk  [######..................]   25% 50 of 200 blocks  100.0 MiB  50.0 MiB/s  0:06 left"
    )
    assert (len(first), last) == (99, "")


def test_a_terminal_is_drawn_at_most_ten_times_a_second():
    clock, stream = ManualClock(), Terminal()
    progress = Progress("x", 10_000, stream=stream, clock=clock)
    for _ in range(1000):
        clock.advance(0.001)
        progress.advance(1)
    assert 9 <= stream.getvalue().count("\r") <= 11


def test_a_pipe_gets_a_plain_line_every_few_seconds():
    clock, stream = ManualClock(), io.StringIO()
    with Progress("verify disk", 100, stream=stream, clock=clock) as progress:
        for _ in range(12):
            clock.advance(1)
            progress.advance(5)
    assert stream.getvalue().splitlines() == [
        "verify disk   25% 25 of 100 blocks  0:15 left",
        "verify disk   50% 50 of 100 blocks  0:10 left",
    ]
    assert progress_module.LINE_SECONDS == 5.0


def test_quiet_progress_says_nothing():
    stream = Terminal()
    with Progress("x", 1, stream=stream, quiet=True) as progress:
        progress.advance(1)
    assert stream.getvalue() == ""

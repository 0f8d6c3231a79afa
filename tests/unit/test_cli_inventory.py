"""``kvtierd inventory``: counts and listings of what the daemon's pages say, and of nothing else."""

from __future__ import annotations

import json

import pytest

from kvtierd.cli.inventory import Counts
from kvtierd.cli.main import main
from kvtierd.core.effects import SurveyEntry
from kvtierd.core.model import block_key
from kvtierd.errors import ExitCode, RequestRefused
from kvtierd.wire.messages import SurveyPage

A, B = "a" * 32, "b" * 32


def entry(tier, namespace, number, size=4096):
    return SurveyEntry(tier, namespace, block_key(bytes([number]), 1), size, 0)


PAGES = [
    SurveyPage(id=1, entries=(entry("cpu", A, 1), entry("cpu", B, 2, 8192)), cursor=2, models={A: "org/a"}),
    SurveyPage(id=2, entries=(entry("cpu", A, 3), entry("disk", B, 2, 12288)), cursor=4, models={}),
    SurveyPage(id=3, entries=(), cursor=0),
]


class FakeClient:
    """Answers as a daemon would; ``seen`` has what was asked."""

    seen: list[object]

    def __init__(self, path, deadline):
        FakeClient.seen = [path, deadline]

    def status(self):
        return {"tiers": [{"name": "cpu", "blocks": 3}, {"name": "disk", "blocks": 1}]}

    def survey(self, tier):
        FakeClient.seen.append(tier)
        if tier == "tape":
            raise RequestRefused("unknown_tier", "no tier is named 'tape'; the tiers are cpu, disk")
        yield from PAGES


@pytest.fixture
def daemon(monkeypatch):
    monkeypatch.setattr("kvtierd.client.Client", FakeClient)


def test_a_table_counts_every_namespace_in_every_tier(daemon, capsys):
    assert main(["inventory", "--socket", "/x/control.sock", "--deadline", "7"]) == ExitCode.OK
    assert FakeClient.seen == ["/x/control.sock", 7.0, None]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["tier", "namespace", "model", "blocks", "bytes"],
        ["cpu", A, "org/a", "2", "8.0", "KiB"],
        ["cpu", B, "-", "1", "8.0", "KiB"],
        ["disk", B, "-", "1", "12.0", "KiB"],
    ]


def test_json_is_one_object_per_namespace_and_tier(daemon, capsys):
    assert main(["inventory", "--json"]) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == {
        "tier": "cpu",
        "namespace": A,
        "model": "org/a",
        "tenant": None,
        "blocks": 2,
        "bytes": 8192,
    }
    assert [(row["tier"], row["model"], row["bytes"]) for row in rows[1:]] == [
        ("cpu", None, 8192),
        ("disk", None, 12288),
    ]


def test_blocks_are_listed_one_a_line(daemon, capsys):
    assert main(["inventory", "--blocks"]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[3] == f"disk {B} 02.1 12288 0"
    assert main(["inventory", "--blocks", "--json"]) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[3] == {
        "tier": "disk",
        "namespace": B,
        "hash": "02",
        "group": 1,
        "bytes": 12288,
        "dp_rank": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--namespace", "aaaa"], 2),
        (["--namespace", "c"], 0),
        (["--model", "org"], 1),
        (["--model", "llama"], 0),
    ],
)
def test_filters_choose_namespaces(daemon, capsys, arguments, count):
    """A model is known of a page only; the second page's entry of the namespace has none and is left out."""
    assert main(["inventory", "--blocks", *arguments]) == ExitCode.OK
    assert len(capsys.readouterr().out.splitlines()) == count


def test_a_tier_that_is_not_there_is_an_error(daemon, capsys):
    assert main(["inventory", "--tier", "tape"]) == ExitCode.GENERIC
    assert "the tiers are cpu, disk" in capsys.readouterr().err


def test_without_a_daemon_it_says_so(monkeypatch, capsys, tmp_path):
    assert main(["inventory", "--socket", str(tmp_path / "none.sock")]) == ExitCode.UNAVAILABLE
    assert "no daemon answers" in capsys.readouterr().err


def test_an_empty_daemon_is_said_to_be_empty():
    assert list(Counts().lines()) == ["nothing is resident"]


def test_tenants_are_named_where_an_engine_said_whose_a_namespace_is(daemon, monkeypatch, capsys):
    layouts = [{"namespace": A, "tenant": "team"}, {"namespace": B, "tenant": None}]
    monkeypatch.setattr(FakeClient, "status", lambda self: {"layouts": layouts})
    assert main(["inventory", "--socket", "/x"]) == ExitCode.OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[3] for line in lines] == ["tenant", "team", "-", "-"]
    assert main(["inventory", "--socket", "/x", "--json"]) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["tenant"] for row in rows] == ["team", None, None]

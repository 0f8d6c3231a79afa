"""``kvtierd status``: what people see of a report, and what happens without a daemon."""

import json
import os
import socket
import subprocess
import sys

import pytest

import kvtierd.client
from kvtierd.cli.main import main
from kvtierd.cli.status import render
from kvtierd.client import Client
from kvtierd.errors import ExitCode, Unavailable

REPORT = {
    "version": "0.1.0",
    "pid": 7,
    "state": "ready",
    "uptime_seconds": 646.5,
    "pool": {
        "pool_id": "ab" * 16,
        "bytes": 1 << 30,
        "prefaulted_bytes": 1 << 29,
        "lock": {"state": "not locked", "reason": "no CAP_IPC_LOCK"},
        "huge_pages": {"state": "off"},
    },
    "tiers": [
        {
            "name": "cpu",
            "blocks": 3,
            "used_bytes": 1 << 20,
            "capacity_bytes": 4 << 20,
            "stored": 9,
            "removed": 6,
            "loads": 2,
            "condition": "ok",
        },
        {
            "name": "disk",
            "blocks": 7,
            "used_bytes": 1 << 20,
            "capacity_bytes": None,
            "stored": 7,
            "removed": 0,
            "loads": 1,
            "condition": "degraded",
            "reason": "no space left",
            "counters": {"write_full": 4},
        },
    ],
    "layouts": [
        {
            "namespace": "cd" * 16,
            "model": "llama",
            "slot_bytes": 65536,
            "slots": 64,
            "free_slots": 0,
            "attached_sessions": 2,
        }
    ],
    "sessions": [],
    "jobs": 2,
    "leases": 0,
    "events": {
        "audiences": {
            "default": {"bind": "tcp://127.0.0.1:5557", "sequence": 41, "announced": 10, "dropped": 3}
        }
    },
}


class FakeClient:
    """A daemon's answer without a daemon."""

    answer = REPORT
    asked = []  # noqa: RUF012

    def __init__(self, path, deadline=1.0):
        self.asked.append((path, deadline))

    def status(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self):
        pass


@pytest.fixture
def daemon(monkeypatch):
    monkeypatch.setattr(kvtierd.client, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "asked", [])
    monkeypatch.delenv("KVTIERD__RUNTIME_DIR", raising=False)
    return FakeClient


def test_a_report_fits_eighty_columns_and_names_what_is_wrong():
    lines = list(render(REPORT))
    assert lines == [
        "kvtierd 0.1.0  ready  up 10m 46s  pid 7",
        "pool  1.0 GiB, 512.0 MiB ready",
        "  lock: not locked (no CAP_IPC_LOCK)",
        "  huge_pages: off",
        "tiers",
        "  tier  used     of         full  blocks  stored  removed  loads  condition",
        "  cpu   1.0 MiB  4.0 MiB    25%   3       9       6        2      ok",
        "  disk  1.0 MiB  unlimited  -     7       7       0        1      degraded",
        "  disk: no space left",
        "layouts",
        "  layout    model  slot      slots  free  sessions",
        "  cdcdcdcd  llama  64.0 KiB  64     0     2",
        "sessions  none",
        "work  2 stores under way",
        "events  default: tcp://127.0.0.1:5557, batch 41, 10 residencies announced",
        "  3 dropped",
        "warning  Tier disk is degraded: no space left.",
        "  Repair its storage (mount, permission, space, credentials). It is tried again",
        "  by itself; other tiers serve meanwhile.",
    ]
    assert max(map(len, lines)) <= 80


def test_a_tier_that_could_not_be_opened_is_degraded_though_it_is_not_indexed_yet():
    tier = {"name": "disk", "scanning": True, "condition": "degraded", "reason": "Permission denied"}
    lines = list(render({"tiers": [tier, {**tier, "name": "lake", "condition": "ok", "reason": ""}]}))
    assert [line.split()[-1] for line in lines if line.startswith(("  disk  ", "  lake  "))] == [
        "degraded",
        "indexing",
    ]
    assert "  disk: Permission denied" in lines


def test_an_audience_that_was_sent_nothing_says_so():
    line = list(render({"events": {"audiences": {"a": {"bind": "tcp://x:1", "sequence": None}}}}))[-1]
    assert line.startswith("events  a: tcp://x:1, no batch yet, ")


@pytest.mark.parametrize(
    "report",
    [{}, {"pool": {}}, {"tiers": [{}]}, {"tiers": ["x", 1]}, {"events": {"x": {}}}, {"layouts": {}}],
)
def test_a_report_with_anything_missing_is_still_shown(report):
    assert all(isinstance(line, str) for line in render(report))


def test_tenants_are_shown_where_there_are_several_or_shares():
    def row(tenant, blocks, share):
        has = {"blocks": blocks, "used_bytes": blocks << 20, "share_bytes": share, "evicted": 3}
        return {"tenant": tenant, "tiers": {"cpu": has}}

    report = {"tenants": [row("a", 2, 1 << 30), row("other", 0, 0)], "layouts": [{"tenant": "a"}]}
    lines = [line.split() for line in render(report)]
    assert ["a", "cpu", "2.0", "MiB", "1.0", "GiB", "2", "3"] in lines
    assert "tenant" in next(line for line in lines if line[:1] == ["layout"])
    assert not any("tenants" in line for line in render({"tenants": [row("none", 2, 0), row("other", 0, 0)]}))


def test_names_from_engines_cannot_steer_the_terminal():
    assert "\x1b" not in "\n".join(
        render({"sessions": [{"engine_id": "\x1b[2Jevil\n", "a": 1}], "version": "\x1b]0;t\x07"})
    )


def test_status_prints_a_table_json_or_nothing(daemon, capsys):
    assert main(["status"]) == ExitCode.OK
    assert "sessions  none" in capsys.readouterr().out
    assert main(["status", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == REPORT
    assert main(["status", "--quiet"]) == ExitCode.OK
    assert capsys.readouterr() == ("", "")


def test_the_socket_is_given_or_found_through_file_or_variable(daemon, monkeypatch, tmp_path):
    path = tmp_path / "tiers.yaml"
    path.write_text(
        "version: 1\nruntime_dir: /x/run\npool: { bytes: 1GiB }\ntiers: [{ name: cpu, type: cpu }]\n"
    )
    main(["status"])
    main(["status", "--socket", "/a/b.sock", "--deadline", "0.5"])
    main(["status", "--config", str(path)])
    monkeypatch.setenv("KVTIERD__RUNTIME_DIR", "/y")
    main(["status"])
    assert daemon.asked == [
        ("/run/kvtierd/control.sock", 2.0),
        ("/a/b.sock", 0.5),
        ("/x/run/control.sock", 2.0),
        ("/y/control.sock", 2.0),
    ]


def test_without_a_daemon_it_exits_69_with_one_line(daemon, monkeypatch, capsys):
    monkeypatch.setattr(daemon, "answer", Unavailable("no daemon at /x"))
    assert main(["status"]) == ExitCode.UNAVAILABLE
    assert capsys.readouterr() == ("", "kvtierd: no daemon at /x\n")
    assert main(["status", "--quiet"]) == ExitCode.UNAVAILABLE
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "inf", "soon"])
def test_a_deadline_without_sense_is_wrong_usage(deadline):
    assert main(["status", "--deadline", deadline]) == ExitCode.USAGE


def test_the_real_client_finds_no_daemon_and_imports_none(tmp_path):
    code = (
        "import sys\nfrom kvtierd.cli.main import main\n"
        "from kvtierd.cli.status import render\n"
        "list(render({'pool': {'bytes': 1}}))\n"
        f"rc = main(['status', '--deadline', '0.2', '--socket', {str(tmp_path / 'none.sock')!r}])\n"
        "heavy = {'kvtierd.daemon', 'zmq', 'pydantic', 'torch', 'numpy', 'uvloop'} & set(sys.modules)\n"
        "print(rc, sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "69 []\n"
    assert len(done.stderr.splitlines()) == 1
    assert "none.sock: no such socket; start a daemon with kvtierd serve, or say where" in done.stderr


def test_what_is_wrong_comes_with_what_to_do():
    tier = {"name": "disk", "left": {"crowded": 7}, "condition": "ok"}
    said = " ".join(" ".join(render({"tiers": [tier]})).split())
    assert "warning Tier disk: its storage was full before max_bytes was reached; 7 blocks gave way." in said
    assert "lower max_bytes" in said


def test_who_is_not_answered_hears_why(tmp_path):
    gone, plain = tmp_path / "gone.sock", tmp_path / "plain"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(gone))
    plain.touch()
    for path, why in ((gone, "the daemon ended, or did not answer"), (plain, "it is no socket")):
        with Client(str(path), deadline=0.2) as client, pytest.raises(Unavailable, match=f"{path}: {why}"):
            client.status()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every socket")
def test_who_may_not_use_the_socket_hears_that(tmp_path):
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(tmp_path / "s"))
    (tmp_path / "s").chmod(0)
    path = str(tmp_path / "s")
    with Client(path, deadline=0.2) as client, pytest.raises(Unavailable, match="permission denied"):
        client.status()

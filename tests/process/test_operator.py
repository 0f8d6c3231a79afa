"""What an operator may order of a running daemon: over its control socket alone, and told to every reader."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvtierd.cli.main import main
from kvtierd.client import Client, RequestRefused
from kvtierd.core.effects import Removed
from kvtierd.core.stimuli import OperatorReset
from kvtierd.errors import ExitCode
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, fs_tier, layout_of, load, store
from kvtierd.wire.messages import Draining, DrainRequest

Make = Callable[..., DaemonRig]
Capture = pytest.CaptureFixture[str]


def control(rig: DaemonRig) -> str:
    return rig.daemon.socket.replace("engine.sock", "control.sock")


def kvtierd(rig: DaemonRig, *arguments: str) -> int:
    """Run a command against the rig's daemon."""
    return main([*arguments, "--socket", control(rig), "--deadline", "30"])


def test_a_reset_by_model_is_told_to_readers_and_spares_others(rig: DaemonRig, capsys: Capture) -> None:
    other = rig.attach(layout_of("other", 4096), engine_id="e1")
    store(rig.attach(), chain(3))
    store(other, chain(2, "other"))
    rig.settle()
    assert kvtierd(rig, "reset", "--model", "tiny", "--yes", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["blocks"] == {"cpu": 3, "disk": 3}
    rig.agree()
    assert len(rig.router.resident) == 4
    assert kvtierd(rig, "reset", "--all", "--tier", "disk", "--yes") == 0
    assert "removed 2 blocks" in capsys.readouterr().out
    rig.agree()
    assert {entry.medium for entry in rig.router.resident} == {"CPU"}


def test_nothing_is_removed_without_a_yes_and_a_dry_run_only_tells(rig: DaemonRig, capsys: Capture) -> None:
    store(rig.attach(), chain(3))
    rig.settle()
    assert kvtierd(rig, "reset", "--all") == ExitCode.GENERIC
    assert "this removes 3 blocks" in (told := capsys.readouterr().err)
    assert "--yes" in told
    assert kvtierd(rig, "reset", "--all", "--dry-run") == 0
    assert "would remove 3 blocks" in capsys.readouterr().out
    assert kvtierd(rig, "reset") == ExitCode.USAGE
    assert kvtierd(rig, "reset", "--all", "--model", "tiny") == ExitCode.USAGE
    assert len(rig.router.resident) == 6


def test_evict_makes_room_in_one_tier(rig: DaemonRig, capsys: Capture) -> None:
    made = chain(10)
    session = rig.attach()
    store(session, made)
    rig.settle()
    assert kvtierd(rig, "evict", "--tier", "cpu", "--blocks", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == {"cpu": 4}
    rig.agree()
    assert load(session, made) == ["cpu"] * 6 + ["disk"] * 4
    assert kvtierd(rig, "evict", "--tier", "dsk", "--bytes", "1GiB") == ExitCode.GENERIC
    assert "did you mean 'disk'?" in capsys.readouterr().err
    assert kvtierd(rig, "evict", "--tier", "disk") == ExitCode.USAGE


def test_the_engines_socket_takes_no_orders(rig: DaemonRig) -> None:
    for request, reply in ((OperatorReset, Removed), (DrainRequest, Draining)):
        with pytest.raises(RequestRefused, match=r"control\.sock"):
            Client(rig.daemon.socket).order(request, reply)


def test_a_drained_daemon_writes_down_is_unready_and_serves_loads_until_it_is_undone(
    make: Make, capsys: Capture
) -> None:
    rig = make(slots=64)
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], fs_tier(rig.folder, demote="on_evict")]))
    rig.start()
    made, session = chain(20), rig.attach()
    store(session, made)
    assert kvtierd(rig, "drain", "--wait", "30", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"draining": True, "waiting": {"disk": 0}, "blocked": {}}
    assert rig.tier("disk")["blocks"] == 20
    status = rig.status()
    assert (status["state"], status["ready"]) == ("draining", False)
    assert session.prepare_store([chain(1, "new")[0].key]).keys == ()
    assert load(session, made) == ["cpu"] * 20
    assert kvtierd(rig, "drain", "--undo") == 0
    assert capsys.readouterr().out == "in service\n"
    assert wait_for(lambda: rig.status()["ready"], "to be ready")
    assert len(store(session, chain(1, "new"))) == 1

"""Lines about requests and operations: at debug one for each, and a warning for what failed."""

from __future__ import annotations

import logging

import pytest

from kvtierd.core.effects import Write
from kvtierd.core.stimuli import Finished, Outcome, Status, Tick
from kvtierd.edges import trail
from kvtierd.testing.rig import LadderRig, fs_spec


@pytest.fixture
def writing():
    """A rig with one write under way, and its effect."""
    rig = LadderRig(4, [fs_spec()])
    rig.hold = True
    rig.store(1, 2)
    (effect,) = rig.held
    assert isinstance(effect, Write)
    yield rig, effect
    rig.run_held()
    rig.check()


def finished(effect, status, reason=""):
    outcomes = [Outcome(at.block.id, status, stored_bytes=4096, reason=reason) for at in effect.blocks]
    return Finished(effect.op, outcomes, 0.25)


@pytest.mark.parametrize("status", [Status.FAILED, Status.FULL, Status.CORRUPT])
def test_what_failed_is_a_warning_with_reason_and_ids(writing, caplog, status):
    rig, effect = writing
    caplog.set_level(logging.INFO)
    trail.started(rig.ladder.stack, effect)
    trail.ended(rig.ladder.stack, finished(effect, status, "No space left"))
    (line,) = caplog.records
    assert (line.levelname, line.event) == ("WARNING", "operation_failed")
    assert "tier disk: write ended: 2 " in line.getMessage()
    assert "No space left" in line.getMessage()
    assert line.fields["op"] == effect.op
    assert line.fields["tier"] == "disk"
    assert line.fields[status.value] == 2
    assert len(line.fields["generations"]) == 1


def test_what_went_well_is_told_at_debug_only(writing, caplog):
    rig, effect = writing
    caplog.set_level(logging.INFO)
    trail.started(rig.ladder.stack, effect)
    trail.ended(rig.ladder.stack, finished(effect, Status.OK))
    trail.answered(rig.ladder.sessions, rig.session, rig.answers.values())
    assert caplog.records == []
    caplog.set_level(logging.DEBUG)
    trail.started(rig.ladder.stack, effect)
    trail.ended(rig.ladder.stack, finished(effect, Status.OK))
    trail.answered(rig.ladder.sessions, rig.session, rig.answers.values())
    told = [line.event for line in caplog.records]
    assert told[:2] == ["operation_started", "operation_ended"]
    assert set(told[2:]) == {"request_answered"}
    assert len(told[2:]) == len(rig.answers), "one line for each answer, none for a block"


def test_other_stimuli_and_forgotten_operations_are_not_told(writing, caplog):
    rig, _ = writing
    caplog.set_level(logging.DEBUG)
    trail.ended(rig.ladder.stack, Tick())
    trail.ended(rig.ladder.stack, Finished(10_000, [], 0.0))
    trail.answered(rig.ladder.sessions, 99, [])
    assert caplog.records == []

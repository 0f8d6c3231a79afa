"""Advice: every trouble that a status can tell of, in words, worst first; and silence when all is well."""

from __future__ import annotations

import pytest

from kvtierd.advice import advise
from kvtierd.edges.history import PERIOD, SAMPLES, History

WELL = {
    "state": "ready",
    "hanging": {},
    "watch": {"loop_stalls": 0},
    "pool": {"lock": {"state": "locked"}},
    "quarantined_slots": 0,
    "sessions": [{"engine_id": "e0"}],
    "layouts": [{"model": "m", "slot_bytes": 4096, "waste_bytes_per_slot": [0]}],
    "tiers": [{"name": "cpu"}, {"name": "disk", "condition": "ok", "reason": "", "scanning": False}],
    "events": {
        "audiences": {"default": {"subscribers": 1, "bind": "tcp://127.0.0.1:5557", "unmatched_removals": 0}},
        "journal": {"degraded": None},
        "relay": {"engines": [{"connected": True}]},
    },
}


def disk(**report):
    return {"tiers": [{"name": "cpu"}, {"name": "disk", **report}]}


def events(**parts):
    return {"events": {**WELL["events"], **parts}}


def test_a_healthy_daemon_gets_no_advice():
    assert advise(WELL, {"no_room": 0, "revoked": 0, "dropped": 0, "failed.disk": 0}) == []
    assert advise({}) == [], "what another version does not tell is not judged"


@pytest.mark.parametrize(
    ("change", "recent", "level", "what"),
    [
        (
            {"state": "starting", "pool": {"bytes": 1 << 30, "prefaulted_bytes": 1 << 29}},
            {},
            "note",
            "512.0 MiB of 1.0 GiB",
        ),
        ({"state": "stopping"}, {}, "note", "Stopping"),
        ({"hanging": {"tier disk": 12.3}}, {}, "warning", "tier disk has made no progress for 12 s"),
        (
            {"watch": {"loop_stalls": 3, "loop_longest_stall_seconds": 2.5}},
            {},
            "warning",
            "stood still 3 times",
        ),
        ({"pool": {"lock": {"state": "not locked", "reason": "8 MiB allowed"}}}, {}, "note", "8 MiB allowed"),
        ({"quarantined_slots": 4}, {}, "note", "4 slots are in quarantine"),
        (
            {"layouts": [{"model": "m", "slot_bytes": 8192, "waste_bytes_per_slot": [4000]}]},
            {},
            "note",
            "4000 of 8192",
        ),
        ({"sessions": []}, {}, "note", "No engine"),
        (
            disk(condition="stalled", reason="2 operations hang"),
            {},
            "error",
            "disk is stalled: 2 operations hang",
        ),
        (disk(condition="degraded", last_fault="EIO"), {}, "warning", "disk is degraded: EIO"),
        (disk(condition="slow", reason="behind"), {}, "warning", "cannot keep up: behind"),
        (disk(undeletable_bytes=4096), {}, "warning", "could not delete 4.0 KiB"),
        (disk(condition="ok", scanning=True, blocks=7), {}, "note", "7 blocks so far"),
        (events(audiences={"a": {"sequence_degraded": "read-only"}}), {}, "warning", "read-only"),
        (events(audiences={"a": {"unmatched_removals": 1}}), {}, "error", "1 removals"),
        (events(audiences={"a": {"subscribers": 0, "bind": "tcp://x"}}), {}, "note", "nobody is subscribed"),
        (events(journal={"degraded": "no space"}), {}, "warning", "no space"),
        (events(relay={"engines": [{"connected": False, "endpoint": "ipc://e"}]}), {}, "warning", "ipc://e"),
        ({}, {"no_room": 5}, "warning", "5 blocks found no room"),
        ({}, {"revoked": 2}, "warning", "2 jobs or leases"),
        ({}, {"dropped": 1}, "warning", "1 event batches"),
        ({}, {"failed.disk": 9}, "warning", "disk: 9 blocks failed"),
    ],
)
def test_each_trouble_is_one_sentence_with_what_helps(change, recent, level, what):
    (advice,) = advise({**WELL, **change}, recent)
    assert advice.level == level
    assert what in advice.what
    assert advice.what.endswith(".")
    assert len(advice.do) > 20


def test_the_worst_comes_first():
    status = {**WELL, **disk(condition="stalled"), "sessions": [], "hanging": {"stream": 2.0}}
    assert [advice.level for advice in advise(status)] == ["error", "warning", "note"]


def test_history_looks_back_ten_minutes_and_no_further():
    figures = {"hits": 0.0}
    history = History(lambda: dict(figures))
    assert history.grown() == {}
    for number in range(SAMPLES + 20):
        figures["hits"] = float(number)
        history.tick(number * PERIOD)
        history.tick(number * PERIOD + 1.0)
    now = (SAMPLES + 19) * PERIOD
    rows = history.rows(now)
    assert len(rows) == SAMPLES - 1
    assert {row["grown"]["hits"] for row in rows} == {1.0}
    assert (rows[0]["age"], rows[-1]["age"]) == ((SAMPLES - 2) * PERIOD, 0.0)
    figures["hits"] += 5
    assert history.grown() == {"hits": SAMPLES - 1 + 5}

"""What a reload may take over: decided for every key, and refused with the reason of each."""

import pytest

from kvtierd.config.change import LIVE, RESTART, changes, verdict
from kvtierd.config.keys import leaf_patterns
from kvtierd.config.schema import TierFile

DISK = {"name": "disk", "type": "fs", "path": "/a", "max_bytes": "8GiB"}


def tier_file(**sections):
    body = {"version": 1, "pool": {"bytes": "1GiB"}, "tiers": [{"name": "cpu", "type": "cpu"}, DISK]}
    return TierFile.model_validate({**body, **sections})


def differ(**sections):
    return changes(tier_file(), tier_file(**sections))


@pytest.mark.parametrize("pattern", list(leaf_patterns()), ids=".".join)
def test_of_every_key_it_is_decided_whether_a_reload_takes_it_over(pattern):
    """A key that is new must be put into one of the two tables."""
    assert isinstance(verdict(pattern), str)


def test_no_decision_is_about_a_key_that_does_not_exist():
    keys = [".".join(pattern) for pattern in leaf_patterns()]
    for decided in (*LIVE, *RESTART):
        assert any(key == decided or key.startswith(f"{decided}.") for key in keys), decided
    assert not set(LIVE) & set(RESTART)


def test_an_unknown_key_is_live_nowhere():
    with pytest.raises(KeyError):
        verdict(("tiers", "*", "colour"))
    with pytest.raises(KeyError):
        verdict(("colour",))


def test_equal_files_differ_in_nothing_however_they_are_written():
    assert differ(pool={"bytes": 1 << 30}) == []
    assert differ(engine={"job_ttl": "60s"}) == []


def test_limits_are_live_and_shown_as_they_are_written():
    cpu = {"name": "cpu", "type": "cpu"}
    (one, two) = differ(tiers=[cpu, {**DISK, "max_bytes": "4GiB", "ttl": "1h"}])
    assert {(c.key, c.before, c.after, c.refusal) for c in (one, two)} == {
        ("tiers.disk.max_bytes", "8GiB", "4GiB", ""),
        ("tiers.disk.ttl", None, "1h", ""),
    }


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"pool": {"bytes": "2GiB"}}, "pool.bytes"),
        ({"tiers": [{"name": "cpu", "type": "cpu"}, {**DISK, "path": "/b"}]}, "tiers.disk.path"),
        ({"tiers": [{"name": "cpu", "type": "cpu"}]}, "tiers"),
        ({"tiers": [{"name": "cpu", "type": "cpu"}, {**DISK, "name": "other"}]}, "tiers"),
        ({"access": {"mode": "0600"}}, "access.mode"),
        ({"access": {"control_mode": "0660"}}, "access.control_mode"),
        ({"log": {"format": "json"}}, "log.format"),
        ({"events": {"heartbeat": "1s"}}, "events.heartbeat"),
    ],
)
def test_what_is_laid_out_at_the_start_is_refused_with_the_reason(sections, key):
    (change,) = differ(**sections)
    assert change.key == key
    assert change.refusal


def test_the_order_of_tiers_is_one_change_and_their_limits_others():
    other = {"name": "other", "type": "fs", "path": "/b", "max_bytes": "8GiB"}
    cpu = {"name": "cpu", "type": "cpu"}
    old = tier_file(tiers=[cpu, DISK, other])
    new = tier_file(tiers=[cpu, other, {**DISK, "max_bytes": "1GiB"}])
    assert [(c.key, bool(c.refusal)) for c in changes(old, new)] == [
        ("tiers", True),
        ("tiers.disk.max_bytes", False),
    ]

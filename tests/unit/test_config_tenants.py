"""Section ``tenants`` of the tier file, and what becomes of it."""

import pytest

from kvtierd.config.schema import TierFile
from kvtierd.config.tenants import shares_of
from kvtierd.core.tenants import NAMED

GIB = 1 << 30


def tier_file(*tenants, max_bytes="16GiB"):
    return TierFile.model_validate(
        {
            "version": 1,
            "pool": {"bytes": "8GiB"},
            "tiers": [
                {"name": "cpu", "type": "cpu"},
                {"name": "disk", "type": "fs", "path": "/var/cache/kvtierd", "max_bytes": max_bytes},
            ],
            "tenants": [{"name": name, "shares": shares} for name, shares in tenants],
        }
    )


def test_shares_are_sizes_by_tier():
    tenants = tier_file(
        ("a", {"cpu": "1GiB", "disk": "4GiB"}), ("Team B/x", {"cpu": "2GiB"}), ("c", {})
    ).tenants
    assert shares_of(tenants, "cpu") == {"a": GIB, "Team B/x": 2 * GIB}
    assert shares_of(tenants, "disk") == {"a": 4 * GIB}


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ([("a", {"dsik": "1GiB"})], "no tier is named 'dsik'; the tiers are cpu, disk"),
        ([("a", {}), ("a", {})], "another tenant is already named 'a'"),
        ([("a", {"cpu": "5GiB"}), ("b", {"cpu": "5GiB"})], "shares of 'cpu' add up to"),
        ([("a", {"disk": "15GiB"})], "shares of 'disk' add up to"),
        ([(f"t{number}", {}) for number in range(NAMED + 1)], f"at most {NAMED}"),
        ([("", {})], "at least 1 character"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(tenants, said):
    with pytest.raises(ValueError, match="tenant") as caught:
        tier_file(*tenants)
    assert said in str(caught.value)


def test_a_share_of_an_unlimited_tier_is_refused():
    with pytest.raises(ValueError, match="has no max_bytes"):
        tier_file(("a", {"disk": "1GiB"}), max_bytes="unlimited")

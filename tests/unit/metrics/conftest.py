"""Figures of a daemon that has just started."""

from __future__ import annotations

import pytest

from kvtierd.config.schema import TierFile
from kvtierd.edges.metrics.family import Figures
from kvtierd.edges.metrics.plan import make_plan

TIER_FILE = {
    "version": 1,
    "pool": {"bytes": "64MiB"},
    "tiers": [
        {"name": "cpu", "type": "cpu"},
        {
            "name": "disk",
            "type": "fs",
            "path": "/var/cache/kvtierd",
            "max_bytes": "1GiB",
            "locality": "LOCAL",
        },
        {"name": "bucket", "type": "object", "url": "memory://b"},
    ],
    "events": {
        "audiences": [
            {"name": "default"},
            {
                "name": "ranks",
                "bind": "tcp://127.0.0.1:6000",
                "replay": "tcp://127.0.0.1:6100",
                "media": ["CPU"],
                "rank_ports": 2,
            },
        ],
        "relay": [{"connect": "ipc:///run/engine-events"}],
    },
}


@pytest.fixture
def plan():
    return make_plan(TierFile.model_validate(TIER_FILE))


@pytest.fixture
def fresh(plan):
    """Before anything is open: what a scrape finds while the pool is pre-faulted."""
    return Figures({"state": "starting"}, plan)

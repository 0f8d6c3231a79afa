"""The script for a lent GPU stays runnable: every part of it, on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(180)]


def test_the_gpu_script_runs_through_without_a_gpu(run_script: Any) -> None:
    lines = [json.loads(line) for line in run_script("../gpu/run_on_gpu.py", "--without-gpu").splitlines()]
    assert {line["part"] for line in lines} == {"device", "ordering", "two processes", "bandwidth", "result"}
    assert lines[-1] == {"part": "result", "failed": []}

"""The promises of the vLLM glue without an engine: checked in vLLM's environment, reported one by one."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import find_older

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(180)]


def promises() -> list[str]:
    """Names of the checks, without importing them: they need vLLM."""
    trees = [ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.glob("glue_*_checks.py"))]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("check_")]


@pytest.fixture(scope="module", params=["newer", "older"])
def results(run_script: Any, request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Every check's failure on one of the two vLLMs, ``None`` for a kept promise."""
    overlay = find_older() if request.param == "older" else None
    found: dict[str, str | None] = json.loads(run_script("glue_checks.py", overlay=overlay).splitlines()[-1])
    return found


@pytest.mark.parametrize("promise", promises())
def test_glue(promise: str, results: dict[str, str | None]) -> None:
    assert promise in results
    if (failure := results[promise]) is not None:
        pytest.fail(failure)

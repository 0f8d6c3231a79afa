"""The promises of the SGLang backend, one by one, checked with SGLang's own classes."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.local_daemon import short_folder

from .conftest import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

FOLDER = ROOT / ".venvs" / "sglang"
VARIABLE = "KVTIERD_SGLANG"
CHECKS = Path(__file__).with_name("sglang_checks.py")


def find_sglang() -> Path:
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else FOLDER
    if (folder / "sglang").is_dir():
        return folder
    if named:
        pytest.fail(f"{VARIABLE} names {named}, which has no sglang")
    pytest.skip(
        f"NOT TESTED against SGLang: no {folder.relative_to(ROOT)} and no {VARIABLE};"
        " make it from tests/requirements/sglang.txt"
    )


def promises() -> list[str]:
    """Names of the checks, without importing them: they need SGLang."""
    trees = [ast.parse(path.read_text()) for path in sorted(CHECKS.parent.glob("sglang_*checks.py"))]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("check_")]


@pytest.fixture(scope="module")
def results(run_script: Any) -> dict[str, str | None]:
    overlay = find_sglang()
    with short_folder("sg") as folder:
        printed = run_script(CHECKS.name, str(folder), sys.executable, overlay=overlay)
        found: dict[str, str | None] = json.loads(printed.splitlines()[-1])
        return found


@pytest.mark.parametrize("promise", promises())
def test_sglang(promise: str, results: dict[str, str | None]) -> None:
    assert promise in results
    if (failure := results[promise]) is not None:
        pytest.fail(failure)

"""The installed vLLMs have the surface that the table says, so that what moved is named before it breaks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvtierd.testing import vllm_surface

from .conftest import ROOT, find_older, find_python

pytestmark = [pytest.mark.engine]

TABLE = json.loads((ROOT / "tests" / "golden" / "vllm_surface.json").read_text())


def packages_of(python: str) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


@pytest.mark.parametrize("which", ["newer", "older"])
def test_the_installed_vllm_has_the_surface_of_the_table(which: str) -> None:
    folder = packages_of(find_python()) if which == "newer" else find_older()
    version, read = vllm_surface.reader(folder)
    expected = vllm_surface.of_version(TABLE, version)
    assert expected, f"vLLM {version} is not in the table: make it anew with kvtierd.testing.vllm_surface"
    assert vllm_surface.moved(expected, vllm_surface.surface(read)) == []

"""Installs a package as pip would leave it: on the import path, with its metadata beside it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

GROUP = "kvtierd.backends"
EXAMPLE = Path(__file__).with_name("kvtierd_example")


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a distribution with entry points of our group importable, here and in child processes."""

    def make(name: str, entry_points: dict[str, str], version: str = "0.1") -> Path:
        site = tmp_path / f"site-{name}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        return site

    return make


@pytest.fixture
def example(distribution: Callable[..., Path]) -> None:
    """The example package of this folder, installed by what its own pyproject says."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    site = distribution(project["name"], project["entry-points"][GROUP], project["version"])
    (site / "kvtierd_example").symlink_to(EXAMPLE / "kvtierd_example")

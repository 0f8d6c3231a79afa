"""A root that does not exist yet, and backends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.edges.backends.fs import FsBackend


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def backend(root: Path) -> Iterator[FsBackend]:
    """Every block is a file."""
    opened = FsBackend("disk", root, pack_below=0)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def shared(root: Path) -> Iterator[FsBackend]:
    opened = FsBackend("disk", root, shared=True)
    opened.open()
    yield opened
    opened.close()

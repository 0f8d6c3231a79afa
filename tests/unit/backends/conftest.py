"""A root that does not exist yet, and backends on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.edges.backends.fs import FsBackend


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def opened_below(root: Path) -> Callable[[], int]:
    """Counts what this process has open below the root; other tests' garbage may be closed at any time."""

    def count() -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{name}").startswith(str(root))
        return found

    return count


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

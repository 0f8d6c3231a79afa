"""A real daemon for each test, and a check of its stream, its life and its log at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.client import Layout
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig

Make = Callable[..., DaemonRig]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make rigs, not started.

    At the end, a daemon that was not stopped or killed by the test must be alive, agree with its router at a
    quiet point and stop with exit code 0; none may have complained.
    """
    made: list[DaemonRig] = []
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:  # tmp_path is too long for a socket's path

        def build(**options: object) -> DaemonRig:
            path = Path(folder, str(len(made)))
            path.mkdir()
            made.append(DaemonRig(path, **options))  # type: ignore[arg-type]
            return made[-1]

        try:
            yield build
            for rig in made:
                assert rig.complaints() == [], rig.daemon.log_tail(60)
                if rig.daemon.pid is not None:
                    rig.agree()
                    rig.client.close()
                    assert rig.daemon.stop() == 0, rig.daemon.log_tail()
                assert rig.complaints() == [], rig.daemon.log_tail(60)
        finally:
            for rig in made:
                rig.close()


@pytest.fixture
def layout() -> Layout:
    """The layout of :func:`rig`."""
    return LAYOUT


@pytest.fixture
def rig(make: Make, layout: Layout) -> DaemonRig:
    """A running daemon with 64 slots and one FS tier that checks every invariant after every turn."""
    return make(layout=layout).start()

"""Real daemons for the tests, and a check of their streams, lives and logs at the end of each test."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.client import Layout
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig
from kvtierd.testing.engine_process import EngineProcess

Make = Callable[..., DaemonRig]
Engines = Callable[..., EngineProcess]


class Garage:
    """Makes rigs; keeps running ones that a test left as good as new for the next test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._idle: dict[Layout, DaemonRig] = {}

    def build(self, **options: object) -> DaemonRig:
        """Make a rig, not started."""
        path = self._folder / str(self._made)
        self._made += 1
        path.mkdir()
        return DaemonRig(path, **options)  # type: ignore[arg-type]

    def take(self, layout: Layout) -> DaemonRig:
        """Return a running rig without a past."""
        return self._idle.pop(layout, None) or self.build(layout=layout).start()

    def give(self, rig: DaemonRig) -> None:
        """Keep a running rig for the next test if it can be renewed, or stop it."""
        kept_aside = any((rig.folder / "disk" / "quarantine").iterdir())
        if rig.layout not in self._idle and not kept_aside and rig.renew():
            self._idle[rig.layout] = rig
        else:
            retire(rig)

    def close(self) -> None:
        """Stop what is left."""
        while self._idle:
            retire(self._idle.popitem()[1])


def examine(rig: DaemonRig) -> None:
    """A daemon that runs must agree with its router at a quiet point; none may have complained."""
    assert rig.complaints() == [], rig.daemon.log_tail(60)
    if rig.daemon.pid is not None:
        rig.agree()


def retire(rig: DaemonRig) -> None:
    """A daemon that runs must stop with exit code 0 and without a complaint."""
    try:
        rig.client.close()
        if rig.daemon.pid is not None:
            assert rig.daemon.stop() == 0, rig.daemon.log_tail()
        assert rig.complaints() == [], rig.daemon.log_tail(60)
    finally:
        rig.close()


class Mount:
    """A filesystem of its own, of ``size``, that can be mounted at a folder, taken away and brought back."""

    def __init__(self, device: Path, folder: Path, size: str) -> None:
        self._device, self._folder = device, folder
        device.mkdir()
        done = self._mount("-t", "tmpfs", "-o", f"size={size}", "kvtierd-test", str(device))
        if done.returncode:
            pytest.skip(f"NO REAL MOUNT TESTED: not permitted here: {done.stderr.strip()}")

    def __enter__(self) -> Mount:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        for folder in (self._folder, self._device):
            self._detach(folder)

    def attach(self, *, writable: bool = True) -> None:
        assert self._mount("--bind", str(self._device), str(self._folder)).returncode == 0
        if not writable:
            # Busy while somebody has a file open for writing.
            remount = ("-o", "remount,bind,ro", str(self._folder))
            wait_for(lambda: self._mount(*remount).returncode == 0, "the mount to be read-only")

    def detach(self) -> None:
        """As when the storage is lost: whatever is open stays open."""
        assert self._detach(self._folder) == 0

    @staticmethod
    def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False, timeout=20)

    @staticmethod
    def _detach(folder: Path) -> int:
        return subprocess.run(
            ["umount", "-l", str(folder)], capture_output=True, check=False, timeout=20
        ).returncode


@pytest.fixture
def mounted() -> type[Mount]:
    """Make mounts: device folder, mount point, size."""
    return Mount


@pytest.fixture
def tier_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a type of tiers for daemons to come: its name, and a module that has ``make``."""

    def install(name: str, code: str) -> None:
        site, info = tmp_path / "site", tmp_path / "site" / f"{name}_tiers-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-tiers\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[kvtierd.backends]\n{name} = {name}_tiers:make\n")
        (site / f"{name}_tiers.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)

    return install


@pytest.fixture(scope="session")
def garage() -> Iterator[Garage]:
    """The rigs of this run."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:  # tmp_path is too long for a socket's path
        garage = Garage(Path(folder))
        yield garage
        garage.close()


@pytest.fixture
def make(garage: Garage) -> Iterator[Make]:
    """Make rigs that no other test uses, not started; they are examined and retired at the end."""
    made: list[DaemonRig] = []

    def build(**options: object) -> DaemonRig:
        made.append(garage.build(**options))
        return made[-1]

    try:
        yield build
        for rig in made:
            examine(rig)
            retire(rig)
    finally:
        for rig in made:
            rig.close()


@pytest.fixture
def layout() -> Layout:
    """The layout of :func:`rig`."""
    return LAYOUT


@pytest.fixture
def rig(garage: Garage, layout: Layout) -> Iterator[DaemonRig]:
    """A running daemon with 64 slots and one FS tier that checks every invariant after every turn.

    It may have served other tests before, and has nothing of theirs; a test that changes more than blocks
    and sessions makes one of its own.
    """
    rig = garage.take(layout)
    try:
        yield rig
        examine(rig)
        garage.give(rig)
    except BaseException:
        rig.close()
        raise


@pytest.fixture
def engine() -> Iterator[Engines]:
    """Start engine processes; all end with the test."""
    running: list[EngineProcess] = []

    def start(rig: DaemonRig, engine_id: str = "child", role: str = "scheduler") -> EngineProcess:
        running.append(EngineProcess(rig, engine_id, role))
        return running[-1]

    yield start
    for process in running:
        process.kill()

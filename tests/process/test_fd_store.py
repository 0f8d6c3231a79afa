"""A pool without a name outlives the daemon in the service manager's descriptor store."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, load, store

Make = Callable[..., DaemonRig]


class Manager:
    """What systemd does for a service with a descriptor store, as far as its protocol says."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notify")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.path)
        self._sock.settimeout(5)
        self.kept: list[tuple[str, int]] = []

    def hear(self) -> dict[str, str]:
        """Return the next word about the descriptor store."""
        while True:
            data, ancillary, _, _ = self._sock.recvmsg(4096, socket.CMSG_SPACE(16))
            said = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDNAME" in said:
                break
        for _, _, raw in ancillary:
            got = array.array("i", raw)
            self.kept += [(said["FDNAME"], fd) for fd in got]
        if said.get("FDSTOREREMOVE") == "1":
            self.close_kept(said["FDNAME"])
        return said

    def close_kept(self, name: str) -> None:
        for other, fd in self.kept:
            if other == name:
                os.close(fd)
        self.kept = [item for item in self.kept if item[0] != name]

    def run(self, rig: DaemonRig) -> subprocess.Popen[bytes]:
        """Start the service with what is kept, as descriptors from 3 on."""
        fds = [fd for _, fd in self.kept]
        names = ":".join(name for name, _ in self.kept)
        moves = "; ".join(f"os.dup2({fd}, {3 + number})" for number, fd in enumerate(fds)) or "pass"
        start = (
            f"import os, sys; {moves}; os.environ['LISTEN_PID'] = str(os.getpid()); "
            f"os.environ.update(LISTEN_FDS='{len(fds)}', LISTEN_FDNAMES='{names}');"
            f"os.environ.update(NOTIFY_SOCKET='{self.path}');"
            "os.execv(sys.executable, [sys.executable, '-m', 'kvtierd', 'serve', '--config', sys.argv[1]])"
        )
        with rig.daemon.log.open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, "-c", start, str(rig.daemon.config)],
                pass_fds=fds,
                stdout=sink,
                stderr=sink,
            )

    def close(self) -> None:
        self._sock.close()
        for _, fd in self.kept:
            os.close(fd)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


def ready(rig: DaemonRig) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        wait_for(lambda: probe.connect_ex(rig.daemon.socket) == 0, "the daemon", timeout=30)


def test_a_pool_in_the_descriptor_store_is_gone_on_with(make: Make, manager: Manager) -> None:
    rig = make(slots=64, tiers=[])
    service = manager.run(rig)
    try:
        assert manager.hear()["FDSTOREREMOVE"] == "1", "what an older run left is of no use"
        assert manager.hear()["FDSTORE"] == "1"
        ready(rig)
        session = rig.attach()
        pool_id = session.pool_id
        store(session, chain(12))
        service.kill()
        service.wait(10)
        service = manager.run(rig)
        assert manager.hear()["FDSTORE"] == "1"
        ready(rig)
        again = rig.attach(engine_id="other")
        assert (again.pool_id, load(again, chain(12))) == (pool_id, ["cpu"] * 12)
        rig.client.close()
        service.terminate()
        assert service.wait(20) == 0
        assert manager.hear()["FDSTOREREMOVE"] == "1", "a clean stop leaves nothing"
        assert not [name for name in os.listdir(rig.folder / "run") if name.startswith("pool")]
    finally:
        service.kill()
        service.wait(10)

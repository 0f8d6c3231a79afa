"""A pod without a cluster: an engine's container and kvtierd's, from the built image, as the manifests say.

Separate pid, ipc and mount namespaces, different users with one group, no capabilities, read-only roots. What
is shared is what the manifest's volumes share. The network is one, as a pod's is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtierd.client import Client
from kvtierd.testing.clock import wait_for
from kvtierd.testing.consumer import ReferenceConsumer, residencies
from kvtierd.testing.daemon_rig import LAYOUT
from kvtierd.testing.local_daemon import free_port, short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
GROUP = 65532
ENGINE = Path(__file__).with_name("engine_in_pod.py")


class Pod:
    """The volumes, the ports and the containers of one pod."""

    def __init__(self, folder: Path, image, start) -> None:
        self._image, self._start, self._folder = image, start, folder
        patch = yaml.safe_load((KUBERNETES / "components" / "sidecar" / "sidecar.yaml").read_text())
        pod = patch["spec"]["template"]["spec"]
        self._sidecar = next(item for item in pod["initContainers"] if item["name"] == "kvtierd")
        self._engine = pod["containers"][0]
        self.ports = {name: free_port() for name in ("9557", "5557", "5558")}
        for volume in pod["volumes"]:
            path = folder / volume["name"]
            path.mkdir()
            # As the kubelet leaves a volume when the pod has an fsGroup.
            os.chown(path, 0, GROUP)
            path.chmod(0o2770)
        shutil.copy(KUBERNETES / "overlays" / "minimal" / "tiers.yaml", folder / "kvtierd-tiers")
        (folder / "kvtierd-tiers").chmod(0o2755)
        (folder / "kvtierd-tiers" / "tiers.yaml").chmod(0o644)
        # What the glue's init container does.
        shutil.copytree(image.rootfs / "opt/kvtierd/glue/kvtierd", folder / "kvtierd-glue" / "kvtierd")
        self.containers: list[Any] = []

    def _mounts(self, container: dict[str, Any]) -> dict[Path, str]:
        return {self._folder / mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}

    def sidecar(self, *, cgroup: Path | None = None, **changes: str):
        env = {"PATH": "/opt/kvtierd/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "POD_IP": "127.0.0.1"}
        for entry in self._sidecar["env"]:
            value = entry.get("value", f"the-{entry['name'].lower()}").replace("$(POD_IP)", "127.0.0.1")
            for port, ours in self.ports.items():
                value = value.replace(f":{port}", f":{ours}")
            env.setdefault(entry["name"], value)
        env |= {"KVTIERD__POOL__BYTES": "64MiB", "KVTIERD__TIERS__1__MAX_BYTES": "256MiB", **changes}
        return self._run(
            ["kvtierd", *self._sidecar["args"]],
            65532,
            [65532],
            self._mounts(self._sidecar),
            env,
            "kvtierd",
            cgroup=cgroup,
        )

    def engine(self, uid: int = 2000, name: str = "engine-0"):
        mounts = self._mounts(self._engine) | {ENGINE.parent: "/mnt"}
        env = {entry["name"]: entry["value"] for entry in self._engine["env"]}
        command = ["/opt/kvtierd/bin/python3", f"/mnt/{ENGINE.name}", "/run/kvtierd/engine.sock", name]
        return self._run(command, uid, [uid, GROUP], mounts, env, "engine")

    def _run(self, command, uid, gids, mounts, env, name, **options):
        container = self._start(
            self._image.rootfs,
            command,
            uid=uid,
            gids=gids,
            mounts=mounts,
            env=env,
            log=self._folder / f"{name}.log",
            **options,
        )
        self.containers.append(container)
        return container

    def probe(self, path: str) -> tuple[int, dict[str, Any]]:
        """Ask one of the probes that the manifest names, on its port."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['9557']}{path}", timeout=5) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        except OSError:
            return 0, {}

    def started(self) -> None:
        wait_for(lambda: self.probe("/startupz")[0] == 200, f"the sidecar to start: {self.log()}", timeout=30)

    def log(self) -> str:
        path = self._folder / "kvtierd.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def truth(self) -> set:
        """What the daemon holds, asked over the shared socket."""
        path = str(self._folder / "kvtierd-run" / "engine.sock")
        with Client(path, deadline=5.0) as client, client.attach(LAYOUT, engine_id="auditor") as session:
            return residencies(session.inventory())

    def reader(self) -> ReferenceConsumer:
        reader = ReferenceConsumer()
        reader.connect(f"tcp://127.0.0.1:{self.ports['5557']}", f"tcp://127.0.0.1:{self.ports['5558']}")
        return reader


@pytest.fixture
def pod(image, start_container):
    with short_folder("pod") as folder:
        folder.chmod(0o755)
        made = Pod(folder, image, start_container)
        yield made
        for container in made.containers:
            if container.process.poll() is None:
                container.end(signal.SIGKILL)


def test_an_engine_and_its_sidecar_live_through_everything_a_pod_does(pod):
    """L98, L103, L113, L114, L118: two users, no capabilities, read-only roots, only the volumes shared."""
    sidecar = pod.sidecar()
    pod.started()
    for probe in ("/startupz", "/readyz", "/livez", "/statusz"):
        assert pod.probe(probe)[0] == 200
    engine = pod.engine()
    with pod.reader() as reader:
        assert engine.ask("connected")
        assert engine.ask("store", 64, "a") == 64
        assert engine.ask("load", 64, "a") == {"tiers": {"cpu": 64}, "wrong": 0}
        wait_for(lambda: reader.poll(0.1) or reader.resident == pod.truth(), "the reader to agree")

        # The daemon is killed: the engine goes on, the pool stays, and so does the one region of memory.
        for _ in range(5):
            assert sidecar.end(signal.SIGKILL) != 0
            sidecar = pod.sidecar()
            pod.started()
            regions = list((pod._folder / "kvtierd-pool").iterdir())
            assert sum(path.stat().st_blocks * 512 for path in regions) < 80 << 20
        wait_for(lambda: engine.ask("connected"), "the engine to come back")
        assert engine.ask("load", 64, "a") == {"tiers": {"cpu": 64}, "wrong": 0}
        wait_for(lambda: reader.poll(0.1) or reader.resident == pod.truth(), "the reader to agree again")

        # The engine restarts: its blocks wait for it.
        assert engine.end(signal.SIGKILL) != 0
        engine = pod.engine(uid=2001)
        assert engine.ask("load", 64, "a") == {"tiers": {"cpu": 64}, "wrong": 0}
        assert engine.ask("store", 64, "b") == 64

        # A disk that fails is no reason to restart the pod.
        assert pod.probe("/livez")[0] == 200

        # The pod ends: the engine first, then the sidecar, which leaves within its grace and with 0.
        assert engine.ask("close") is None
        engine.end()
        assert sidecar.end(signal.SIGTERM, seconds=30) == 0, pod.log()


def test_a_sidecar_without_its_volume_for_sockets_says_what_is_missing_and_leaves_nothing(pod):
    """Read-only root and no volume: a message and an exit code, not a traceback."""
    sidecar = pod.sidecar(KVTIERD__RUNTIME_DIR="/opt/run")
    assert sidecar.process.wait(20) == 73
    assert "runtime_dir /opt/run" in pod.log()
    assert "Traceback" not in pod.log()
    assert not any((pod._folder / "kvtierd-pool").iterdir())
    sidecar.end()


def test_a_sidecar_without_its_state_serves_and_says_what_it_cannot_promise(pod):
    pod.sidecar(KVTIERD__STATE_DIR="/opt/state")
    pod.started()
    assert pod.probe("/readyz")[0] == 200
    assert "batch numbers will not survive a restart: cannot write /opt/state" in pod.log()


def test_an_engine_outside_the_group_is_kept_out_and_says_so(pod, image):
    pod.sidecar()
    pod.started()
    stranger = pod._run(
        ["/opt/kvtierd/bin/python3", "/mnt/engine_in_pod.py", "/run/kvtierd/engine.sock", "stranger"],
        3000,
        [3000],
        pod._mounts(pod._engine) | {ENGINE.parent: "/mnt"},
        {"PYTHONPATH": "/opt/kvtierd-glue"},
        "stranger",
    )
    assert stranger.ask("connected") is False
    assert stranger.ask("store", 4, "x") == 0


def test_an_engine_that_cannot_map_the_pool_hears_so_within_a_second(pod):
    """L115: a reason at once, in a container that has no room for the pool in its address space."""
    pod.sidecar()
    pod.started()
    cramped = pod.engine(name="cramped")
    seconds, said = json.loads(cramped.process.stdout.readline())
    assert seconds < 1.0
    assert "cannot_map" in said
    cramped.end()


@pytest.fixture
def memory_group():
    """A control group (version 1, as on the machines that run this) with room for the pool and 256 MiB."""
    group = Path(f"/sys/fs/cgroup/memory/kvtierd-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str((64 << 20) + (256 << 20)))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
    group.rmdir()


def test_a_sidecar_within_its_limit_is_never_killed_for_memory(memory_group, pod):
    """L103: blocks come and go, four times what the pool and the disk hold, within the pool and 256 MiB."""
    sidecar = pod.sidecar(cgroup=memory_group, KVTIERD__TIERS__1__MAX_BYTES="64MiB")
    pod.started()
    assert str(sidecar.pid) in (memory_group / "cgroup.procs").read_text().split()
    engine = pod.engine()
    stored = sum(engine.ask("store", 512, f"round {number}") for number in range(256))
    assert stored == 512 * 256
    assert "oom_kill 0" in (memory_group / "memory.oom_control").read_text()
    assert sidecar.process.poll() is None
    assert engine.ask("close") is None
    engine.end()
    assert sidecar.end(signal.SIGTERM, seconds=30) == 0, pod.log()

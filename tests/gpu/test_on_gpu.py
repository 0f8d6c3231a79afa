"""The copies on a real GPU (``run_on_gpu.py``), where there is one and a torch that can use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_on_gpu.py")
PROBE = "import torch, sys; sys.exit(not torch.cuda.is_available())"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_copies_are_right_ordered_and_fast_on_a_gpu() -> None:
    python = os.environ.get("KVTIERD_GPU_PYTHON", sys.executable)
    if subprocess.run([python, "-c", PROBE], capture_output=True, check=False, timeout=120).returncode:
        pytest.skip(
            f"NOT TESTED on a GPU: {python} has no torch with a CUDA device;"
            " name one that has in KVTIERD_GPU_PYTHON, or run tests/gpu/run_on_gpu.py there"
        )
    done = subprocess.run(
        [python, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=580, cwd=SCRIPT.parents[2]
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"part": "result", "failed": []}

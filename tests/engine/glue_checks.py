"""Runs the checks of the vLLM glue inside vLLM's environment and prints one JSON object, name to failure.

By hand: ``PYTHONPATH=. .venvs/vllm/bin/python tests/engine/glue_checks.py``. ``test_glue.py`` turns each
``check_*`` function, one promise each, into a test.
"""

from __future__ import annotations

import importlib
import json
import traceback
from pathlib import Path

from kvtierd.engines.vllm import worker


def run():
    """Run every check; ``None`` for a kept promise, else the traceback."""
    results = {}
    for path in sorted(Path(__file__).parent.glob("glue_*_checks.py")):
        module = importlib.import_module(path.stem)
        for name, check in vars(module).items():
            if name.startswith("check_"):
                try:
                    check()
                    results[name] = None
                except Exception:
                    results[name] = traceback.format_exc()
                for left in list(worker._workers):  # they would speak for the next check's process
                    left.shutdown()
    return results


if __name__ == "__main__":
    print(json.dumps(run()))

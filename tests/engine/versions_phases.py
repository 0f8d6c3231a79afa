"""One life of an engine of whatever version this is, on a daemon that others have used; writes what it saw.

``PYTHONPATH=[<older>:]<repo> <vllm python> versions_phases.py SETTINGS.json RESULT.json``; driven by
``test_versions.py``, which states what must hold. PYTHONHASHSEED is set for all, so that equal prompts have
equal block hashes whatever the version, and only the namespace keeps apart what must be apart.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["PYTHONHASHSEED"] = "0"

from engine_rig import Tool, engine, generate, scheduler_of, stop
from shapes_rig import plain, workload
from vllm.version import __version__


class Engines:
    """What :func:`shapes_rig.plain` needs."""

    def __init__(self, model):
        self._model = model

    def plain(self, **options):
        return engine(self._model, **options)


def main():
    settings, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    asked = workload()
    seen = {"version": __version__, "plain": plain(Engines(settings["model"]), asked=asked)}
    llm = engine(settings["model"], {"kvtierd_socket": settings["socket"]})
    tool = Tool(llm, settings["socket"])
    layout = tool.session.layout
    seen |= {"namespace": layout.namespace(), "layout": layout.layout}
    seen["found"] = len(tool.blocks("disk"))
    seen["alone"] = generate(llm, asked[:1])[1]
    seen["first"] = generate(llm, asked)
    tool.wait_on_disk(tool.blocks("cpu"))
    llm.reset_prefix_cache()
    seen["second"] = generate(llm, asked)
    seen["blocks"] = sorted(str(h) for hashes in tool.blocks("disk").values() for h in hashes)
    seen["failures"] = scheduler_of(llm).connector._manager.failures
    tool.client.close()
    stop(llm)
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

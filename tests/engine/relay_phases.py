"""The life of an engine whose own events go through kvtierd into Dynamo's indexer; writes what that answered.

``PYTHONPATH=<repo> <vllm python> relay_phases.py SETTINGS.json RESULT.json``; driven by
``test_relay_dynamo.py``, which states what must hold.
"""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from engine_rig import BLOCK, Tool, by_block, engine, generate, prompts, replayed, scheduler_of, stop

from kvtierd.core.model import hash_of
from kvtierd.testing.clock import wait_for


class Index:
    """What the indexer believes of the only worker."""

    def __init__(self, url, model):
        self._url, self._model = url, model
        self.seen = {}

    def settles(self, step, tokens, expected):
        """Wait until the prefix of ``tokens`` in [gpu, cpu, disk] is as expected; note how it ended."""
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: self.query(tokens) == expected, step, timeout=15)
        self.seen[step] = [self.query(tokens), expected]

    def query(self, tokens):
        body = json.dumps({"token_ids": tokens, "model_name": self._model}).encode()
        request = urllib.request.Request(f"{self._url}/query", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found = json.loads(answer.read())["instances"].get("1", {})
        except urllib.error.HTTPError:
            found = {}
        return [found.get(medium, 0) for medium in ("gpu", "cpu", "disk")]


def start(settings):
    ours = (settings["engine_events"], settings["engine_replay"])
    return engine(settings["model"], {"kvtierd_socket": settings["socket"]}, ours)


def on_device(llm, tokens, hashes, said):
    """How many tokens of a prompt the engine itself has on its device, from the start.

    ``hashes``: event hash -> the engine's; ``said``: what its events said of each block.
    """
    pool, parent = scheduler_of(llm).kv_cache_manager.block_pool, None
    for at in range(0, len(tokens), BLOCK):
        (parent,) = (h for h, what in said.items() if what[:2] == [parent, tokens[at : at + BLOCK]])
        if pool.get_cached_block(hashes[parent], [0]) is None:
            return at
    return len(tokens)


def main():
    settings, result = (Path(argument) for argument in sys.argv[1:])
    settings = json.loads(settings.read_text())
    index = Index(settings["indexer"], settings["indexed"])
    first, *others = [{"prompt_token_ids": prompt["prompt_token_ids"]} for prompt in prompts(8)]
    tokens = first["prompt_token_ids"][: len(first["prompt_token_ids"]) // BLOCK * BLOCK]
    whole = len(tokens)

    llm = start(settings)
    tool = Tool(llm, settings["socket"])
    generate(llm, [first])
    keys = list(tool.blocks("cpu"))
    tool.wait_on_disk(keys)
    index.settles("generated", tokens, [whole, whole, whole])

    llm.reset_prefix_cache()
    generate(llm, others[:1])  # shares no block; the reset is in the next step's batch
    index.settles("reset", tokens, [0, whole, whole])

    tool.empty_pool()
    index.settles("evicted from the pool", tokens, [0, 0, whole])

    generate(llm, [first])
    index.settles("loaded from disk", tokens, [whole, whole, whole])

    generate(llm, prompts(30, seed=21))  # more than the device holds
    hashes = {names[0]: hash_of(key) for key, names in tool.blocks("disk").items()}
    left = on_device(llm, tokens, hashes, by_block(replayed(settings["engine_replay"]), "GPU"))
    index.settles("displaced on the device", tokens, [left, whole, whole])

    stop(llm)
    index.settles("engine gone", tokens, [0, whole, whole])
    llm = start(settings)
    generate(llm, [first])
    index.settles("engine restarted", tokens, [whole, whole, whole])
    index.seen["relay"] = tool.client.status()["events"]["relay"]
    stop(llm)
    result.write_text(json.dumps(index.seen))


if __name__ == "__main__":
    main()

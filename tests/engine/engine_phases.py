"""The life of an engine with kvtierd, in phases; each runs in a process of its own and writes what it saw.

``PYTHONPATH=<repo> <vllm python> engine_phases.py PHASE SETTINGS.json RESULT.json``; driven by
``test_vllm.py``, which states what must hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from engine_rig import (
    BLOCK,
    Events,
    Tool,
    by_block,
    different_blocks,
    engine,
    generate,
    generate_stepwise,
    prompts,
    replayed,
    scheduler_of,
    sessions_of,
    stop,
)

from kvtierd.testing.clock import wait_for


def plain(settings):
    """The truth: an engine without a connector; then one whose daemon is not there."""
    llm = engine(settings["model"])
    seen = {"tokens": generate(llm, prompts())[0], "fresh": generate(llm, prompts(seed=12))[0]}
    stop(llm)
    llm = engine(settings["model"], {"kvtierd_socket": settings["nobody"]})
    seen["absent"] = generate(llm, prompts())
    llm.reset_prefix_cache()
    seen["absent_again"] = generate(llm, prompts())
    seen["policy"] = scheduler_of(llm).recompute_kv_load_failures
    stop(llm)
    return seen


def first(settings):
    """Store, lose the engine's own cache, load from the pool, from disk, from poisoned memory."""
    seen = {}
    theirs = Events(settings["endpoint"])
    ours = (settings["engine_events"], settings["engine_replay"])
    llm = engine(settings["model"], {"kvtierd_socket": settings["socket"]}, ours)
    tool = Tool(llm, settings["socket"])

    seen["stored"] = generate(llm, prompts())
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts()]
    seen["cacheable"] = [length // BLOCK * BLOCK for length in lengths]
    seen["full_blocks"] = different_blocks(prompts())
    wait_for(
        lambda: len(tool.blocks("cpu")) >= seen["full_blocks"], "the last commits"
    )  # nobody waits for them
    blocks = tool.blocks("cpu")
    tool.wait_on_disk(blocks)
    seen["blocks"] = len(blocks)

    llm.reset_prefix_cache()
    before = tool.counters("cpu")
    seen["from_pool"] = generate(llm, prompts())
    seen["pool_loads"] = tool.counters("cpu").get("load_from_cpu", 0) - before.get("load_from_cpu", 0)

    tool.empty_pool()
    llm.reset_prefix_cache()
    seen["from_disk"] = generate(llm, prompts())
    seen["disk_reads"] = tool.counters("disk").get("read_ok", 0)
    seen["promoted"] = len(tool.blocks("cpu"))

    tool.poison()
    llm.reset_prefix_cache()
    seen["poisoned"] = generate(llm, prompts())
    tool.empty_pool()
    llm.reset_prefix_cache()
    seen["healed"] = generate(llm, prompts())

    wait_for(
        lambda: by_block(theirs.all(), "STORAGE").keys() >= by_block(theirs.all(), "CPU").keys(), "events"
    )
    said = {medium: by_block(theirs.all(), medium) for medium in ("CPU", "STORAGE")}
    said["GPU"] = by_block(replayed(settings["engine_replay"]), "GPU")
    seen["events"] = {medium: {str(h): what for h, what in blocks.items()} for medium, blocks in said.items()}
    seen["sequences"] = [number for number, _ in theirs.batches]
    seen["event_blocks"] = sorted(h for hashes in blocks.values() for h in hashes)
    seen["failures"] = scheduler_of(llm).connector._manager.failures
    theirs.close()
    stop(llm)
    return seen


def second(settings):
    """A new engine against the same daemon hits at once; it survives lost blocks, a dead and a new daemon."""
    llm = engine(settings["model"], {"kvtierd_socket": settings["socket"]})
    seen = {"hits_at_once": generate(llm, prompts())}
    llm.reset_prefix_cache()
    seen["losing"] = generate_while_losing(llm, prompts())
    llm.reset_prefix_cache()
    fresh = prompts(seed=12)  # must be stored when the daemon dies
    seen["killed"] = generate_stepwise(
        llm, prompts() + fresh, 2, lambda: os.kill(settings["daemon_pid"], signal.SIGKILL)
    )
    llm.reset_prefix_cache()
    seen["without"] = generate(llm, prompts())
    llm.reset_prefix_cache()
    with subprocess.Popen(settings["daemon"]) as restarted:
        try:
            wait_for(lambda: connected(llm), "the way back to the daemon", timeout=20)
            seen["new_daemon"] = generate(llm, prompts())
            stop(llm)
        finally:
            restarted.terminate()
    return seen


def connected(llm):
    """Whether scheduler and worker are attached; polls, which is what reconnects them."""
    for session in sessions_of(llm):
        session.poll()
    return all(session.connected for session in sessions_of(llm))


def generate_while_losing(llm, asked):
    """Generate while every load gets at most the first two blocks that were promised to it."""
    manager = scheduler_of(llm).connector._manager
    pipeline = manager._pipeline
    whole = pipeline.load
    pipeline.load = lambda keys, *more: whole(keys[:2], *more)
    try:
        return [*generate(llm, asked), manager.failures.get("load", 0)]
    finally:
        pipeline.load = whole


def main():
    phase, settings, result = sys.argv[1:]
    seen = {"plain": plain, "first": first, "second": second}[phase](json.loads(Path(settings).read_text()))
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

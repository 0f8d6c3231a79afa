"""What every shape of a real engine is put through: cold, from pool and disk, poisoned, after a reset."""

from __future__ import annotations

import random
from pathlib import Path

from engine_rig import BLOCK, Tool, engine, generate, scheduler_of, stop
from tiny_model import VOCABULARY

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig

COUNT = 64
"""Requests of a workload."""


def workload(count=COUNT, seed=31):
    """Random prompts of 2 to 8 blocks over 5 shared prefixes, some the same as an earlier one or longer."""
    rng = random.Random(seed)

    def tokens(number):
        return [rng.randrange(3, VOCABULARY) for _ in range(number)]

    shared = [tokens(blocks * BLOCK + extra) for blocks, extra in ((1, 0), (2, 7), (3, 0), (4, 1), (2, 0))]
    made = []
    for _ in range(count):
        if made and rng.random() < 0.2:
            earlier = rng.choice(made)["prompt_token_ids"]
            made.append({"prompt_token_ids": earlier + tokens(rng.randrange(BLOCK))})
        else:
            made.append(
                {"prompt_token_ids": rng.choice(shared) + tokens(rng.randrange(BLOCK + 4, 4 * BLOCK))}
            )
    return made


class Trials:
    """One daemon, and the shapes that are tried on it one after another in this process.

    ``settings``: ``models`` and ``folder`` are paths, ``python`` runs the daemon.
    """

    def __init__(self, settings, *, backing="memfd"):
        self.models = Path(settings["models"])
        folder = Path(settings["folder"]) / backing
        folder.mkdir()
        slots = 8192  # 32 MiB: more than any workload here needs
        self.rig = DaemonRig(folder, slots=slots, python=settings["python"])
        self.rig.edit(lambda body: body["pool"].update(backing=backing))
        self.rig.start()

    def engine(self, extra=None, *, model="llama", **options):
        """Start an engine on the daemon; ``extra``: more settings of the connector."""
        connector = {"kvtierd_socket": self.rig.daemon.socket, **(extra or {})}
        return engine(str(self.models / model), connector, **options)

    def plain(self, *, model="llama", **options):
        """Start an engine without a connector."""
        return engine(str(self.models / model), **options)

    def tool(self, llm):
        """Look at the daemon through a session in the engine's namespace."""
        made = Tool(llm, self.rig.daemon.socket)
        self.rig.layouts.add(made.session.layout)
        return made

    def close(self):
        self.rig.close()


def plain(trials, run=generate, asked=None, **options):
    """What an engine without a connector generates."""
    llm = trials.plain(**options)
    seen = run(llm, workload() if asked is None else asked)[0]
    stop(llm)
    return seen


def prove(trials, llm, asked=None, run=generate, *, disk=False, anew=False):
    """Put one engine through everything; ``run(llm, asked)`` gives (tokens, cached tokens) of each request.

    ``disk``: also from disk alone; ``anew``: once more after the reset, from nothing.
    """
    asked = workload() if asked is None else asked
    tool = trials.tool(llm)
    seen = {"cold": run(llm, asked)}
    trials.rig.agree()
    blocks = tool.blocks("cpu")
    seen["blocks"] = len(blocks)
    tool.wait_on_disk(blocks)

    before = tool.counters("cpu").get("load_from_cpu", 0)
    llm.reset_prefix_cache()
    seen["warm"] = run(llm, asked)
    seen["loads"] = tool.counters("cpu").get("load_from_cpu", 0) - before

    if disk:
        tool.empty_pool()
        llm.reset_prefix_cache()
        seen["from_disk"] = run(llm, asked)
        trials.rig.agree()

    tool.poison()
    llm.reset_prefix_cache()
    seen["poisoned"] = run(llm, asked)

    assert llm.reset_prefix_cache(reset_connector=True)
    wait_for(lambda: not tool.blocks("cpu") and not tool.blocks("disk"), "the reset to empty every tier")
    if anew:
        seen["renewed"] = run(llm, asked)
    trials.rig.agree()
    seen |= finish(trials, llm, tool)
    return seen


def finish(trials, llm, tool):
    """Empty the namespace and stop the engine; return what went wrong. Nothing may be left at the daemon."""
    seen = {"failures": scheduler_of(llm).connector._manager.failures}
    llm.reset_prefix_cache(reset_connector=True)
    wait_for(lambda: not tool.blocks("cpu"), "the last reset")
    stop(llm)
    tool.client.close()

    def left():
        status = trials.rig.status()
        held = {name: status[name] for name in ("leases", "operations", "loads_waiting", "quarantined_slots")}
        return {name: count for name, count in held.items() if count}

    wait_for(lambda: not left(), "the engine's leases and slots to come back")
    seen["complaints"] = trials.rig.complaints()
    return seen

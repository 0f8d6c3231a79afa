"""An engine that sleeps and wakes: with the same weights, with others, and with requests under way."""

from __future__ import annotations

import shutil

from engine_rig import generate, sampling, stop
from safetensors.torch import load_file, save_file
from shapes_rig import finish, workload

from kvtierd.testing.clock import wait_for


def asleep(trials):
    """vLLM's own calls. Its CPU worker frees no memory for them, all else is as on a device.

    Level 0 pauses only. Levels 1 and 2 clear every cache, the connector's too: after them come, as a rule,
    other weights.
    """
    asked, other = workload(), _other_weights(trials)
    llm = trials.plain(model="other")
    seen = {"expected_anew": generate(llm, asked)[0]}
    stop(llm)
    llm = trials.engine()
    tool = trials.tool(llm)

    seen["before"] = generate(llm, asked)
    seen["stored"] = len(tool.blocks("cpu"))
    llm.sleep(level=0)
    wait_for(lambda: set(tool.blocks("cpu")) == set(tool.blocks("disk")), "the last stores to be on disk")
    seen["kept"] = len(tool.blocks("cpu")), len(tool.blocks("disk"))
    llm.wake_up(tags=["scheduling"])
    llm.reset_prefix_cache()
    seen["paused"] = generate(llm, asked)

    llm.sleep(level=1)
    wait_for(lambda: not tool.blocks("cpu") and not tool.blocks("disk"), "the sleep to empty every tier")
    llm.wake_up()
    seen["alone"] = generate(llm, asked[:1])[1]
    seen["woken"] = generate(llm, asked)
    llm.reset_prefix_cache()
    seen["again"] = generate(llm, asked)

    llm.reset_prefix_cache()
    _begin(llm, asked)  # loads and stores under way
    llm.sleep(level=1)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    llm.wake_up()
    assert not llm.llm_engine.has_unfinished_requests()
    seen["alone_anew"] = generate(llm, asked[:1])[1]
    seen["anew"] = generate(llm, asked)
    llm.reset_prefix_cache()
    seen["anew_again"] = generate(llm, asked)
    trials.rig.agree()
    return {"asleep": seen | finish(trials, llm, tool)}


def _begin(llm, asked):
    core = llm.llm_engine
    names = [
        core.add_request(f"asleep-{n}", prompt, sampling()) or f"asleep-{n}" for n, prompt in enumerate(asked)
    ]
    for _ in range(4):
        core.step()
    core.abort_request(names, internal=True)  # the front end's part of it; the core's is the sleep's


def _other_weights(trials):
    """Write the model with other weights, of which nothing that the first one computed is right."""
    other = trials.models / "other"
    if not other.exists():
        shutil.copytree(trials.models / "llama", other)
        weights = load_file(other / "model.safetensors")
        weights["model.layers.0.input_layernorm.weight"][::2].neg_()
        save_file(weights, other / "model.safetensors")
    return other

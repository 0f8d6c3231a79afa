"""The shapes of a real engine, each tried on kvtierd beside a plain engine; writes what was seen.

``PYTHONPATH=<repo> <vllm python> shapes.py SUITE SETTINGS.json RESULT.json``; driven by ``test_shapes.py``,
which states what must hold.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from engine_rig import BLOCK, different_blocks, generate, sampling, scheduler_of, stop
from shapes_metadata import metadata
from shapes_ranks import data_parallel
from shapes_rig import COUNT, Trials, finish, plain, prove, workload
from shapes_sleep import asleep
from vllm.lora.request import LoRARequest

from kvtierd.testing.clock import wait_for

DECODED = 24
"""Tokens that are generated where decoding itself must fill blocks."""
STORMS = 6
CHUNK = 4


def one_by_one(trials):
    """The engine as it comes: one rank, one group, one block a chunk."""
    return {"plain": plain(trials), "default": prove(trials, trials.engine(), disk=True, anew=True)}


def chunks(trials):
    """Several blocks make one of the daemon's."""
    return {"chunks": prove(trials, trials.engine({"blocks_per_chunk": CHUNK}))}


def chunked_prefill(trials):
    """No prompt fits into one step."""
    llm = trials.engine(max_num_batched_tokens=2 * BLOCK, max_num_seqs=16)
    return {"chunked_prefill": prove(trials, llm)}


def asynchronous(trials):
    """The scheduler runs ahead of the workers. vLLM turns that off on CPUs, though its runner can do it."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    usual = platform.check_and_update_config.__func__

    def ahead(cls, config):
        usual(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(ahead)
    try:
        llm = trials.engine(async_scheduling=True)
    finally:
        platform.check_and_update_config = classmethod(usual)
    kind = type(scheduler_of(llm)).__name__
    return {"asynchronous": prove(trials, llm) | {"scheduler": kind}}


def decode_blocks(trials):
    """Blocks that decoding filled are stored too, and found by the next turn of the conversation."""
    expected = plain(trials, turns)
    llm = trials.engine({"offload_prompt_only": False})
    return {"plain_turns": expected, "decode_blocks": prove(trials, llm, run=turns)}


def prompts_only(trials):
    """The same conversations, where only prompts are stored."""
    return {"prompts_only": prove(trials, trials.engine({"offload_prompt_only": True}), run=turns)}


def turns(llm, asked):
    """Half as many conversations of two turns; the second prompt goes on from the first answer."""
    first = asked[: COUNT // 2]
    answers, cached = generate(llm, first, DECODED)
    second = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + answer + [5, 6, 7]}
        for prompt, answer in zip(first, answers, strict=True)
    ]
    llm.reset_prefix_cache()
    more, found = generate(llm, second, DECODED)
    return answers + more, cached + found


def preemption(trials):
    """A cache so small that running requests lose their blocks and come back."""
    options = {"num_gpu_blocks_override": 21, "max_num_seqs": 12}
    asked = workload()
    expected = plain(trials, long, asked, **options)
    llm = trials.engine(**options)
    scheduler, preempted = scheduler_of(llm), []
    usual = scheduler._preempt_request

    def counted(*arguments, **more):
        preempted.append(1)
        return usual(*arguments, **more)

    scheduler._preempt_request = counted
    return {
        "plain_long": expected,
        "preemption": prove(trials, llm, asked, run=long) | {"preempted": len(preempted)},
    }


def long(llm, asked):
    """Generate a little more than fits."""
    return generate(llm, asked, 20)


def aborts(trials):
    """Every other request is aborted at a random point, loads under way included."""
    expected = plain(trials)
    llm = trials.engine()
    tool, asked, rng = trials.tool(llm), workload(), random.Random(5)
    generate(llm, asked[: COUNT // 2])  # something to load
    survivors = []
    for _ in range(STORMS):
        llm.reset_prefix_cache()
        survivors.append(_storm(llm, asked, rng))
    trials.rig.agree()
    seen = {"survivors": survivors, "expected": [expected]}
    tool.poison()
    llm.reset_prefix_cache()
    seen["poisoned"] = [generate(llm, asked)[0]]
    return {"plain": expected, "aborts": seen | finish(trials, llm, tool)}


def _storm(llm, asked, rng):
    core = llm.llm_engine
    doomed = set(rng.sample(range(len(asked)), len(asked) // 2))
    names = {core.add_request(f"{number}", prompt, sampling()): number for number, prompt in enumerate(asked)}
    names |= {str(number): number for number in range(len(asked))}  # before 0.3x it returns nothing
    done = {}
    while core.has_unfinished_requests() or doomed:
        for number in rng.sample(sorted(doomed), min(len(doomed), rng.randrange(4))):
            core.abort_request([str(number)])
            doomed.discard(number)
        for output in core.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                done[names[output.request_id]] = list(output.outputs[0].token_ids)
    return done


def new_weights(trials):
    """The weights change under a running engine; the reset with it leaves nothing of the old."""
    asked = workload()
    llm = trials.plain()
    llm.apply_model(change)
    expected = generate(llm, asked)[0]
    stop(llm)
    llm = trials.engine()
    tool = trials.tool(llm)
    before = generate(llm, asked)[0]
    tool.wait_on_disk(tool.blocks("cpu"))
    llm.apply_model(change)
    llm.reset_prefix_cache(reset_connector=True)
    seen = {"before": before, "expected": expected, "after": generate(llm, asked), "again": None}
    llm.reset_prefix_cache()
    seen["again"] = generate(llm, asked)
    trials.rig.agree()
    return {"new_weights": seen | finish(trials, llm, tool)}


def change(model):
    """Let the first layer see every other feature negated: what was computed before is wrong now."""
    for name, weights in model.named_parameters():
        if "layers.0.input_layernorm" in name:
            weights.data[::2].neg_()


def salts(trials):
    """The same prompts under two salts and under none; each finds its own blocks only."""
    asked = workload(16)
    llm = trials.engine()
    tool, seen = trials.tool(llm), {}
    for name in ("none", "a", "b"):
        salted = asked if name == "none" else [prompt | {"cache_salt": name} for prompt in asked]
        seen[name] = _first_and_second(llm, tool, salted)
    trials.rig.agree()
    tool.poison()
    llm.reset_prefix_cache()
    seen["expected"] = [seen[name]["second"][0] for name in ("none", "a", "b")]
    seen["poisoned"] = [generate(llm, asked)[0]]
    for name in ("a", "b"):
        seen["poisoned"].append(generate(llm, [prompt | {"cache_salt": name} for prompt in asked])[0])
    seen |= finish(trials, llm, tool)
    return {"salts": seen}


def adapters(trials):
    """The same prompts with two LoRA adapters and with none, with salts named like adapters among them."""
    asked = workload(16)
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    whom = [(None, None), ("a", None), ("b", None), (None, "a"), ("a", "b"), ("b", "a")]
    plain_engine = trials.plain(**options)
    expected = []
    for who in whom:
        prompts, lora = _as(trials, asked, who)
        expected.append(generate(plain_engine, prompts, lora_request=lora)[0])
    stop(plain_engine)
    llm = trials.engine(**options)
    tool, seen = trials.tool(llm), {"expected": expected, "got": []}
    for who in whom:
        prompts, lora = _as(trials, asked, who)
        seen["got"].append(_first_and_second(llm, tool, prompts, lora_request=lora))
    trials.rig.agree()
    tool.poison()
    llm.reset_prefix_cache()
    seen["poisoned"] = []
    for who in whom:
        prompts, lora = _as(trials, asked, who)
        seen["poisoned"].append(generate(llm, prompts, lora_request=lora)[0])
    seen |= finish(trials, llm, tool)
    return {"adapters": seen}


def _as(trials, asked, who):
    adapter, salt = who
    lora = None
    if adapter is not None:
        number = "ab".index(adapter) + 1
        lora = LoRARequest(adapter, number, str(trials.models / "adapters" / adapter))
    salted = asked if salt is None else [prompt | {"cache_salt": salt} for prompt in asked]
    return salted, lora


def _first_and_second(llm, tool, asked, **options):
    """Generate twice from what only the daemon has: (tokens, cached) of the first and of the second time.

    Requests are over before their last blocks are committed, so these are waited for. An engine takes in what
    its workers finished when it steps, so it is given something to do: a prompt without a whole block.
    """

    def committed():
        generate(llm, [{"prompt_token_ids": [1]}], 1)
        return len(tool.blocks("cpu")) >= whole

    whole = len(tool.blocks("cpu")) + different_blocks(asked)
    llm.reset_prefix_cache()
    first = [generate(llm, [prompt], **options) for prompt in asked[:1]]  # alone: nothing of itself to find
    rest = generate(llm, asked, **options)
    wait_for(committed, "the last commits")
    llm.reset_prefix_cache()
    return {"first": first[0], "rest": rest, "second": generate(llm, asked, **options)}


def hybrid(trials):
    """Two KV cache groups, one of them a sliding window."""
    expected = plain(trials, short, model="hybrid")
    return {
        "plain_hybrid": expected,
        "hybrid": prove(trials, trials.engine(model="hybrid"), run=short, disk=True),
    }


def short(llm, asked):
    """Generate a little: this model is slow."""
    return generate(llm, asked, 6)


def hybrid_chunks(trials):
    """The same with several blocks a chunk."""
    llm = trials.engine({"blocks_per_chunk": 2}, model="hybrid")
    return {"hybrid_chunks": prove(trials, llm, run=short)}


def two_ranks(trials):
    """Tensor parallel: two workers in processes of their own copy their parts of each block."""
    expected = plain(trials)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # vLLM finds no second NUMA node to bind to by itself
    return {"plain": expected, "two_ranks": prove(trials, trials.engine(tensor_parallel_size=2))}


SUITES = {
    "usual": (one_by_one, chunks, chunked_prefill, asynchronous, preemption),
    "turns": (decode_blocks, prompts_only, aborts, new_weights, salts, adapters),
    "hybrid": (hybrid, hybrid_chunks),
    "ranks": (two_ranks,),
    "pairs": (data_parallel, asleep, metadata),
    "older": (one_by_one, chunks, aborts, metadata),
}


def main():
    suite, settings, result = sys.argv[1:]
    trials = Trials(json.loads(Path(settings).read_text()))
    seen = {"seconds": {}}
    try:
        for shape in SUITES[suite]:
            began = time.monotonic()
            seen |= shape(trials)
            seen["seconds"][shape.__name__] = time.monotonic() - began
    finally:
        trials.close()
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

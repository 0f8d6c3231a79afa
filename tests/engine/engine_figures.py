"""What the glue costs a real engine: round trips and time per step, time to the first token.

``PYTHONPATH=<repo> <vllm python> engine_figures.py plain|kept SETTINGS.json RESULT.json``; driven by
``test_figures.py``.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path

from engine_rig import BLOCK, Tool, engine, generate, scheduler_of, stop
from tiny_model import VOCABULARY
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvtierd.testing.clock import wait_for

LONG = 8192
LARGE = {
    "num_gpu_blocks_override": 600,
    "max_model_len": LONG + 64,
    "max_num_batched_tokens": LONG + 64,
    "hf_overrides": {"max_position_embeddings": 2 * LONG},
}
# What vLLM's scheduler thread runs of the manager: before a step's tokens are computed, and afterwards.
BEFORE = (
    "track",
    "lookup",
    "prepare_load",
    "prepare_store",
    "on_schedule_end",
    "on_request_finished",
    "fill",
)
AFTER = ("complete_load", "complete_store", "note_failures", "settle_orphans", "get_stats", "flush")


class Meter:
    """Seconds spent in the manager, steps of the engine and round trips, since the last :meth:`reset`.

    ``first``: seconds before the first step's tokens; ``told``: what vLLM's metrics were told, all the time.
    """

    def __init__(self, llm):
        self._manager = scheduler_of(llm).connector._manager
        self._scheduler = scheduler_of(llm)
        self.told = OffloadingConnectorStats()
        self.reset()
        for name in BEFORE + AFTER:
            setattr(self._manager, name, self._timed(getattr(self._manager, name), name))
        take, schedule = self._scheduler.connector.get_kv_connector_stats, self._scheduler.schedule

        def taken():
            if (stats := take()) is not None:
                self.told.aggregate(stats)
            return stats

        self._scheduler.connector.get_kv_connector_stats = taken

        def counted(*arguments, **more):
            self.steps += 1
            before = self._manager._pipeline.round_trips
            output = schedule(*arguments, **more)
            self.worst_step = max(self.worst_step, self._manager._pipeline.round_trips - before)
            return output

        self._scheduler.schedule = counted

    def _timed(self, method, name):
        def timed(*arguments, **more):
            began = time.perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                seconds = time.perf_counter() - began
                self.seconds += seconds
                self.lookups += name == "lookup"
                if self.steps <= 1 and name in BEFORE:
                    self.first += seconds

        return timed

    def reset(self):
        self.seconds, self.first, self.steps, self.lookups, self.worst_step = 0.0, 0.0, 0, 0, 0
        self._round_trips = self._manager._pipeline.round_trips
        self._waited = self._manager._pipeline.waited

    def figures(self):
        pipeline = self._manager._pipeline
        return {
            "steps": self.steps,
            "lookups": self.lookups,
            "round_trips": pipeline.round_trips - self._round_trips,
            "round_trips_in_one_step": self.worst_step,
            "us_per_step": round(self.seconds / max(1, self.steps) * 1e6, 1),
            "us_waiting_per_step": round((pipeline.waited - self._waited) / max(1, self.steps) * 1e6, 1),
            "failures": self._manager.failures,
        }


def tokens(rng, count):
    return {"prompt_token_ids": [rng.randrange(3, VOCABULARY) for _ in range(count)]}


def workload(rng, count=60):
    """Prompts of 2 to 6 blocks over five shared prefixes."""
    shared = [tokens(rng, 3 * BLOCK)["prompt_token_ids"] for _ in range(5)]
    return [
        {"prompt_token_ids": shared[n % 5] + tokens(rng, rng.randrange(5, 3 * BLOCK))["prompt_token_ids"]}
        for n in range(count)
    ]


def first_token(llm, prompt):
    """Milliseconds to the first token."""
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate([prompt], one, use_tqdm=False)
    return (time.perf_counter() - began) * 1e3


def misses(llm, meter=None):
    """Milliseconds to the first token of prompts that nobody has seen; those of them spent in the glue."""
    rng = random.Random(5)
    times, inside, waited = [], [], 0
    for number in range(64):
        if meter is not None:
            meter.reset()
        taken = first_token(llm, tokens(rng, 16 * BLOCK + 1))
        if number >= 4:  # the first ones warm up
            times.append(taken)
            inside.append(meter.first * 1e3 if meter is not None else 0.0)
            waited += meter is not None and meter.figures()["round_trips"] > 0
    return {
        "first_token_ms": round(statistics.median(times), 2),
        "in_glue_ms": round(statistics.median(inside), 3),
        "in_glue_undisturbed_ms": round(sorted(inside)[len(inside) // 10], 3),
        "prompts_that_waited": waited,
    }


def cached_long_prompt(llm, tool):
    """A prompt of 8k tokens: computed, then loaded from the pool after the engine lost its own cache."""
    rng = random.Random(9)
    computed, loaded = [], []
    for _ in range(3):
        prompt = tokens(rng, LONG + 1)
        before = len(tool.blocks("cpu"))
        computed.append(first_token(llm, prompt))
        llm.generate([tokens(rng, 5)], SamplingParams(max_tokens=8), use_tqdm=False)  # steps for the stores
        wait_for(lambda before=before: len(tool.blocks("cpu")) >= before + LONG // BLOCK, "the blocks")
        llm.reset_prefix_cache()
        loaded.append(first_token(llm, prompt))
        llm.reset_prefix_cache()
    return {
        "computed_ms": round(statistics.median(computed), 1),
        "loaded_ms": round(statistics.median(loaded), 1),
    }


def wishes(llm, tool):
    """Requests with ``kv_transfer_params``: the error that each got, and what one kept off the disk."""
    rng = random.Random(11)

    def ask(wish, count=4 * BLOCK):
        wanted = SamplingParams(
            max_tokens=8,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"kvtierd": wish}},
        )
        (output,) = llm.generate([tokens(rng, count)], wanted, use_tqdm=False)
        return (output.kv_transfer_params or {}).get("kvtierd_error")

    tool.wait_on_disk(tool.blocks("cpu"))
    before = {tier: len(tool.blocks(tier)) for tier in ("cpu", "disk")}
    errors = {
        "good": ask({"load_from": ["disk"], "store_to": []}),
        "unknown key": ask({"load_form": ["disk"]}),
        "unknown tier": ask({"load_from": ["tape"]}),
    }
    wait_for(lambda: len(tool.blocks("cpu")) == before["cpu"] + 4, "the first request's blocks")
    return {"errors": errors, "on_disk": len(tool.blocks("disk")) - before["disk"]}


def plain(settings):
    """An engine without a connector: the tokens and times to compare with."""
    llm = engine(settings["model"], **LARGE)
    seen = {"misses": misses(llm), "tokens": generate(llm, workload(random.Random(3)))[0]}
    stop(llm)
    return seen


def kept(settings):
    """An engine with the daemon."""
    llm = engine(settings["model"], {"kvtierd_socket": settings["socket"]}, **LARGE)
    meter, tool = Meter(llm), Tool(llm, settings["socket"])
    seen = {"misses": misses(llm, meter), "tokens": {}, "steps": {}}

    def run(name):
        meter.reset()
        seen["tokens"][name] = generate(llm, workload(random.Random(3)))[0]
        seen["steps"][name] = meter.figures()
        llm.reset_prefix_cache()

    run("misses")
    run("hits")
    tool.wait_on_disk(tool.blocks("cpu"))
    tool.empty_pool()
    run("promotions")
    seen["wishes"] = wishes(llm, tool)
    seen["long"] = cached_long_prompt(llm, tool)
    seen["vllm_metrics"] = meter.told.reduce()
    stop(llm)
    return seen


def main():
    phase, settings, result = sys.argv[1:]
    seen = {"plain": plain, "kept": kept}[phase](json.loads(Path(settings).read_text()))
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

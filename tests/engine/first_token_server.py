"""A real engine that answers one prompt at a time and says how long its first token took.

``PYTHONPATH=<repo> <vllm python> first_token_server.py MODEL SOCKET|- SEED``; without a socket it is plain.
Each line on standard input is a number of prompts and the blocks of each; the answer is a JSON list of
milliseconds. No two prompts share a block. Driven by ``test_first_token.py``, which lets two of these take
turns.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from engine_rig import BLOCK, engine, stop
from tiny_model import VOCABULARY
from vllm import SamplingParams

OPTIONS = {"num_gpu_blocks_override": 600, "max_model_len": 2048, "max_num_batched_tokens": 2048}
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def first_token(llm, rng, blocks):
    """Milliseconds to the first token of a prompt that nobody has seen."""
    tokens = [rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK + 1)]
    prompt = {"prompt_token_ids": tokens}
    began = time.perf_counter()
    llm.generate([prompt], ONE, use_tqdm=False)
    return (time.perf_counter() - began) * 1e3


def finish(llm):
    """Step on until nothing is left, as vLLM's engine process does before it waits for requests."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        _, executed = core.step_fn()
        core.post_step(executed)


def main():
    model, socket, seed = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")  # vLLM may print what it likes to the other one
    os.dup2(2, 1)
    weights = "auto" if list(Path(model).glob("*.safetensors")) else "dummy"
    llm = engine(model, None if socket == "-" else {"kvtierd_socket": socket}, load_format=weights, **OPTIONS)
    rng = random.Random(int(seed))
    for line in sys.stdin:
        taken = []
        count, blocks = map(int, line.split())
        for _ in range(count):
            taken.append(first_token(llm, rng, blocks))
            finish(llm)
        print(json.dumps(taken), file=out, flush=True)
    stop(llm)


if __name__ == "__main__":
    main()

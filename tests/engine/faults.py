"""What breaks around a running engine, many times over; writes what was generated and what was complained of.

``PYTHONPATH=<repo> <vllm python> faults.py SETTINGS.json RESULT.json``; driven by ``test_faults.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from engine_rig import generate, sampling, scheduler_of, sessions_of, stop
from shapes_rig import Trials, workload

from kvtierd.engines.vllm import worker as worker_module
from kvtierd.testing.clock import wait_for

KILLS = 10
"""Of each kind: with a pool that is empty after the kill, and with one that is kept."""
PER_KILL = 10
"""Requests that run while the daemon is killed."""
DEADLINE = 0.1


def kills(trials, llm, asked, expected, *, seed):
    """Kill the daemon at a random step of each round and start it again at a later one or after the round."""
    rng, seen = random.Random(seed), {"wrong": [], "points": [], "kept": []}
    for number in range(KILLS):
        llm.reset_prefix_cache()
        chosen = sorted(rng.sample(range(len(asked)), PER_KILL))
        at, back = rng.randrange(14), rng.choice((rng.randrange(1, 8), None))
        acts = {at: trials.rig.daemon.kill}
        if back is not None:
            acts[at + back] = trials.rig.daemon.start
        got = stepwise(llm, [asked[index] for index in chosen], acts, f"kill{number}")
        seen["wrong"] += [
            index for index, tokens in zip(chosen, got, strict=True) if tokens != expected[index]
        ]
        seen["points"].append(at)
        if trials.rig.daemon.pid is None:
            trials.rig.daemon.start()
            seen["kept"].append(trials.rig.status()["tiers"][0]["blocks"])
        wait_for(lambda: connected(llm), "the way back to the daemon", timeout=20)
    return seen


def stepwise(llm, asked, acts, name):
    """Generate, doing ``acts[n]`` before step ``n`` (the first at the latest after the last one)."""
    core, done, step = llm.llm_engine, {}, 0
    names = {}
    for number, prompt in enumerate(asked):
        mine = f"{name}-{number}"
        names[mine] = names[core.add_request(mine, prompt, sampling())] = number
    while core.has_unfinished_requests() or acts:
        if core.has_unfinished_requests():
            if act := acts.pop(step, None):
                act()
            for output in core.step():
                if output.finished:
                    done[names[output.request_id]] = list(output.outputs[0].token_ids)
            step += 1
        else:
            acts.pop(min(acts))()
    return [done[number] for number in range(len(asked))]


def connected(llm):
    """Whether scheduler and worker are attached; polls, which is what reconnects them."""
    for session in sessions_of(llm):
        session.poll()
    return all(session.connected for session in sessions_of(llm))


def failing_copies(llm, asked, every):
    """Generate while every so-manieth load of the worker raises instead of copying."""
    (worker,) = worker_module._workers
    usual, loads = worker._copier.load, []

    def load(job, pieces):
        loads.append(job)
        if len(loads) % every == 0:
            raise OSError("injected")
        usual(job, pieces)

    worker._copier.load = load
    try:
        llm.reset_prefix_cache()
        return {"tokens": generate(llm, asked)[0], "failed": len(loads) // every}
    finally:
        worker._copier.load = usual


def lost_blocks(llm, asked, block):
    """Generate while the daemon gives every load at most the first ``block`` blocks that it promised."""
    pipeline = scheduler_of(llm).connector._manager._pipeline
    usual, lost = pipeline.load, []

    def load(keys, *more, **named):
        lost.extend(keys[block:])
        return usual(keys[:block], *more, **named)

    pipeline.load = load
    try:
        llm.reset_prefix_cache()
        return {"tokens": generate(llm, asked)[0], "failed": len(lost)}
    finally:
        pipeline.load = usual


def deadlines(trials, llm, asked):
    """Stop the daemon's clock: every call runs into its deadline; then let it go on."""
    llm.reset_prefix_cache()
    core, done, longest = llm.llm_engine, {}, 0.0
    names = {}
    for number, prompt in enumerate(asked):
        names[core.add_request(f"late-{number}", prompt, sampling())] = names[f"late-{number}"] = number
    os.kill(trials.rig.daemon.pid, signal.SIGSTOP)
    try:
        while core.has_unfinished_requests():
            began = time.monotonic()
            for output in core.step():
                if output.finished:
                    done[names[output.request_id]] = list(output.outputs[0].token_ids)
            longest = max(longest, time.monotonic() - began)
    finally:
        os.kill(trials.rig.daemon.pid, signal.SIGCONT)
    wait_for(lambda: connected(llm), "the way back to the daemon", timeout=20)
    llm.reset_prefix_cache()
    after = generate(llm, asked)[0]
    return {"tokens": [done[number] for number in range(len(asked))], "longest": longest, "after": after}


def run(trials):
    asked = workload()
    plain = trials.plain()
    expected = generate(plain, asked)[0]
    stop(plain)
    llm = trials.engine({"kvtierd_deadline": DEADLINE})
    generate(llm, asked)
    seen = {"expected": expected}
    seen["copies"] = [failing_copies(llm, asked, every) for every in (1, 2, 3)]
    seen["lost"] = [lost_blocks(llm, asked, block) for block in range(4)]
    seen["deadline"] = deadlines(trials, llm, asked)
    seen["memfd"] = kills_and_after(trials, llm, asked, expected, seed=3)
    return seen


def run_kept(trials, seen):
    """The kills once more, on a pool in a file."""
    asked = workload()
    llm = trials.engine({"kvtierd_deadline": DEADLINE})
    generate(llm, asked)
    seen["file"] = kills_and_after(trials, llm, asked, seen["expected"], seed=4)


def kills_and_after(trials, llm, asked, expected, *, seed):
    """The kills, and twice the whole workload after them; stops the engine."""
    seen = kills(trials, llm, asked, expected, seed=seed)
    llm.reset_prefix_cache()
    seen["at_last"] = generate(llm, asked)
    llm.reset_prefix_cache()
    seen["once_more"] = generate(llm, asked)
    seen["reports"] = scheduler_of(llm).connector._manager.failures
    stop(llm)
    return seen


def main():
    settings, result = sys.argv[1:]
    settings = json.loads(Path(settings).read_text())
    with contextlib.closing(Trials(settings)) as trials:
        seen = run(trials)
    with contextlib.closing(Trials(settings, backing="file")) as trials:
        run_kept(trials, seen)
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

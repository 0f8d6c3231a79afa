"""Two data-parallel ranks of one engine on one daemon: one in this process, the other in a child.

As a child: ``shapes_ranks.py SETTINGS.json FD``; answers each line of JSON on standard input with one on FD.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from engine_rig import engine, generate, scheduler_of, stop
from shapes_rig import plain, prove
from vllm.config import ParallelConfig


class Pair:
    """Two engines. What one of them was asked the other is asked next, so that all hits are of its making."""

    def __init__(self, trials):
        socket, model = trials.rig.daemon.socket, str(trials.models / "llama")
        answers, theirs = os.pipe()
        settings = json.dumps({"socket": socket, "model": model})
        self._child = subprocess.Popen(
            [sys.executable, __file__, settings, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            text=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers)
        self._first = rank(0, model, socket)
        self.llm_engine = self._first.llm_engine
        self._turn = 0
        self.ask("hello")
        self.hear()

    def ask(self, what, *arguments):
        self._child.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._child.stdin.flush()

    def hear(self):
        line = self._answers.readline()
        assert line, "the other rank ended"
        return json.loads(line)

    def reset_prefix_cache(self, reset_connector=False):
        self.ask("reset", reset_connector)
        done = [self._first.reset_prefix_cache(reset_connector=reset_connector), self.hear()]
        return all(done)

    def generate(self, asked):
        """Both at once: each takes every other request, and those of the other one the next time."""
        self._turn += 1
        numbers = [range((self._turn + part) % 2, len(asked), 2) for part in range(2)]
        self.ask("generate", [asked[number] for number in numbers[1]])
        parts = [generate(self._first, [asked[number] for number in numbers[0]]), self.hear()]
        tokens, cached = {}, {}
        for part, found in zip(numbers, parts, strict=True):
            tokens |= dict(zip(part, found[0], strict=True))
            cached |= dict(zip(part, found[1], strict=True))
        return [tokens[n] for n in range(len(asked))], [cached[n] for n in range(len(asked))]

    def end(self):
        """Stop the child; return what failed there."""
        self.ask("stop")
        failures = self.hear()
        self._child.stdin.close()
        assert self._child.wait(30) == 0
        self._answers.close()
        return failures


def rank(number, model, socket):
    """Start one rank. vLLM makes those of a dense model independent engines that differ in this alone."""
    usual = ParallelConfig.__post_init__

    def post_init(config):
        usual(config)
        config.data_parallel_index = number

    ParallelConfig.__post_init__ = post_init
    try:
        return engine(model, {"kvtierd_socket": socket})
    finally:
        ParallelConfig.__post_init__ = usual


def data_parallel(trials):
    """What one rank stored is a hit for the other, and each generates what one engine alone does."""
    expected = plain(trials)
    pair = Pair(trials)
    sessions = [s for s in trials.rig.status()["sessions"] if s["role"] == "scheduler"]
    seen = {
        "ranks": sorted(s["dp_rank"] for s in sessions),
        "engines": len({s["engine_id"] for s in sessions}),
    }
    seen |= prove(trials, pair, run=Pair.generate, disk=True)
    seen["failures"] |= pair.end()
    return {"plain": expected, "data_parallel": seen}


def main():
    settings, answers = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")
    llm = rank(1, settings["model"], settings["socket"])
    for line in sys.stdin:
        match json.loads(line):
            case ["generate", asked]:
                answer = generate(llm, asked)
            case ["reset", reset_connector]:
                answer = llm.reset_prefix_cache(reset_connector=reset_connector)
            case ["stop"]:
                answer = scheduler_of(llm).connector._manager.failures
                stop(llm)
            case _:
                answer = None
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

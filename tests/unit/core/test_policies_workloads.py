"""The default policy against LRU on many kinds of traffic, none of which it was made for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtierd.core.model import Block, BlockId, BlockKey, BlockMeta, State, block_key
from kvtierd.core.policies import POLICIES
from kvtierd.core.residency import Node, ResidentSet
from kvtierd.testing.simulate import best_possible
from kvtierd.testing.trace import Asked
from kvtierd.testing.workload import Workload

Trace = list[tuple[int, ...]]
AT_WORST = 0.94
ON_AVERAGE = 0.98


def serve(trace: Trace, capacity: int, policy: str) -> int:
    """Return the hits of one resident set of ``capacity`` blocks."""
    blocks = ResidentSet(POLICIES[policy]())
    hits = 0
    for request in trace:
        ids = [BlockId("ns", block_key(number.to_bytes(8, "big"))) for number in request]
        found = next((at for at, block_id in enumerate(ids) if blocks.get(block_id) is None), len(ids))
        hits += found
        path = [blocks.known(block_id) for block_id in ids[:found]]
        for node in reversed(path):
            blocks.touch(node)
            blocks.pin(node)
        for at in range(found, len(ids)):
            if len(blocks) == capacity:
                victim = blocks.victim()
                if victim is None:
                    break
                blocks.remove(victim)
            meta = BlockMeta(hashes=(request[at],), parent=request[at - 1] if at else None)
            node = Node(Block.of(ids[at], 1, meta), State.RESIDENT)
            node.pins = 1
            blocks.add(node)
            path.append(node)
        for node in path:
            blocks.unpin(node)
    return hits


class Numbers:
    """New block numbers and random draws for one trace."""

    def __init__(self, seed: int, base: int = 0) -> None:
        self.rng = random.Random(seed)
        self._next = base

    def new(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count + 1, self._next + 1))


def conversations(seed: int, **recipe: float) -> Trace:
    names: dict[BlockKey, int] = {}
    workload = Workload(seed=seed, requests=1200, block_size=2, **recipe)  # type: ignore[arg-type]
    return [tuple(names.setdefault(b.key, len(names) + 1) for b in request.prompt) for request in workload]


def shared_prompts(seed: int, skew: float = 1.0, drift: int = 0) -> Trace:
    """Documents asked about by a Zipf law; with ``drift`` others become popular now and then."""
    numbers = Numbers(seed, 1 << 32)
    documents = [numbers.new(20) for _ in range(300)]
    weights = [1 / (rank + 1) ** skew for rank in range(300)]
    trace = []
    for moment in range(1500):
        if drift and moment % drift == 0:
            numbers.rng.shuffle(documents)
        trace.append(numbers.rng.choices(documents, weights)[0] + numbers.new(numbers.rng.randint(1, 5)))
    return trace


def scan(seed: int) -> Trace:
    numbers = Numbers(seed, 2 << 32)
    return [numbers.new(numbers.rng.randint(5, 50)) for _ in range(700)]


def loop(seed: int, prompts: int = 90) -> Trace:
    numbers = Numbers(seed, 3 << 32)
    around = [numbers.new(numbers.rng.randint(10, 30)) for _ in range(prompts)]
    return [around[moment % prompts] for moment in range(1500)]


def recency(seed: int) -> Trace:
    """The LRU stack model: what was asked for a short while ago is likeliest to be asked for again."""
    numbers = Numbers(seed, 4 << 32)
    stack: list[tuple[int, ...]] = []
    trace = []
    for _ in range(2500):
        depth = int(numbers.rng.lognormvariate(0, 1.5) * 40)
        prompt = stack.pop(depth) if depth < len(stack) else numbers.new(10)
        stack.insert(0, prompt)
        trace.append(prompt)
    return trace


def mixed(seed: int, share: float, one: Trace, other: Trace) -> Trace:
    rng = random.Random(seed)
    rest, extra = iter(one), iter(other)

    def draw() -> Iterator[tuple[int, ...]]:
        while (request := next(extra if rng.random() < share else rest, None)) is not None:
            yield request

    return list(draw())


FAMILIES: dict[str, Callable[[int], Trace]] = {
    "chat": lambda seed: conversations(seed),
    "long pauses": lambda seed: conversations(seed, pause=200, follow_up=0.6),
    "short pauses": lambda seed: conversations(seed, pause=6, follow_up=0.8),
    "agents re-reading long contexts": lambda seed: conversations(
        seed, pause=25, pause_sigma=0.1, follow_up=0.93, message_blocks=3, system_blocks=10
    ),
    "shared prompts": lambda seed: shared_prompts(seed),
    "shared prompts, flat": lambda seed: shared_prompts(seed, skew=0.6),
    "shared prompts, drifting": lambda seed: shared_prompts(seed, drift=400),
    "chat and scans": lambda seed: mixed(seed, 0.2, conversations(seed, follow_up=0.6), scan(seed)),
    "prompts and scans": lambda seed: mixed(seed, 0.4, shared_prompts(seed), scan(seed)),
    "loop": loop,
    "chat and a loop": lambda seed: mixed(seed, 0.3, conversations(seed, follow_up=0.6), loop(seed, 50)),
    "recency": recency,
    "one after another": lambda seed: [*shared_prompts(seed), *loop(seed)[:700], *recency(seed)[:1500]],
}


def share_of_distinct(trace: Trace, share: float) -> int:
    return max(150, round(share * len({block for request in trace for block in request})))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_is_never_much_worse_than_lru(family):
    """The smallest caches here hold three prompts; there luck alone is worth a few per cent."""
    hits = {"auto": 0, "lru": 0}
    for seed in (1, 2):
        trace = FAMILIES[family](seed)
        for share in (0.02, 0.1, 0.3):
            capacity = share_of_distinct(trace, share)
            got = {policy: serve(trace, capacity, policy) for policy in hits}
            assert got["auto"] >= AT_WORST * got["lru"], f"seed {seed}, {capacity} blocks: {got}"
            hits = {policy: hits[policy] + got[policy] for policy in hits}
    assert hits["auto"] >= ON_AVERAGE * hits["lru"], hits


@pytest.mark.parametrize(
    ("family", "factor"),
    [("prompts and scans", 1.2), ("shared prompts, flat", 1.2), ("agents re-reading long contexts", 1.5)],
)
def test_the_default_is_much_better_where_recency_misleads(family, factor):
    trace = FAMILIES[family](3)
    capacity = share_of_distinct(trace, 0.05)
    assert serve(trace, capacity, "auto") > factor * serve(trace, capacity, "lru")


def test_a_loop_larger_than_the_cache_is_served_in_part():
    """LRU evicts every block of it just before its turn comes."""
    trace = loop(1)
    capacity = share_of_distinct(trace, 0.5)
    best = best_possible([Asked(0.0, request) for request in trace], capacity)
    assert serve(trace, capacity, "lru") == 0
    assert serve(trace, capacity, "auto") > 0.8 * best


def test_less_room_costs_hits_gradually():
    trace = FAMILIES["chat and scans"](4)
    sizes: Sequence[int] = [share_of_distinct(trace, share) for share in (0.02, 0.05, 0.1, 0.2, 0.4)]
    hits = [serve(trace, size, "auto") for size in sizes]
    assert hits == sorted(hits)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_traces_give_equal_hits(policy):
    """No policy draws at random or depends on the process's hash seed."""
    trace = FAMILIES["chat and scans"](5)[:500]
    assert serve(trace, 300, policy) == serve(trace, 300, policy)

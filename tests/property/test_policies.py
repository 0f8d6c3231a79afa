"""Random lives of a resident set under every policy: a victim is evictable, and there is one if any is."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtierd.core.model import Block, BlockId, BlockMeta, State, block_key
from kvtierd.core.policies import POLICIES
from kvtierd.core.residency import Node, ResidentSet

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "touch", "pin", "unpin", "evict", "evict", "remove", "spare"]),
        st.integers(0, 63),
    ),
    max_size=300,
)


def make(number: int) -> Node:
    """Blocks form a tree: block n is a child of block n // 3; some arrive from another tier."""
    meta = BlockMeta(hashes=(number,), parent=number // 3 if number else None)
    state = State.RESERVED if number % 7 == 0 else State.LOADING if number % 5 == 0 else State.RESIDENT
    return Node(Block.of(BlockId("ns", block_key(bytes([number]))), 1, meta), state)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_a_victim_is_evictable_and_found_whenever_there_is_one(name, steps):
    blocks = ResidentSet(POLICIES[name]())
    spared: set[BlockId] = set()
    blocks.spare = spared.__contains__
    for verb, number in steps:
        node = blocks.get(BlockId("ns", block_key(bytes([number]))))
        if verb == "add" and node is None:
            blocks.add(make(number))
        elif verb == "spare":
            spared.symmetric_difference_update({BlockId("ns", block_key(bytes([number])))})
        elif verb == "evict" and (victim := blocks.victim()) is not None:
            blocks.remove(victim)
        elif node is not None and verb in ("touch", "pin", "remove"):
            getattr(blocks, verb)(node)
        elif node is not None and verb == "unpin" and node.pins:
            blocks.unpin(node)
        check(blocks, spared)


def check(blocks: ResidentSet, spared: set[BlockId]) -> None:
    evictable = {node for node in blocks if blocks.evictable(node)}
    victim = blocks.victim()
    assert (victim is not None) == bool(evictable)
    assert victim is None or victim in evictable
    free = [node for node in evictable if node.block.id not in spared]
    if victim is not None and victim.block.id in spared:
        assert all(node in blocks._spared for node in free), "a spared one only before others are looked at"
    children = Counter(node.parent for node in blocks)
    assert all(node.children == children.pop(node.link, 0) for node in blocks)
    orphans = {link: count for link, count in children.items() if link is not None}
    assert orphans == blocks.orphans().get("ns", {})

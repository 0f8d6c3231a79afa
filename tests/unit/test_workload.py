"""The generated workload: reproducible, well-formed chains, and the reuse of a real chat service."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from itertools import pairwise

import pytest

from kvtierd.core.model import BlockKey, block_key, event_hash, hash_of
from kvtierd.testing.clock import ManualClock, wait_for
from kvtierd.testing.workload import Chain, Workload, WorkRequest, payload


def lru_hit_share(requests: list[WorkRequest], capacity: int) -> float:
    """Share of prompt blocks served by the contiguous prefix of an LRU of ``capacity`` blocks.

    On each request the hits are touched, then everything else is inserted, both from the last block on.
    """
    cache: OrderedDict[BlockKey, None] = OrderedDict()
    hits = asked = 0
    for request in requests:
        keys = [block.key for block in request.prompt]
        prefix = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        hits, asked = hits + prefix, asked + len(keys)
        for key in reversed(keys[:prefix]):
            cache.move_to_end(key)
        for block in reversed(request.blocks[prefix:]):
            cache[block.key] = None
            cache.move_to_end(block.key)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / asked


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    assert list(Workload(seed=3, requests=50)) == list(Workload(seed=3, requests=50))
    assert list(Workload(seed=3, requests=50)) != list(Workload(seed=4, requests=50))


def test_blocks_are_chained_by_hash_and_their_metadata_describes_them() -> None:
    for request in Workload(seed=1, requests=40):
        assert request.tokens[: 16 * request.prompt_blocks] == tuple(
            token for block in request.prompt for token in block.meta.token_ids
        )
        assert request.prompt_blocks == len(request.tokens) // 16
        for block in request.blocks:
            assert block.meta.hashes == (event_hash(block.key),)
            assert len(block.meta.token_ids) == block.meta.block_size == 16
        for parent, child in pairwise(request.blocks):
            tokens = struct.pack("<16I", *child.meta.token_ids)
            assert hash_of(child.key) == hashlib.sha256(hash_of(parent.key) + tokens).digest()
            assert child.meta.parent == parent.meta.hashes[-1]
        assert not request.blocks or request.blocks[0].meta.parent is None


def test_a_turn_starts_with_everything_that_the_turn_before_it_made() -> None:
    last: dict[int, WorkRequest] = {}
    for request in Workload(seed=2, requests=300):
        before = last.get(request.conversation)
        assert request.turn == (before.turn + 1 if before else 0)
        if before:
            assert request.blocks[: len(before.blocks)] == before.blocks
        last[request.conversation] = request
    assert max(request.turn for request in last.values()) >= 3


def test_conversations_share_a_few_system_prompts() -> None:
    requests = [r for r in Workload(seed=5, requests=200) if r.turn == 0 and r.blocks]
    assert len({request.blocks[0].key for request in requests}) <= 4 < len(requests)


def test_no_conversation_outgrows_its_bound() -> None:
    for request in Workload(seed=6, requests=300, max_blocks=40, message_blocks=15.0):
        assert len(request.blocks) <= 40


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reuse_is_that_of_a_real_chat_service(seed: int) -> None:
    """Beside an LRU over a public trace: capacity as a share of its distinct blocks, and its hit share."""
    requests = list(Workload(seed=seed, requests=2000, pause=75))
    distinct = len({block.key for request in requests for block in request.prompt})
    trace = {1 / 182.79: 0.0445, 3 / 182.79: 0.0653, 10 / 182.79: 0.2116, 30 / 182.79: 0.3257, 1e3: 0.3664}
    for share, expected in trace.items():
        assert lru_hit_share(requests, int(share * distinct)) == pytest.approx(expected, abs=0.06)


def test_a_payload_belongs_to_its_key_alone() -> None:
    key = block_key(b"\x01" * 32)
    assert payload(key, 4096) == payload(block_key(b"\x01" * 32), 8192)[:4096]
    assert payload(key, 4096) != payload(block_key(b"\x01" * 32, group=1), 4096)
    assert payload(key, 4096) != payload(block_key(b"\x02" * 32), 4096)


def test_a_fork_does_not_change_the_chain_it_came_from() -> None:
    chain = Chain(4, b"seed")
    chain.extend([1, 2, 3, 4, 5])
    twin = chain.fork()
    twin.extend([6, 7, 8])
    chain.extend([9, 9, 9])
    assert twin.blocks[0] == chain.blocks[0]
    assert twin.blocks[1].meta.token_ids == (5, 6, 7, 8)
    assert chain.blocks[1].meta.token_ids == (5, 9, 9, 9)


def test_the_manual_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert (clock(), clock.advance(1.5), clock()) == (5.0, 6.5, 6.5)
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)


def test_wait_for_returns_the_value_and_names_what_never_came() -> None:
    values = iter([0, 0, 7])
    assert wait_for(lambda: next(values), "seven", poll=0) == 7
    with pytest.raises(TimeoutError, match="waited 0 s for rain; last seen: 0"):
        wait_for(lambda: 0, "rain", timeout=0)

"""A workload as a chat service makes it: multi-turn conversations over a few shared system prompts.

Pure and seeded: the same :class:`Workload` yields the same requests on every machine. A turn's prompt is the
whole conversation so far and a new message; the answer's blocks follow it, and the next turn finds them in
its prompt. Turns of many conversations interleave, with pauses between the turns of each one. The defaults
give the reuse of a public trace of a chat service (about 37 % of the prompt blocks were seen before, most
of them long ago), measured in ``tests/unit/test_workload.py``.

Hashes are chained as engines chain them: SHA-256 over the parent's hash and the block's token ids.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kvtierd.core.model import BlockKey, BlockMeta, block_key, event_hash, group_of, hash_of


def payload(key: BlockKey, nbytes: int) -> bytes:
    """Return the ``nbytes`` bytes that a block of this key has to hold: a SHAKE-128 stream over the key."""
    return hashlib.shake_128(group_of(key).to_bytes(4, "big") + hash_of(key)).digest(nbytes)


@dataclass(frozen=True, slots=True)
class WorkBlock:
    """One full block of a conversation: its key and what its events need."""

    key: BlockKey
    meta: BlockMeta


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One turn. The first ``prompt_blocks`` of ``blocks`` are the prompt's, the others the answer's.

    ``tokens`` are the prompt's token ids; its last, partial block has no :class:`WorkBlock`.
    """

    conversation: int
    turn: int
    tokens: tuple[int, ...]
    blocks: tuple[WorkBlock, ...]
    prompt_blocks: int

    @property
    def prompt(self) -> tuple[WorkBlock, ...]:
        """The blocks that a cache is asked for."""
        return self.blocks[: self.prompt_blocks]


class Chain:
    """A growing row of tokens and the chained blocks that it fills.

    ``seed`` stands in for the parent hash of the first block; two seeds never share a block.
    """

    def __init__(self, block_size: int, seed: bytes) -> None:
        self.block_size = block_size
        self.tokens: list[int] = []
        self.blocks: list[WorkBlock] = []
        self._parent = hashlib.sha256(seed).digest()
        self._pack = struct.Struct(f"<{block_size}I").pack

    def fork(self) -> Chain:
        """Return a chain that starts with this one's tokens and grows apart from it."""
        twin = Chain.__new__(Chain)
        twin.block_size, twin._pack, twin._parent = self.block_size, self._pack, self._parent
        twin.tokens, twin.blocks = list(self.tokens), list(self.blocks)
        return twin

    def extend(self, tokens: list[int]) -> None:
        """Append tokens (unsigned 32-bit) and hash the blocks that become full."""
        self.tokens.extend(tokens)
        size = self.block_size
        for start in range(len(self.blocks) * size, len(self.tokens) - size + 1, size):
            self._close_block(tuple(self.tokens[start : start + size]))

    def _close_block(self, tokens: tuple[int, ...]) -> None:
        digest = hashlib.sha256(self._parent + self._pack(*tokens)).digest()
        key = block_key(digest)
        meta = BlockMeta(
            hashes=(event_hash(key),),
            parent=self.blocks[-1].meta.hashes[-1] if self.blocks else None,
            token_ids=tokens,
            block_size=self.block_size,
        )
        self._parent = digest
        self.blocks.append(WorkBlock(key, meta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The recipe. Lengths are in blocks (fractions allowed), ``pause`` in requests of the whole stream.

    Message lengths and pauses are log-normal around their medians with the spread ``sigma``;
    ``follow_up`` is the chance that a turn is followed by another one of its conversation, until
    ``max_blocks`` would be exceeded. System prompts are picked by a Zipf law.
    """

    seed: int = 0
    requests: int = 600
    block_size: int = 16
    vocabulary: int = 32_000
    systems: int = 4
    system_blocks: float = 1.2
    message_blocks: float = 7.5
    message_sigma: float = 1.25
    answer_blocks: float = 2.0
    answer_sigma: float = 0.8
    follow_up: float = 0.38
    pause: float = 22.5
    pause_sigma: float = 1.2
    max_blocks: int = 160

    def __iter__(self) -> Iterator[WorkRequest]:
        return iter(_Service(self))


class _Service:
    """Draws the requests of a workload; conversations wait in a heap for the moment of their next turn."""

    def __init__(self, spec: Workload) -> None:
        self._spec = spec
        self._rng = random.Random(spec.seed)  # noqa: S311 - reproducible, nothing secret
        self._systems = [self._system_prompt() for _ in range(spec.systems)]
        self._zipf = [1 / (rank + 1) for rank in range(spec.systems)]
        self._waiting: list[tuple[float, int, int, Chain]] = []
        self._opened = 0

    def __iter__(self) -> Iterator[WorkRequest]:
        for moment in range(self._spec.requests):
            if self._waiting and self._waiting[0][0] <= moment:
                _, conversation, turn, chain = heapq.heappop(self._waiting)
            else:
                conversation, turn, chain = self._open()
            yield self._turn(moment, conversation, turn, chain)

    def _open(self) -> tuple[int, int, Chain]:
        chain = self._rng.choices(self._systems, self._zipf)[0].fork()
        self._opened += 1
        return self._opened - 1, 0, chain

    def _turn(self, moment: int, conversation: int, turn: int, chain: Chain) -> WorkRequest:
        spec = self._spec
        self._say(chain, spec.message_blocks, spec.message_sigma)
        tokens, prompt_blocks = tuple(chain.tokens), len(chain.blocks)
        self._say(chain, spec.answer_blocks, spec.answer_sigma)
        if len(chain.blocks) < spec.max_blocks and self._rng.random() < spec.follow_up:
            due = moment + 1 + self._rng.lognormvariate(0, spec.pause_sigma) * spec.pause
            heapq.heappush(self._waiting, (due, conversation, turn + 1, chain))
        return WorkRequest(conversation, turn, tokens, tuple(chain.blocks), prompt_blocks)

    def _say(self, chain: Chain, median_blocks: float, sigma: float) -> None:
        room = self._spec.max_blocks * self._spec.block_size - len(chain.tokens)
        wanted = self._rng.lognormvariate(0, sigma) * median_blocks * self._spec.block_size
        count = max(1, min(room, round(wanted)))
        chain.extend(self._rng.choices(range(self._spec.vocabulary), k=count))

    def _system_prompt(self) -> Chain:
        chain = Chain(self._spec.block_size, b"kvtierd workload")
        length = max(1, round(self._spec.system_blocks * self._spec.block_size))
        chain.extend(self._rng.choices(range(self._spec.vocabulary), k=length))
        return chain

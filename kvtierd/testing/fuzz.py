"""Hostile bytes made from good ones: mutations of whole frames, which get further than random bytes do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvtierd.core import stimuli
from kvtierd.core.model import BlockMeta, Group, Layout, Scope, block_key
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import Hello, StatusRequest, SurveyRequest, encode

_STRANGE = (
    b"",
    b"\x00",
    b"\xff" * 9,
    b"\xc1",
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 3000,
    b"\x81\xa1a" * 2000,
    b"../../../etc/passwd\x00",
)


def client_seeds() -> list[bytes]:
    """Return a good payload of every request."""
    keys = tuple(block_key(bytes([number]) * 32) for number in range(3))
    meta = BlockMeta(
        hashes=(2**64 - 1,), parent=1, token_ids=(1, 2, 3, 4), block_size=4, extra_keys=(("a", 1),)
    )
    layout = Layout(
        model="m", dtype="f", layout="l", groups=(Group(tokens_per_block=4, block_bytes=4096),), tenant="t"
    )
    messages: list[stimuli.Request] = [
        Hello(id=1, versions=(1, 1), client="fuzz"),
        StatusRequest(id=2),
        SurveyRequest(id=3, tier="disk"),
        stimuli.Attach(id=4, layout=layout, engine_id="fuzz", process=b"p" * 16),
        stimuli.Lookup(id=5, keys=keys, promote=True, lease=0.1),
        stimuli.PrepareStore(id=6, keys=keys, meta=(meta, None, meta), scope=Scope(store_to=("disk",))),
        stimuli.Commit(id=7, job=1, generation=1, pool_id="ab", failed=keys),
        stimuli.Abort(id=8, job=1),
        stimuli.Fail(id=9, job=1, keys=keys),
        stimuli.Load(id=10, keys=keys, deadline=0.01),
        stimuli.Release(id=11, lease=1),
        stimuli.Renew(id=12, numbers=(1, 2)),
        stimuli.Touch(id=13, keys=keys),
        stimuli.Evict(id=14, keys=keys, tiers=("cpu",)),
        stimuli.Prefetch(id=15, keys=keys),
        stimuli.Inventory(id=16, tier="cpu", limit=10),
        stimuli.Acknowledge(id=17, fence=1),
        stimuli.Goodbye(id=18),
    ]
    return [encode(message) for message in messages]


class Mutator:
    """Makes hostile bytes from ``seeds``, good ones. Equal generators make equal bytes."""

    def __init__(self, rng: random.Random, seeds: Sequence[bytes]) -> None:
        self._rng = rng
        self._seeds = list(seeds)
        self.frames = 0
        """Frames made so far, good ones included."""

    def mutate(self, data: bytes) -> bytes:
        """Return ``data`` with one to four things wrong (or, now and then, as it is)."""
        made = bytearray(data)
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 4))):
            self._rng.choice(self._WAYS)(self, made)
        return bytes(made)

    def payload(self) -> bytes:
        """Return one mutated seed."""
        return self.mutate(self._rng.choice(self._seeds))

    def framed(self) -> bytes:
        """Return a mutated seed in a frame, whose length is a lie now and then."""
        self.frames += 1
        payload = self.payload() or b"\xc0"
        if self._rng.random() < 0.05:
            return (
                self._rng.choice((0, 1, len(payload) + 1, 1 << 24, (1 << 32) - 1)).to_bytes(4, "big")
                + payload
            )
        return frame(payload)

    def conversation(self) -> bytes:
        """Return a greeting, most often a good one, and a few mutated requests."""
        rng = self._rng
        head = frame(self._seeds[0]) if rng.random() < 0.9 else self.framed()
        attach = frame(self._seeds[3]) if rng.random() < 0.7 else b""
        self.frames += 2
        return head + attach + b"".join(self.framed() for _ in range(rng.randint(1, 20)))

    def bytes(self) -> bytes:
        """Return what has no likeness to anything."""
        return self._rng.choice((*_STRANGE, self._rng.randbytes(self._rng.randint(1, 5000))))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

    def _replace(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)

    def _cut(self, data: bytearray) -> None:
        del data[self._rng.randrange(len(data) + 1) :]

    def _drop(self, data: bytearray) -> None:
        start = self._rng.randrange(len(data) + 1)
        del data[start : start + self._rng.randint(1, 8)]

    def _insert(self, data: bytearray) -> None:
        start = self._rng.randrange(len(data) + 1)
        data[start:start] = self._rng.choice(_STRANGE)

    def _splice(self, data: bytearray) -> None:
        other = self._rng.choice(self._seeds)
        start = self._rng.randrange(len(data) + 1)
        data[start:] = other[self._rng.randrange(len(other) + 1) :]

    def _repeat(self, data: bytearray) -> None:
        start = self._rng.randrange(len(data) + 1)
        data[start:start] = data[start : start + self._rng.randint(1, 40)] * self._rng.randint(1, 50)

    _WAYS: tuple[Callable[[Mutator, bytearray], None], ...] = (
        _flip,
        _flip,
        _replace,
        _cut,
        _drop,
        _insert,
        _splice,
        _repeat,
    )

"""The fake engine: counts where blocks came from, checks every byte, and gives back what it was lent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtierd.core.model import BlockKey, BlockMeta
from kvtierd.testing.fake_engine import FakeEngine
from kvtierd.testing.workload import Workload

SLOT = 4096
BLOCK = 1000


@dataclass
class Borrowed:
    """What a session lends: keys in slots, until released."""

    session: FakeSession
    keys: list[BlockKey]
    slots: list[int]
    prefix: int = 0

    @property
    def sources(self) -> list[str]:
        return [self.session.source] * len(self.keys)

    def views(self) -> list[memoryview]:
        return [self.session.slot(slot)[:BLOCK] for slot in self.slots]

    def release(self) -> None:
        self.session.lent -= 1

    def commit(self, failed: Sequence[BlockKey] = ()) -> list[BlockKey]:
        self.session.where.update(zip(self.keys, self.slots, strict=True))
        return self.keys


@dataclass
class FakeSession:
    """A pool without eviction behind the verbs that the engine uses; loads give at most ``load_limit``."""

    room: int = 4096
    source: str = "cpu"
    load_limit: int = 1 << 30
    lent: int = 0
    where: dict[BlockKey, int] = field(default_factory=dict)
    memory: bytearray = field(default_factory=bytearray)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Nothing ages here."""

    def lookup(self, keys: Sequence[BlockKey], promote: bool = False, lease: float | None = None) -> Borrowed:
        self.lent += 1
        prefix = next((i for i, key in enumerate(keys) if key not in self.where), len(keys))
        return Borrowed(self, [], [], prefix)

    def load(self, keys: Sequence[BlockKey], deadline: float) -> Borrowed:
        self.lent += 1
        given = list(keys)[: self.load_limit]
        return Borrowed(self, given, [self.where[key] for key in given])

    def prepare_store(
        self, keys: Sequence[BlockKey], meta: Sequence[BlockMeta | None] | None = None
    ) -> Borrowed:
        first = len(self.memory) // SLOT
        new = [key for key in keys if key not in self.where][: self.room - first]
        self.memory = bytearray(self.memory) + bytes(len(new) * SLOT)
        return Borrowed(self, new, list(range(first, first + len(new))))

    def slot(self, number: int) -> memoryview:
        return memoryview(self.memory)[number * SLOT : (number + 1) * SLOT]


def engine_on(session: FakeSession) -> FakeEngine:
    return FakeEngine(session)  # type: ignore[arg-type]


def test_a_second_run_loads_every_prompt_block_and_finds_its_bytes() -> None:
    session = FakeSession()
    requests = list(Workload(seed=1, requests=30))
    first, second = engine_on(session), engine_on(session)
    for request in requests:
        first.replay(request)
    for request in requests:
        assert second.replay(request) == request.prompt_blocks
    tally = second.tally
    assert tally.hits == {"cpu": tally.asked}
    assert tally.verified_bytes == tally.asked * 1000
    assert (tally.mismatches, tally.missed_promises, session.lent) == ([], 0, 0)
    assert first.tally.stored == len(session.where)


def test_one_wrong_byte_is_noticed() -> None:
    session = FakeSession()
    request = next(r for r in Workload(seed=1, requests=30) if r.prompt_blocks >= 3)
    engine = engine_on(session)
    engine.replay(request)
    key = request.prompt[2].key
    session.slot(session.where[key])[999] ^= 1
    engine.replay(request)
    assert engine.tally.mismatches == [key]


def test_what_a_load_does_not_give_is_computed() -> None:
    session = FakeSession(load_limit=1)
    request = next(r for r in Workload(seed=1, requests=30) if r.prompt_blocks >= 3)
    engine = engine_on(session)
    engine.replay(request)
    assert engine.replay(request) == 1
    assert engine.tally.missed_promises == request.prompt_blocks - 1
    assert engine.tally.computed == 2 * len(request.blocks) - 1
    assert session.lent == 0


def test_a_full_daemon_costs_nothing_but_the_store() -> None:
    session = FakeSession(room=2)
    request = next(r for r in Workload(seed=1, requests=30) if r.prompt_blocks >= 3)
    engine = engine_on(session)
    engine.replay(request)
    assert (engine.tally.stored, engine.tally.not_stored) == (2, len(request.blocks) - 2)

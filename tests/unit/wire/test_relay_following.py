"""Following an engine's numbers: gaps, late joins, restarts, with and without a replay."""

import random

import pytest

from kvtierd.wire.following import MAX_WAITING, EngineStream
from kvtierd.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch
from kvtierd.wire.relay import EngineCache

H = 0xF100000000000000


class FakeEngine:
    """Stores and removes blocks at random, and publishes it as an engine does; ``ring`` batches are kept."""

    def __init__(self, rng, ring=1000):
        self.rng = rng
        self.ring_size = ring
        self.incarnation = 0
        self.restart()

    def restart(self):
        self.incarnation += 1
        self.number = 0
        self.resident = set()
        self.ring = []

    def step(self):
        """Return the next batch: (number, payload)."""
        if self.rng.random() < 0.03:
            events, self.resident = [AllBlocksCleared()], set()
        elif self.resident and self.rng.random() < 0.4:
            gone = self.rng.choice(sorted(self.resident))
            self.resident.discard(gone)
            events = [BlockRemoved((gone,), "GPU", 0)]
        else:
            new = H + self.rng.randrange(1 << 40)
            self.resident.add(new)
            events = [BlockStored((new,), None, (1, 2), 2, None, "GPU", None)]
        batch = (self.number, encode_batch(self.incarnation + self.number / 1e6, events, 0))
        self.number += 1
        self.ring = [*self.ring, batch][-self.ring_size :]
        return batch


class Reader:
    """A stream and the set that its readers end with; answers what it asks from the engine's ring."""

    def __init__(self, engine, *, can_replay=True):
        self.engine = engine
        self.stream = EngineStream(EngineCache(), can_replay=can_replay)
        self.resident = set()
        self.asked = []

    def fold(self, told):
        for _, events in told:
            for event in events:
                if isinstance(event, BlockStored):
                    self.resident |= set(event.block_hashes)
                else:
                    assert set(event.block_hashes) <= self.resident
                    self.resident -= set(event.block_hashes)

    def live(self, batch):
        self.fold(self.stream.live(*batch))

    def answer(self, *, hole=None):
        """Play the engine's replay socket until nothing is wanted."""
        for _ in range(100):
            if self.stream.wanted is None:
                return
            dialogue, start = self.stream.dialogue, self.stream.wanted
            self.asked.append(start)
            for number, payload in list(self.engine.ring):
                if number < start or number == hole:
                    continue
                self.fold(self.stream.replayed(number, payload))
                if self.stream.dialogue != dialogue:
                    break
            else:
                self.fold(self.stream.replay_ended())
        raise AssertionError("the replays do not end")

    @property
    def counts(self):
        return +self.stream.counts


@pytest.fixture
def engine():
    return FakeEngine(random.Random(5))


def follow(engine, count, reader=None):
    reader = reader or Reader(engine)
    for _ in range(count):
        reader.live(engine.step())
    return reader


def test_an_unbroken_stream_needs_no_replay(engine):
    reader = follow(engine, 50)
    assert reader.resident == engine.resident
    assert reader.counts == {"batches": 50}


def test_a_gap_is_replayed_from_the_last_batch_on(engine):
    reader = follow(engine, 20)
    for _ in range(5):
        engine.step()
    follow(engine, 3, reader)
    assert (reader.stream.wanted, reader.stream.last) == (19, 19)
    reader.answer()
    assert reader.resident == engine.resident
    assert reader.counts == {"batches": 28, "gaps": 1, "replays": 1, "repeats": 3}


def test_a_late_join_is_replayed_from_0(engine):
    for _ in range(20):
        engine.step()
    reader = follow(engine, 2)
    reader.answer()
    assert reader.asked == [0]
    assert reader.resident == engine.resident
    assert not reader.counts["unrepaired"]


def test_a_late_join_behind_the_ring_takes_what_there_is(engine):
    engine.ring_size = 10
    for _ in range(30):
        engine.step()
    reader = Reader(engine)
    reader.stream.check()
    reader.answer()
    assert (reader.stream.last, reader.counts["truncated"]) == (29, 1)
    assert reader.resident <= engine.resident


def test_a_check_that_finds_nothing_new_says_nothing(engine):
    reader = follow(engine, 5)
    before = set(reader.resident)
    reader.stream.check()
    reader.answer()
    assert (reader.asked, reader.resident) == ([4], before)
    assert reader.counts == {"batches": 5, "replays": 1}


def test_a_check_finds_a_lost_end(engine):
    reader = follow(engine, 5)
    engine.step()
    reader.stream.check()
    reader.answer()
    assert reader.resident == engine.resident


def test_a_number_that_goes_back_is_a_new_engine_whose_old_blocks_are_gone(engine):
    reader = follow(engine, 30)
    engine.restart()
    follow(engine, 4, reader)
    assert reader.resident == engine.resident
    assert reader.counts["restarts"] == 1


@pytest.mark.parametrize("steps", [1, 30, 60], ids=["behind", "level", "ahead"])
def test_a_new_engine_is_known_by_its_bytes_wherever_its_numbers_are(engine, steps):
    """An engine that restarted unseen may be past the number expected."""
    reader = follow(engine, 30)
    engine.restart()
    for _ in range(steps):
        engine.step()
    reader.stream.check()
    reader.answer()
    assert reader.resident == engine.resident
    assert reader.counts["restarts"] == 1
    assert reader.stream.last == steps - 1


def test_a_new_engine_behind_a_gap_is_known_by_its_bytes(engine):
    reader = follow(engine, 10)
    engine.restart()
    for _ in range(20):
        engine.step()
    follow(engine, 1, reader)
    reader.answer()
    assert reader.resident == engine.resident
    assert (reader.counts["gaps"], reader.counts["restarts"]) == (1, 1)


def test_a_new_engine_that_starts_during_a_replay_is_followed(engine):
    reader = follow(engine, 10)
    engine.step()
    reader.live(engine.step())
    ring = list(engine.ring)
    engine.restart()
    reader.live(engine.step())  # waits
    for number, payload in ring[9:]:
        reader.fold(reader.stream.replayed(number, payload))
    reader.fold(reader.stream.replay_ended())
    reader.answer()
    assert reader.resident == engine.resident
    assert reader.counts["restarts"] == 1


def test_without_a_replay_a_gap_takes_back_what_may_be_gone(engine):
    reader = follow(engine, 20, Reader(engine, can_replay=False))
    engine.step()
    seen = engine.step()
    reader.live(seen)
    assert reader.stream.wanted is None
    assert reader.resident <= engine.resident
    assert reader.counts["unrepaired"] == 1
    reader.stream.check()
    assert reader.stream.wanted is None


def test_a_ring_that_no_longer_covers_the_gap_takes_back_what_may_be_gone(engine):
    reader = follow(engine, 20)
    engine.ring_size = 5
    for _ in range(40):
        engine.step()
    follow(engine, 1, reader)
    reader.answer()
    assert reader.resident <= engine.resident
    assert reader.counts["unrepaired"] == 1
    assert reader.stream.last == 60


def test_a_hole_in_a_replay_is_asked_for_once_more_and_then_lived_with(engine):
    reader = follow(engine, 5)
    for _ in range(10):
        engine.step()
    follow(engine, 1, reader)
    reader.answer(hole=8)
    assert reader.asked == [4, 7]
    assert reader.resident <= engine.resident
    assert (reader.counts["unrepaired"], reader.stream.last) == (1, 15)


def test_a_replay_that_nobody_answers_is_given_up_and_the_stream_goes_on(engine):
    reader = follow(engine, 5)
    engine.step()
    follow(engine, 2, reader)
    while reader.stream.wanted is not None:
        reader.fold(reader.stream.replay_failed())
    assert reader.resident <= engine.resident
    follow(engine, 5, reader)
    assert (reader.stream.last, reader.counts["unrepaired"]) == (12, 1)
    reader.stream.check()
    assert reader.stream.wanted is None  # it would only hold live batches up
    reader.stream.check(connected=True)
    reader.answer()
    assert reader.counts["replays"] == 1


def test_a_repeated_batch_says_nothing(engine):
    reader = Reader(engine)
    batches = [engine.step() for _ in range(5)]
    for batch in (*batches, *batches):
        reader.live(batch)
    assert reader.resident == engine.resident
    assert reader.counts == {"batches": 5, "repeats": 5}


def test_an_engine_that_left_has_nothing_any_more_and_can_come_back(engine):
    reader = follow(engine, 20)
    reader.fold(reader.stream.gone())
    assert reader.resident == set()
    reader.stream.check()
    reader.answer()
    assert reader.resident == engine.resident


def test_what_waits_for_a_replay_is_bounded(engine):
    engine.ring_size = 1 << 20
    reader = follow(engine, 1)
    engine.step()
    engine.rng = random.Random(1)
    for _ in range(MAX_WAITING + 5):
        batch = engine.step()
        reader.live(batch)
    reader.answer()
    assert reader.resident == engine.resident
    assert reader.counts["overflows"] == 1


def test_a_batch_that_cannot_be_read_costs_only_itself(engine):
    """L123."""
    reader = follow(engine, 10)
    before = set(reader.resident)
    reader.live((10, b"garbage"))
    assert (reader.stream.last, reader.resident) == (10, before)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_readers_end_with_what_the_engine_has(seed):
    rng = random.Random(seed)
    engine = FakeEngine(rng, ring=rng.choice([1, 5, 40, 1000]))
    reader = Reader(engine)
    for _ in range(400):
        batch = engine.step()
        luck = rng.random()
        if luck < 0.7:
            reader.live(batch)
        elif luck < 0.75:
            reader.live(batch)
            reader.live(batch)
        elif luck < 0.77:
            engine.restart()
        if reader.stream.wanted is not None and rng.random() < 0.3:
            reader.answer()
        assert reader.stream.wanted is not None or reader.stream.last is not None or not reader.resident
    reader.live(engine.step())
    reader.stream.check()
    reader.answer()
    if engine.ring_size == 1000:
        assert reader.resident == engine.resident
    else:
        assert reader.resident <= engine.resident
    assert reader.stream.last == engine.number - 1

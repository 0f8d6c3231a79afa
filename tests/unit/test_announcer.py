"""What readers are told goes out after it was recorded, and after they had time to come back."""

import asyncio

import pytest

from kvtierd.core.model import Block, BlockId, EventKind, Locality, Medium, TierEvent
from kvtierd.core.stimuli import Found, FoundBlock
from kvtierd.edges import announcer as announcers
from kvtierd.edges.announcer import Announcer
from kvtierd.edges.journal import Journal
from kvtierd.testing.clock import wait_for
from kvtierd.testing.rig import key, meta
from kvtierd.wire.announced import TierLabel

CPU = TierLabel("cpu", Medium.CPU, None)
DISK = TierLabel("disk", Medium.STORAGE, Locality.LOCAL)


def block(number):
    return Block.of(BlockId("space", key(number)), 4096, meta(number))


def event(kind, label, described):
    return TierEvent(EventKind[kind], *label, described)


A, B = block(1), block(2)


class Life:
    """One run; ``heard`` is what the hub was given, in order, with the journal's size at that moment."""

    def __init__(self, folder, *, fresh=True, known=lambda tier, block_id: None):
        self.folder = folder
        self.heard = []
        self.journal = Journal(folder, clock=lambda: 1.0, boot="b")
        self.announcer = Announcer(self, self.journal, [CPU, DISK], fresh=fresh)
        self.announcer.load(known=known)

    def seed(self, events):
        self.heard += [("seed", e) for e in events]

    def settle(self):
        assert not any(verb == "publish" for verb, _ in self.heard)

    def publish(self, events):
        recorded = self.journal.statistics()["entries"]
        assert recorded == len([1 for verb, _ in self.heard if verb == "publish"]) + len(events), (
            "recorded before"
        )
        self.heard += [("publish", e) for e in events]

    @property
    def holding(self):
        return self.announcer.statistics()["holding"]


def test_the_first_run_of_all_holds_nothing_back(tmp_path):
    life = Life(tmp_path)
    life.announcer.publish([event("STORED", CPU, A)])
    assert life.heard == [("publish", event("STORED", CPU, A))]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_later_run_seeds_at_once_and_tells_when_readers_had_time_to_come_back(tmp_path, monkeypatch, fresh):
    monkeypatch.setattr(announcers, "REJOIN", 0.01)
    Life(tmp_path).announcer.publish([event("STORED", CPU, A), event("STORED", DISK, A)])

    async def main():
        life = Life(tmp_path, fresh=fresh)
        seeds = [("seed", event("STORED", CPU, A)), ("seed", event("STORED", DISK, A))]
        assert sorted(life.heard, key=str) == sorted(seeds, key=str)
        life.announcer.publish([event("STORED", DISK, A)], scanned=["disk"])
        life.announcer.publish([event("STORED", CPU, B)])
        assert len(life.heard) == 2
        assert life.holding
        life.announcer.start(asyncio.get_running_loop())
        assert await asyncio.to_thread(wait_for, lambda: not life.holding, "readers to be back")
        assert [e.kind.value for verb, e in life.heard[2:]] == ["removed", "removed", "stored", "stored"]

    asyncio.run(main())


def test_a_large_difference_is_told_in_slices_in_order_with_what_comes_meanwhile_after_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(announcers, "REJOIN", 0.0)
    monkeypatch.setattr(announcers, "SLICE", 4)
    many = [event("STORED", CPU, block(number)) for number in range(30)]
    first = Life(tmp_path)
    for one in many:
        first.announcer.publish([one])
    first.journal.close(flushed=True)

    async def main():
        life = Life(tmp_path)
        seeds = len(life.heard)
        life.announcer.start(asyncio.get_running_loop())
        turns = 0
        while life.holding:  # others have their turn between slices
            await asyncio.sleep(0)
            turns += 1
            if turns == 3:
                life.announcer.publish([event("STORED", CPU, A)])
        assert turns > 30 // 4
        kinds = [told.kind.value for _, told in life.heard[seeds:]]
        assert kinds == ["removed"] * 30 + ["stored"]
        life.announcer.publish([event("STORED", DISK, block(number)) for number in range(10)])
        assert len(life.heard) == seeds + 31 + 4
        life.announcer.finish()
        assert len(life.heard) == seeds + 31 + 10

    asyncio.run(main())


def test_a_lost_record_is_a_later_run_too(tmp_path):
    assert Life(tmp_path, fresh=False).holding
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "announced-1").write_bytes(b"garbage")
    assert Life(tmp_path / "other").holding


def test_what_is_held_at_the_end_is_told_and_nothing_after_it(tmp_path):
    Life(tmp_path).announcer.publish([event("STORED", CPU, A)])
    life = Life(tmp_path)
    life.announcer.finish()
    assert life.heard[-1] == ("publish", event("REMOVED", CPU, A))
    life.announcer.publish([event("STORED", DISK, B)])
    assert life.heard[-1] == ("publish", event("REMOVED", CPU, A))
    life.announcer.close(True)
    after = Life(tmp_path)
    assert after.heard == []
    assert after.journal.lost is None


def test_a_scans_descriptions_are_those_in_memory(tmp_path):
    first = Life(tmp_path)
    first.announcer.publish([event("STORED", DISK, A)])
    first.announcer.close(True)
    life = Life(tmp_path)
    known = life.heard[0][1].block
    found = life.announcer.known(Found("disk", [FoundBlock(block(1), 4096), FoundBlock(B, 4096)]))
    assert [item.block is known for item in found.blocks] == [True, False]
    assert found.blocks[1].block is B


def test_what_is_in_memory_already_is_one_description_and_doubts_stay_doubts(tmp_path):
    """After a crash the last moment is taken back, and told again: no reader may be left without it."""
    Life(tmp_path).announcer.publish([event("STORED", DISK, A), event("STORED", DISK, B)])
    indexed = {A.id: block(1), B.id: block(2)}
    life = Life(tmp_path, known=lambda tier, block_id: indexed[block_id])
    assert [e.block is indexed[e.block.id] for verb, e in life.heard] == [True, True]
    life.announcer.publish([event("STORED", DISK, made) for made in indexed.values()], scanned=["disk"])
    life.announcer.release()
    told = [e.kind.value for verb, e in life.heard if verb == "publish"]
    assert told == ["removed", "removed"]
    life.announcer.release()
    assert [e.kind.value for verb, e in life.heard if verb == "publish"] == ["removed"] * 2 + ["stored"] * 2


def test_what_turns_publish_before_the_start_is_told_after_it(tmp_path):
    """Engines are served while the journal is read."""
    Life(tmp_path).announcer.publish([event("STORED", DISK, A)])

    async def main():
        life = Life(tmp_path)
        announcer = announcers.Announcer(
            life, Journal(tmp_path, clock=lambda: 9.0, boot="b"), [DISK], early=True
        )
        life.journal.close(flushed=True)
        life.heard.clear()
        announcer.publish([event("STORED", DISK, A)], ["disk"])
        announcer.publish([event("STORED", DISK, B)])
        announcer.load()
        assert [verb for verb, _ in life.heard] == ["seed"]
        assert announcer.statistics()["holding"]
        announcer.start(asyncio.get_running_loop())
        assert announcer.statistics()["confirmed"] == 1
        life.journal = announcer._journal
        announcer.finish()
        assert life.heard[1:] == [("publish", event("STORED", DISK, B))]
        announcer.close(True)

    asyncio.run(main())


def test_an_end_before_the_start_leaves_the_journal_as_it_is(tmp_path):
    Life(tmp_path).announcer.publish([event("STORED", DISK, A)])
    before = [path.read_bytes() for path in tmp_path.iterdir()]
    announcer = Announcer(None, Journal(tmp_path), [DISK], early=True)
    announcer.publish([event("STORED", DISK, B)])
    announcer.finish()
    announcer.close(True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == before

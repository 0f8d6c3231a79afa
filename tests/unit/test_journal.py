"""The announced journal on disk: survives any end, bounded, honest when it cannot be written."""

import errno
import os

import pytest

from kvtierd.core.model import Block, BlockId, EventKind, Locality, Medium, TierEvent
from kvtierd.edges.journal import Journal
from kvtierd.edges.number_page import boot_id
from kvtierd.testing.rig import key, meta
from kvtierd.wire.announced import Announced, TierLabel

DISK = TierLabel("disk", Medium.STORAGE, Locality.LOCAL)


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Time()


_journals = []


@pytest.fixture(autouse=True)
def buried():
    """Close the descriptors of lives that were killed."""
    yield
    for journal in _journals:
        for file in (journal._current, *journal._old):
            if file is not None:
                file.close()
    _journals.clear()


class Life:
    """One run of a daemon that has nothing but a set and its journal."""

    def __init__(self, folder, clock, *, boot="b0", slack=4, **options):
        self.clock = clock
        self.journal = Journal(folder, clock=clock, boot=boot, slack=slack, **options)
        _journals.append(self.journal)
        self.history = self.journal.load()
        self.announced = Announced([DISK], self.history)
        self.journal.follow(self.announced)
        self.begun = self.announced.begin()
        self.journal.append(self.begun.events)

    def tell(self, kind, *numbers):
        events = [TierEvent(EventKind[kind], *DISK, block(number)) for number in numbers]
        self.journal.append(self.announced.advance(events).events)

    def pass_time(self, seconds, ticks=1):
        for _ in range(ticks):
            self.clock.now += seconds / ticks
            self.journal.tick()

    @property
    def doubts(self):
        return {number_of(b) for _, b in self.history.doubts}

    @property
    def entries(self):
        return [number_of(b) for b in self.history.entries.get(DISK, {}).values()]


def block(number):
    return Block.of(BlockId("space", key(number)), 4096, meta(number, number - 1))


def number_of(described):
    return described.meta.token_ids[0]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_crash_loses_nothing_that_was_recorded(tmp_path, clock):
    first = Life(tmp_path, clock)
    assert first.history is None
    first.tell("STORED", 1, 2, 3)
    first.tell("REMOVED", 3)
    second = Life(tmp_path, clock)
    assert second.entries == [1, 2]
    assert second.history.whole
    assert second.doubts == {1, 2, 3}
    assert second.journal.lost is None


def test_after_a_quiet_moment_nothing_is_in_doubt(tmp_path, clock):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1)
    first.pass_time(5.0, ticks=50)
    size = first.journal.statistics()["bytes"]
    first.pass_time(60.0, ticks=50)
    assert first.journal.statistics()["bytes"] == size, "said once"
    first.clock.now += 5
    first.tell("STORED", 2)
    assert Life(tmp_path, clock).doubts == {2}


def test_after_a_clean_stop_nothing_is_in_doubt_even_on_another_boot(tmp_path, clock):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1, 2)
    first.journal.close(flushed=True)
    clock.now = 3.0  # the clock of another boot begins anew
    second = Life(tmp_path, clock, boot="b1")
    assert (second.entries, second.doubts, second.history.whole) == ([1, 2], set(), True)
    second.tell("STORED", 3)
    third = Life(tmp_path, clock, boot="b1")
    assert (third.entries, third.doubts, third.history.whole) == ([1, 2, 3], {3}, True)


def test_a_stop_that_could_not_flush_leaves_doubts(tmp_path, clock):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1)
    first.journal.close(flushed=False)
    assert Life(tmp_path, clock).doubts == {1}


def test_the_end_of_the_machine_makes_it_a_record_of_the_least(tmp_path, clock):
    """Without fsync the file may lack its end then."""
    first = Life(tmp_path, clock)
    first.tell("STORED", 1, 2)
    first.pass_time(5.0)
    second = Life(tmp_path, clock, boot="b1")
    assert not second.history.whole
    assert "machine" in second.journal.lost
    assert [number_of(e.block) for e in second.begun.events] == [2, 1]
    second.tell("STORED", 1)
    third = Life(tmp_path, clock, boot="b1")
    assert (third.entries, third.history.whole) == ([1], True)


def test_a_run_that_ended_before_its_first_batch_changes_nothing_of_that(tmp_path, clock):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1, 2)
    journal = Journal(tmp_path, clock=clock, boot="b1")
    assert not journal.load().whole
    third = Life(tmp_path, clock, boot="b1")
    assert not third.history.whole
    assert third.entries == [1, 2]


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 60])
def test_a_torn_tail_is_cut_and_the_journal_goes_on(tmp_path, clock, cut):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1)
    size = (tmp_path / "announced-1").stat().st_size
    first.tell("STORED", 2)
    os.truncate(tmp_path / "announced-1", size + cut)
    second = Life(tmp_path, clock)
    assert second.entries == [1]
    assert second.journal.lost is None
    second.tell("STORED", 1, 3)
    assert Life(tmp_path, clock).entries == [1, 3]


@pytest.mark.parametrize("left", [0, 5, 25])
def test_a_file_that_was_only_begun_is_no_loss(tmp_path, clock, left):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1)
    first.pass_time(2.0)
    (tmp_path / "announced-2").write_bytes((tmp_path / "announced-1").read_bytes()[:left])
    second = Life(tmp_path, clock)
    assert (second.entries, second.journal.lost) == ([1], None)
    second.tell("STORED", 2)
    assert Life(tmp_path, clock).entries == [1, 2]


@pytest.mark.parametrize("content", [b"PK\x03\x04 something else", b"kvtierd announced 9\nfrom the future"])
def test_a_file_that_cannot_be_read_is_kept_aside_with_a_reason(tmp_path, clock, content):
    (tmp_path / "announced-5").write_bytes(content)
    life = Life(tmp_path, clock)
    assert life.history is None
    assert "announced-5" in life.journal.lost
    assert life.journal.degraded is None
    assert (tmp_path / "announced-5.aside").read_bytes() == content
    life.tell("STORED", 1)
    assert Life(tmp_path, clock).entries == [1]
    assert names(tmp_path) == ["announced-5.aside", "announced-6"]


def test_damage_in_the_middle_means_that_nothing_is_believed(tmp_path, clock):
    first = Life(tmp_path, clock)
    first.tell("STORED", 1)
    middle = (tmp_path / "announced-1").stat().st_size - 5
    first.tell("STORED", 2)
    data = bytearray((tmp_path / "announced-1").read_bytes())
    data[middle] ^= 0xFF
    (tmp_path / "announced-1").write_bytes(data)
    second = Life(tmp_path, clock)
    assert second.history is None
    assert "checksum" in second.journal.lost


def test_the_first_start_says_that_there_is_none(tmp_path, clock):
    assert Life(tmp_path, clock).journal.statistics()["lost"] == "there is none"


# -- size ---------------------------------------------------------------------------------------------


def churn(life, rounds, live=10, pause=0.01):
    for number in range(rounds):
        life.tell("STORED", number)
        if number >= live:
            life.tell("REMOVED", number - live)
        life.pass_time(pause)


def test_its_size_is_bounded_by_what_is_live(tmp_path, clock):
    life = Life(tmp_path, clock)
    churn(life, 2000, pause=0.3)  # a file stays for the second in which it may hold doubts
    statistics = life.journal.statistics()
    assert statistics["compactions"] > 10
    assert statistics["bytes"] < 60 * 200
    assert len(names(tmp_path)) <= 2
    after = Life(tmp_path, clock)
    assert after.entries == list(range(1990, 2000))


@pytest.mark.parametrize("kill_at", range(0, 120, 3))
def test_it_can_be_killed_at_any_point_of_a_compaction(tmp_path, clock, kill_at):
    life = Life(tmp_path, clock, slack=20)
    life.tell("STORED", *range(1000, 1200))
    for _ in range(3):
        life.tell("REMOVED", *range(1000, 1100))
        life.tell("STORED", *range(1000, 1100))
    churn(life, kill_at, live=5)
    told = [number_of(life.announced.holding(*item)) for item in life.announced.residencies()]
    after = Life(tmp_path, clock)
    assert after.entries == told


def test_a_restart_in_the_middle_of_a_compaction_ends_it(tmp_path, clock):
    life = Life(tmp_path, clock, slack=0)
    life.tell("STORED", *range(5000))
    life.tell("REMOVED", *range(2000, 5000))
    life.pass_time(2.0)
    assert life.journal.statistics()["copying"]
    second = Life(tmp_path, clock)
    assert second.journal.statistics()["copying"]
    second.pass_time(60.0, ticks=100)
    assert second.journal.statistics()["files"] == 1
    assert Life(tmp_path, clock).entries == second.entries


def test_doubts_of_the_old_file_outlive_a_compaction(tmp_path, clock):
    life = Life(tmp_path, clock, slack=0)
    life.tell("STORED", 1, 2)
    life.tell("REMOVED", 2)
    life.tell("STORED", 3)
    life.tell("STORED", 4)
    life.tell("STORED", 5)
    assert Life(tmp_path, clock).doubts == {1, 2, 3, 4, 5}


# -- trouble ------------------------------------------------------------------------------------------


class Full:
    """A file system without room, from the moment that it is told so."""

    def __init__(self, monkeypatch):
        self.on = False
        write, create = os.write, os.open

        def deny(*_):
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(os, "write", lambda fd, data: deny() if self.on else write(fd, data))
        monkeypatch.setattr(os, "open", lambda *args: deny() if self.on else create(*args))


def test_a_full_disk_degrades_with_a_reason_and_leaves_no_record_with_holes(tmp_path, clock, monkeypatch):
    disk = Full(monkeypatch)
    life = Life(tmp_path, clock)
    life.tell("STORED", 1)
    disk.on = True
    life.tell("STORED", 2)
    life.tell("STORED", 3)
    assert "no space" in life.journal.statistics()["degraded"]
    assert names(tmp_path) == []
    assert Life(tmp_path, clock).history is None


def test_when_there_is_room_again_a_whole_record_is_made(tmp_path, clock, monkeypatch):
    disk = Full(monkeypatch)
    life = Life(tmp_path, clock)
    disk.on = True
    life.tell("STORED", *range(1000))
    life.pass_time(30.0, ticks=10)
    assert life.journal.degraded
    disk.on = False
    life.pass_time(5.1)
    assert life.journal.degraded, "not yet whole"
    assert names(tmp_path) == ["announced-7.new"] or names(tmp_path)[0].endswith(".new")
    life.tell("REMOVED", 0)
    life.pass_time(1.0, ticks=10)
    assert life.journal.degraded is None
    life.tell("STORED", 1001)
    after = Life(tmp_path, clock)
    assert after.entries == [*range(1, 1000), 1001]


def test_a_crash_before_it_is_whole_again_means_that_there_is_none(tmp_path, clock, monkeypatch):
    disk = Full(monkeypatch)
    life = Life(tmp_path, clock)
    disk.on = True
    life.tell("STORED", *range(2000))
    disk.on = False
    life.pass_time(5.1)
    assert names(tmp_path)[0].endswith(".new")
    after = Life(tmp_path, clock)
    assert after.history is None
    assert names(tmp_path) == ["announced-1"]


def test_a_folder_that_is_not_there_degrades(tmp_path, clock):
    life = Life(tmp_path / "missing", clock)
    assert life.history is None
    assert "missing" in life.journal.degraded
    life.tell("STORED", 1)
    life.journal.close(flushed=True)


def test_a_write_that_is_cut_short_counts_as_a_failure(tmp_path, clock, monkeypatch):
    life = Life(tmp_path, clock)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    life.tell("STORED", 1)
    assert "3 of" in life.journal.degraded


def test_the_boot_id_is_one_while_the_machine_runs():
    assert boot_id() == boot_id()

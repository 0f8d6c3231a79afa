"""A relay's file: rewritten as it grows, given up where it cannot be written."""

import os

import pytest

from kvtierd.edges import relay_journal as module
from kvtierd.edges.relay_journal import RelayJournal
from kvtierd.wire.kvevents import BlockStored, encode_batch
from kvtierd.wire.relay import EngineCache
from kvtierd.wire.relay_records import Kind, Record, encode, recover

H = 0xF100000000000000


def batch(number):
    event = BlockStored((H + number % 50,), None, (1, 2), 2, None, "GPU", None)
    return encode_batch(float(number), [event], 0)


class Background:
    """Work that is done when a test says so."""

    def __init__(self):
        self.waiting = []

    def __call__(self, work, done):
        self.waiting.append((work, done))

    def run(self):
        while self.waiting:
            work, done = self.waiting.pop()
            done(work())


@pytest.fixture
def background():
    return Background()


@pytest.fixture
def journal(tmp_path, background, monkeypatch):
    monkeypatch.setattr(module, "SLACK", 4000)
    made = RelayJournal(tmp_path / "relay", background)
    assert made.load() == b""
    yield made
    made.close()


def write(journal, cache, numbers):
    for number in numbers:
        cache.take(batch(number))
        journal.append(encode(Record(Kind.BATCH, number, float(number), batch(number))))
        journal.renew(cache.known, (number, b"digest"), float(number))


def read(path):
    cache = EngineCache()
    return recover(path.read_bytes(), cache, tail=0.0).place, set(cache.known)


def test_it_stays_small_and_whole_while_it_is_rewritten(tmp_path, journal, background):
    cache = EngineCache()
    for first in range(0, 2000, 20):
        write(journal, cache, range(first, first + 20))
        assert read(tmp_path / "relay")[1] == set(cache.known)
        if first % 100 == 0:
            background.run()
    assert (tmp_path / "relay").stat().st_size < 100_000
    assert os.listdir(tmp_path) == ["relay"]
    assert read(tmp_path / "relay")[0][0] == 1999


def test_a_torn_end_is_cut_and_written_over(tmp_path, journal, background):
    cache = EngineCache()
    write(journal, cache, range(3))
    journal.append(b"torn")
    journal.close()
    again = RelayJournal(tmp_path / "relay", background)
    found = recover(again.load(), EngineCache(), tail=0.0)
    again.cut(found.length)
    write(again, cache, [3])
    again.close()
    assert read(tmp_path / "relay")[0][0] == 3


def test_a_file_that_cannot_be_written_is_removed_and_said(tmp_path, journal, monkeypatch):
    write(journal, EngineCache(), range(3))
    monkeypatch.setattr(module.os, "write", lambda *_: 0)
    journal.append(b"more")
    assert "relay" in journal.degraded
    assert not (tmp_path / "relay").exists()
    journal.append(b"more")


def test_it_is_written_whole_again_once_that_works(tmp_path, journal, background, monkeypatch):
    cache = EngineCache()
    write(journal, cache, range(5))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: 0)
        write(journal, cache, range(5, 6))
    assert journal.degraded
    assert not (tmp_path / "relay").exists()
    write(journal, cache, range(6, 8))  # begins a rewrite, and what comes meanwhile is in it
    background.run()
    assert journal.degraded is None
    write(journal, cache, range(8, 9))
    place, known = read(tmp_path / "relay")
    assert (place[0], known) == (8, set(cache.known))


def test_a_folder_that_is_not_there_is_said(tmp_path, background):
    journal = RelayJournal(tmp_path / "nowhere" / "relay", background)
    assert journal.load() == b""
    assert journal.degraded

"""Packed blocks that lie side by side move together; what is wrong with one is that one's alone."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_slot_io
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.fs_segments import SlotMap, runs
from kvtierd.testing.backend_kit import NAMESPACE, block, payload, scanned

SIZE = 8192
COUNT = 12


def memory(count: int = COUNT, size: int = SIZE) -> list[memoryview]:
    """Page-aligned memory for so many blocks, as the pool's."""
    step = -(-size // 4096) * 4096
    whole = memoryview(mmap.mmap(-1, count * step))
    return [whole[i * step : i * step + size] for i in range(count)]


def content(number: int, size: int = SIZE) -> bytes:
    """What block ``number`` holds."""
    return (payload(number, 4096) * (size // 4096 + 1))[:size]


def transfers(numbers, size=SIZE, *, filled=True):
    views = memory(len(numbers), size)
    for view, number in zip(views, numbers, strict=True):
        if filled:
            view[:] = content(number, size)
    return [Transfer(block(n, size=size), view) for n, view in zip(numbers, views, strict=True)]


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def slot_of(backend, number):
    segment, slot = backend._packed.slots.find(block(number).id)
    return backend.root / "v1" / segment.namespace / "packed" / segment.name, segment.offset(slot)


def overwrite(backend, number, at, data):
    path, offset = slot_of(backend, number)
    with path.open("r+b") as file:
        file.seek(offset + at)
        file.write(data)


@pytest.fixture(params=["auto", "direct", "buffered"])
def backend(request, root):
    opened = FsBackend("disk", root, io=request.param)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def stored(backend):
    """A backend with blocks 0 to 11, written in one call."""
    assert statuses(backend.write(transfers(range(COUNT)))) == [Status.OK] * COUNT
    return backend


@pytest.fixture
def calls(monkeypatch):
    """Count what moves bytes."""
    counts = dict.fromkeys(("preadv", "pwritev", "pwrite"), 0)
    for name in counts:
        real = getattr(os, name)

        def counting(*args, name=name, real=real):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(os, name, counting)
    return counts


def test_a_run_is_one_write_one_note_and_a_header_each_and_then_one_read_and_one_note(backend, calls):
    backend.write(transfers(range(COUNT)))
    assert calls == {"preadv": 0, "pwritev": 1, "pwrite": 1 + COUNT}
    calls.update(dict.fromkeys(calls, 0))
    got = transfers(range(COUNT), filled=False)
    assert statuses(backend.read(got)) == [Status.OK] * COUNT
    assert [bytes(each.data) for each in got] == [content(n) for n in range(COUNT)]
    assert calls == {"preadv": 1, "pwritev": 0, "pwrite": 1}


@pytest.mark.parametrize("size", [4096, 64 << 10, 256 << 10, 5000])
def test_runs_end_where_they_would_become_too_long(backend, calls, size):
    """Or, with payloads that are no whole pages, after each block."""
    count = 300 if size == 4096 else 20
    numbers = range(count)
    sent, got = transfers(numbers, size), transfers(numbers, size, filled=False)
    assert statuses(backend.write(sent)) == [Status.OK] * count
    writes, calls["preadv"] = calls["pwritev"], 0
    assert statuses(backend.read(got)) == [Status.OK] * count
    assert all(a.data == b.data for a, b in zip(sent, got, strict=True))
    whole = size % 4096 == 0
    for made, most in ((writes, fs_slot_io.WRITE_BYTES), (calls["preadv"], fs_slot_io.READ_BYTES)):
        run = min(fs_slot_io.RUN_BLOCKS, most // size) if whole else 1
        assert made == -(-count // run)


def test_any_order_and_any_part_of_a_call_is_read_right(stored, calls):
    for numbers in ([3, 4, 5, 9, 8, 7, 0], [11], [5, 3, 1], [1, 2, 99, 3]):
        got = transfers(numbers, filled=False)
        expected = [Status.GONE if n == 99 else Status.OK for n in numbers]
        calls["preadv"] = 0
        assert statuses(stored.read(got)) == expected
        for each, number, status in zip(got, numbers, expected, strict=True):
            assert status is Status.GONE or bytes(each.data) == content(number)
    assert calls["preadv"] == 1, "1, 2 and 3; nothing is read for what is not there"


@pytest.mark.parametrize(
    ("at", "data", "status"),
    [
        (4096 + 77, b"\0\0\0\0", Status.CORRUPT),
        (60, b"\xff\xff", Status.CORRUPT),
        (0, bytes(4096), Status.GONE),
    ],
    ids=["payload", "header", "emptied"],
)
@pytest.mark.parametrize("number", [0, 5, COUNT - 1])
def test_what_is_wrong_with_one_block_of_a_run_is_no_others_fault(stored, at, data, status, number):
    overwrite(stored, number, at, data)
    got = transfers(range(COUNT), filled=False)
    assert statuses(stored.read(got)) == [status if n == number else Status.OK for n in range(COUNT)]
    assert all(bytes(each.data) == content(n) for n, each in enumerate(got) if n != number)


def test_two_blocks_that_changed_places_are_corrupt(stored):
    """Each proves itself, but not as the block that should be there."""
    slots = {}
    for number in (4, 5):
        path, offset = slot_of(stored, number)
        with path.open("rb") as file:
            slots[number] = os.pread(file.fileno(), 4096 + SIZE, offset)
    overwrite(stored, 4, 0, slots[5])
    overwrite(stored, 5, 0, slots[4])
    outcomes = stored.read(transfers(range(COUNT), filled=False))
    assert [n for n, one in enumerate(outcomes) if one.status is Status.CORRUPT] == [4, 5]
    assert {outcomes[n].reason for n in (4, 5)} == {"another block's content"}


def test_the_order_of_use_is_that_of_the_calls_and_in_them(stored):
    stored.read(transfers([7, 8, 9], filled=False))
    stored.read(transfers([2, 1, 0, 3], filled=False))
    stored.read(transfers([8], filled=False))
    stored.close()
    stored.open()
    ids = [one.block.id for one in scanned(stored)]
    assert ids == [block(n).id for n in [4, 5, 6, 10, 11, 7, 9, 2, 1, 0, 3, 8]]


def test_a_filesystem_that_fills_up_in_a_run_takes_what_fits(stored, monkeypatch):
    """The run fails as one; each of its blocks is tried alone then."""
    real, left = os.pwritev, [2]

    def full(fd, data, offset, *flags):
        if len(data) > 2 or not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return real(fd, data, offset, *flags)

    monkeypatch.setattr(os, "pwritev", full)
    numbers = range(20, 26)
    outcomes = stored.write(transfers(numbers))
    assert statuses(outcomes) == [Status.OK] * 2 + [Status.FULL] * 4
    monkeypatch.undo()
    got = transfers([*range(COUNT), *numbers], filled=False)
    assert statuses(stored.read(got)) == [Status.OK] * (COUNT + 2) + [Status.GONE] * 4
    assert stored.statistics()["packed_blocks"] == COUNT + 2
    assert statuses(stored.write(transfers(numbers))) == [Status.OK] * 6


def test_a_segment_that_somebody_removes_costs_a_write_nothing(stored):
    path, _ = slot_of(stored, 0)
    path.unlink()
    numbers = range(20, 26)
    assert statuses(stored.write(transfers(numbers))) == [Status.OK] * 6
    assert statuses(stored.read(transfers(numbers, filled=False))) == [Status.OK] * 6
    assert statuses(stored.read(transfers(range(COUNT), filled=False))) == [Status.GONE] * COUNT


@pytest.mark.parametrize(
    ("call", "number", "part", "left"),
    [
        ("pwritev", 1, 3 * (4096 + SIZE) + 100, 0),
        ("pwrite", 1, 10, 0),
        ("pwrite", 3, 0, 1),
        ("pwrite", 3, 60, 1),
        ("pwrite", 3, 4096, 2),
    ],
    ids=["in the payloads", "in the times", "after a header", "in a header", "after two headers"],
)
def test_a_writer_killed_in_a_run_leaves_whole_blocks_only(root, call, number, part, left):
    """L65."""
    program = """
        import sys
        from kvtierd.edges.backends.base import Transfer
        from kvtierd.edges.backends.fs import FsBackend
        from kvtierd.testing.backend_kit import block, payload
        from kvtierd.testing.faults import die_in
        backend = FsBackend("disk", sys.argv[1], io="buffered")
        backend.open()
        die_in(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        content = [memoryview(payload(n, 4096) * 2) for n in range(12)]
        backend.write([Transfer(block(n, size=8192), data) for n, data in enumerate(content)])
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), root, call, str(number), str(part)]
    assert subprocess.run(arguments, timeout=50, check=False).returncode == -signal.SIGKILL
    backend = FsBackend("disk", root)
    backend.open()
    assert [one.block.id for one in scanned(backend)] == [block(n).id for n in range(left)]
    got = transfers(range(COUNT), filled=False)
    assert statuses(backend.read(got)) == [Status.OK] * left + [Status.GONE] * (COUNT - left)
    assert all(bytes(each.data) == content(n) for n, each in enumerate(got[:left]))
    backend.close()


def test_writers_at_the_same_time_have_segments_of_their_own(root, monkeypatch):
    """The kernel takes one write at a time into a file."""
    backend = FsBackend("disk", root, io="buffered")
    backend.open()
    meet, real = threading.Barrier(3, timeout=20), os.pwritev

    def together(fd, data, offset, *flags):
        meet.wait()
        return real(fd, data, offset, *flags)

    monkeypatch.setattr(os, "pwritev", together)
    work = [transfers(range(first, first + 5)) for first in (0, 10, 20)]
    threads = [threading.Thread(target=backend.write, args=[each]) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    monkeypatch.undo()
    paths = [{slot_of(backend, first + i)[0] for i in range(5)} for first in (0, 10, 20)]
    assert [len(each) for each in paths] == [1, 1, 1]
    assert len(set.union(*paths)) == 3
    backend.write(transfers([30]))
    assert backend.statistics()["segments"] == 3, "an idle one is gone on with"
    backend.close()


class SlotMapModel(RuleBasedStateMachine):
    """Reserve, publish, delete and free at random, against sets."""

    SLOT = 64 << 20  # four to a segment

    def __init__(self) -> None:
        super().__init__()
        self.map = SlotMap(3 * self.SLOT)
        self.writing: list[list] = []
        self.stored: dict = {}
        self.gone: set = set()
        self.numbers = iter(range(10**6))

    @rule(count=st.integers(1, 9))
    def take(self, count):
        places = self.map.take(NAMESPACE, self.SLOT, count)
        assert len(set(places)) == count
        held = {at for call in self.writing for at in call} | set(self.stored.values())
        assert not held & set(places)
        busy = {segment for call in self.writing for segment, _ in call}
        assert not busy & {segment for segment, _ in places}
        self.writing.append(places)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def publish(self, data):
        places = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.map.wrote(places)
        for at in places:
            block_id = block(next(self.numbers)).id
            assert self.map.publish(block_id, *at) is None
            self.stored[block_id] = at

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def delete(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.stored)))
        segment, slot = self.map.remove(block_id)
        assert self.stored.pop(block_id) == (segment, slot)
        self.map.free(segment, slot, spare=self.map.wants_spare(self.SLOT))

    @invariant()
    def agrees(self):
        assert {i: (segment, slot) for i, segment, slot in self.map.entries()} == self.stored
        held = [at for call in self.writing for at in call] + list(self.stored.values())
        segments = {segment for segment, _ in held}
        assert self.map.segment_count == len(segments)
        for segment in segments:
            own = [slot for owner, slot in held if owner is segment]
            every = sorted([*own, *segment.spare, *segment.free])
            assert every == list(range(segment.begun))
            assert segment.used == len(own)
            writers = [call for call in self.writing if any(owner is segment for owner, _ in call)]
            assert len(writers) == segment.busy
        assert self.map.spare_bytes == self.SLOT * sum(len(segment.spare) for segment in segments)
        assert self.map.spare_bytes <= self.map.spare_limit


TestSlotMap = SlotMapModel.TestCase


def test_numbers_in_a_row_are_one_range():
    assert runs([]) == []
    assert runs([3]) == [range(3, 4)]
    assert runs([0, 1, 2, 5, 6, 9]) == [range(3), range(5, 7), range(9, 10)]

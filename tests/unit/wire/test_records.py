"""The announced journal's bytes."""

import io

import pytest

from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    block_key,
)
from kvtierd.testing.rig import key, meta
from kvtierd.wire.announced import History, TierLabel
from kvtierd.wire.frames import Torn, Unreadable
from kvtierd.wire.records import (
    MAGIC,
    HistoryReader,
    Mark,
    RecordWriter,
    header,
    read_header,
    read_records,
)

DISK = TierLabel("disk", Medium.STORAGE, Locality.REMOTE)
CPU = TierLabel("cpu", Medium.CPU, None)


def block(number, namespace="space", **fields):
    return Block.of(BlockId(namespace, key(number)), 4096, meta(number, number - 1), **fields)


def event(kind, label, described):
    return TierEvent(EventKind[kind], *label, described)


def read(*generations, tail=1.0):
    """Fold generations (bytes) into a history."""
    reader = HistoryReader(tail)
    for data in generations:
        file = io.BytesIO(data)
        reader.generation()
        read_header(file)
        for record in read_records(file):
            reader.take(record)
    return reader.finish(whole=True)


FULL = Block.of(
    BlockId("other", block_key(b"\x00" * 31 + b"\x07", 3)),
    12288,
    BlockMeta(
        hashes=(1 << 63, b"\xff" * 32),
        parent=b"\x01",
        token_ids=tuple(range(100_000, 100_032)),
        block_size=16,
        lora_id=7,
        lora_name="law",
        extra_keys=(("salt",), None),
        spec_kind="mla_attention",
        sliding_window=5,
    ),
    dp_rank=2,
)
BARE = Block.of(BlockId("space", block_key(b"x")), 4096)


def test_every_field_of_a_block_comes_back():
    writer = RecordWriter()
    data = header("boot") + writer.changes(1.0, [event("STORED", DISK, FULL), event("STORED", CPU, BARE)])
    got = read(data)
    assert got.entries == {DISK: {FULL.id: FULL}, CPU: {BARE.id: BARE}}
    (label, back), (_, bare) = got.doubts
    assert label == DISK
    assert back.meta is not None
    assert back.meta.hashes == FULL.meta.hashes
    assert bare.meta is None


def test_a_removal_says_all_that_it_took_away():
    writer = RecordWriter()
    data = header("") + writer.changes(1.0, [event("STORED", DISK, FULL)])
    data += writer.changes(1.5, [event("REMOVED", DISK, FULL)])
    got = read(data)
    assert got.entries == {DISK: {}}
    assert got.doubts == [(DISK, FULL)]


def test_only_the_last_moments_are_in_doubt_and_nothing_once_settled():
    writer = RecordWriter()
    data = header("")
    for number in range(5):
        data += writer.changes(number * 0.4, [event("STORED", CPU, block(number))])
    assert [b for _, b in read(data).doubts] == [block(2), block(3), block(4)]
    for mark in (Mark.SETTLED, Mark.CLOSED):
        assert read(data + writer.mark(1.7, mark)).doubts == []
    assert len(read(data + writer.mark(1.7, Mark.OPENED)).doubts) == 3


def test_names_are_written_once_and_a_writer_can_go_on():
    writer = RecordWriter()
    first = writer.changes(1.0, [event("STORED", DISK, block(1, "n" * 32))])
    second = writer.changes(1.0, [event("STORED", DISK, block(2, "n" * 32))])
    assert b"n" * 32 in first
    assert b"n" * 32 not in second
    reader = HistoryReader(1.0)
    for record in read_records(io.BytesIO(first)):
        reader.take(record)
    later = RecordWriter(*reader.names())
    third = later.changes(2.0, [event("STORED", DISK, block(3, "n" * 32)), event("STORED", CPU, block(4))])
    assert set(read(header("") + first + second + third).entries[DISK]) == {
        block(number, "n" * 32).id for number in (1, 2, 3)
    }


def test_entries_kept_from_an_older_file_come_before_the_new_ones():
    """Announcement order must survive compaction: parents are told first, and removed last."""
    old, new = RecordWriter(), RecordWriter()
    first = header("") + old.changes(1.0, [event("STORED", DISK, block(n)) for n in (1, 2, 3)])
    second = header("") + new.changes(
        2.0, [event("STORED", DISK, block(4)), event("REMOVED", DISK, block(2))]
    )
    second += new.kept(2.0, [(DISK, block(1)), (DISK, block(3))])
    second += new.changes(3.0, [event("REMOVED", DISK, block(1)), event("STORED", DISK, block(1))])
    expected = [block(3).id, block(4).id, block(1).id]
    assert list(read(first, second).entries[DISK]) == expected
    assert list(read(second).entries[DISK]) == expected
    assert [b for _, b in read(second, tail=0.5).doubts] == [block(1)], "kept entries are in no doubt"


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_end_is_found_at_every_byte(cut):
    writer = RecordWriter()
    whole = header("boot") + writer.changes(1.0, [event("STORED", CPU, BARE)])
    data = whole + writer.changes(2.0, [event("STORED", DISK, block(1))])
    cut = min(cut, len(data) - len(whole) - 1)
    file = io.BytesIO(data[: len(whole) + cut])
    read_header(file)
    records = read_records(file)
    next(records)
    with pytest.raises(Torn) as torn:
        next(records)
    assert torn.value.offset == len(whole)


@pytest.mark.parametrize("length", range(len(header("boot"))))
def test_less_than_a_header_is_torn(length):
    with pytest.raises(Torn):
        read_header(io.BytesIO(header("boot")[:length]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"PK\x03\x04" + b"x" * 50, "does not begin"),
        (MAGIC.replace(b"1", b"2"), "another version"),
        (MAGIC + b"\x01\x00\x00\x00\x8d\xef\x02\xd2\x00\x00", "header"),
    ],
)
def test_something_else_is_not_read(data, why):
    with pytest.raises(Unreadable, match=why):
        read_header(io.BytesIO(data))


def test_damage_in_the_middle_is_not_taken_for_a_torn_end():
    writer = RecordWriter()
    first = writer.changes(1.0, [event("STORED", CPU, BARE)])
    data = bytearray(first + writer.changes(2.0, [event("STORED", CPU, block(1))]))
    data[12] ^= 1
    with pytest.raises(Unreadable, match="checksum"):
        list(read_records(io.BytesIO(bytes(data))))
    with pytest.raises(Unreadable, match="0 bytes"):
        list(read_records(io.BytesIO(first + bytes(64))))


def test_an_entry_whose_names_are_not_defined_is_not_believed():
    writer = RecordWriter()
    writer.changes(1.0, [event("STORED", CPU, BARE)])
    second = writer.changes(1.0, [event("STORED", CPU, BARE)])
    with pytest.raises(Unreadable, match="not defined"):
        read(header("") + second)


def test_an_empty_journal_is_an_empty_history():
    assert read(header("")) == History()

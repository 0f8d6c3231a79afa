"""The slot table's bytes: what is written is read, at every point where a process may end."""

import io
import json
import random
from pathlib import Path

import msgspec
import pytest

from kvtierd.core.ledger import Counters, Ended, Held, Mapped, Placed, PoolState, Shaped, Unmapped, Vacated
from kvtierd.core.model import Block, BlockId
from kvtierd.testing.rig import LAYOUT, key, meta
from kvtierd.wire.frames import Torn, Unreadable, checked
from kvtierd.wire.slot_records import MAGIC, Header, SlotReader, SlotWriter, header

GOLDEN = Path(__file__).parents[2] / "golden"
OF = Header("boot", "0" * 32, 8 * 4096, 1, 2)
SPACE = LAYOUT.namespace()


def placed(slot, number, **options):
    block = Block.of(BlockId(SPACE, key(number)), 4096, meta(number, **options), number % 3)
    return Placed(slot, 100 + number, block)


def turns():
    """Return what some turns changed."""
    return [
        (Counters(0, 0, 0), [Mapped("e", b"p", SPACE, 1), Shaped(LAYOUT, ((0, 8),))]),
        (Counters(0, 1, 4), [Held(1, "e", SPACE, (0, 1, 2))]),
        (Counters(0, 1, 4), [placed(0, 1), placed(1, 2, parent=1), placed(2, 3, parent=2), Ended(1)]),
        (Counters(0, 2, 4), [Held(2, "e", SPACE, (1,)), Mapped("f", b"q", SPACE, 0)]),
        (Counters(1, 3, 5), [Vacated(2), Held(3, "e", SPACE, (2,)), Unmapped(b"q", None)]),
        (Counters(1, 3, 5), [placed(2, 7), Ended(3), Unmapped(b"p", ("nobody",))]),
    ]


def after(count):
    state = PoolState()
    for counters, changes in turns()[:count]:
        state.counters = counters
        state.apply(changes)
    return state


def table(count=6):
    writer = SlotWriter()
    return header(OF) + b"".join(writer.changes(*turn) for turn in turns()[:count])


def read(*generations):
    reader = SlotReader()
    for data in generations:
        assert reader.read(io.BytesIO(data)) == OF
    return reader.state


def test_what_is_written_is_read():
    assert read(table()) == after(6)


def test_the_form_is_the_documented_one():
    """Versioned promise: a change of these bytes takes a new version."""
    assert table() == (GOLDEN / "slot_table_v1.bin").read_bytes()
    wanted = json.loads((GOLDEN / "slot_table_v1.json").read_text())
    assert json.loads(msgspec.json.encode(_plain(after(6)))) == wanted


def _plain(state):
    return {
        "counters": state.counters,
        "extents": {space: shaped.extents for space, shaped in state.shapes.items()},
        "blocks": {str(slot): [p.generation, p.block.key.hex()] for slot, p in state.blocks.items()},
        "held": {str(number): [held.engine, held.slots] for number, held in state.held.items()},
        "mapped": [[name, process.hex(), sorted(how)] for (name, process), how in state.mapped.items()],
    }


def test_a_table_that_ends_anywhere_says_what_its_whole_frames_say():
    ends = {len(table(count)): count for count in range(7)}
    data, count = table(), -1
    for length in range(len(data) + 1):
        count = ends.get(length, count)
        reader = SlotReader()
        if length in ends:
            reader.read(io.BytesIO(data[:length]))
        else:
            with pytest.raises(Torn) as torn:
                reader.read(io.BytesIO(data[:length]))
            assert torn.value.offset == (len(table(count)) if count >= 0 else torn.value.offset)
            assert count >= 0 or not reader.state.shapes
        assert reader.state == after(max(count, 0)), length


def test_a_flipped_bit_is_noticed_or_tears_the_last_frame():
    data = table()
    last = len(table(5))
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        reader = SlotReader()
        with pytest.raises((Unreadable, Torn)) as caught:
            reader.read(io.BytesIO(bytes(flipped)))
        if position >= last:
            assert reader.state == after(5)
        elif position >= len(MAGIC):
            # A length that leads behind the end looks like a torn end: what comes before is right, too.
            assert isinstance(caught.value, Unreadable) or reader.state in [after(n) for n in range(6)]


def test_noise_is_refused_not_believed():
    """Fuzz: whole frames of nonsense, and sensible ones cut and glued."""
    rng = random.Random(5)
    data = table()
    for _ in range(2000):
        body = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
        for noise in (header(OF) + checked(body), MAGIC + checked(body), body):
            with pytest.raises((Unreadable, Torn)):
                SlotReader().read(io.BytesIO(noise + checked(body)))
        cut = sorted(rng.randrange(len(data)) for _ in range(2))
        glued = data[: cut[0]] + data[cut[1] :]
        reader = SlotReader()
        try:
            reader.read(io.BytesIO(glued))
        except (Unreadable, Torn):
            continue
        assert glued == data or set(cut) <= {len(table(n)) for n in range(7)}, "only whole frames are read"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ([2, 0, 0, 1, b"key55", 0, None], "index"),
        ([0, {"model": "m"}], "missing"),
        ([1, 0, [[0, -1]]], ">="),
        ([9, 1], "Invalid"),
    ],
)
def test_an_entry_that_means_nothing_makes_the_table_unbelievable(entry, complaint):
    data = header(OF) + checked(msgspec.msgpack.encode([0, 0, 0, [entry]]))
    with pytest.raises(Unreadable, match=complaint):
        SlotReader().read(io.BytesIO(data))


def test_another_version_is_named():
    with pytest.raises(Unreadable, match=r"another version's form \(2\)"):
        SlotReader().read(io.BytesIO(table().replace(b"slots 1\n", b"slots 2\n", 1)))


def test_an_unfinished_next_generation_adds_to_the_old_one():
    """Blocks that it has not taken over yet are still in the old one; what is new is in it alone."""
    writer = SlotWriter()
    base = writer.changes(Counters(1, 3, 5), [Shaped(LAYOUT, ((0, 8),)), Mapped("e", b"p", SPACE, 1)])
    new = header(OF) + base + writer.changes(Counters(1, 4, 6), [Vacated(0), placed(3, 9)])
    state = read(table(), new)
    wanted = after(6)
    wanted.apply([Vacated(0), placed(3, 9)])
    wanted.counters = Counters(1, 4, 6)
    assert state == wanted

"""The slot table's form: what a pool's slots hold and who may be copying, as checked frames of changes.

SLOTS.md beside this file says what every byte means. One frame is what one turn of the daemon changed, so
the state after any number of whole frames is one that the daemon really was in.

A file is a *generation*. A next one begins with all that is live but blocks and takes those over little by
little, while new frames are added to it alone; then the old one goes. So reading all generations in order is
right at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.core.ledger import (
    Change,
    Counters,
    Ended,
    Held,
    Mapped,
    Placed,
    PoolState,
    Shaped,
    Unmapped,
    Vacated,
)
from kvtierd.core.model import Block, BlockId, BlockMeta, Count, Index, Layout, WireKey, group_of
from kvtierd.wire.described import packed_meta
from kvtierd.wire.frames import UNDECODABLE, Torn, Unreadable, bodies, checked, read_magic

MAGIC = b"kvtierd slots 1\n"
_STEM = b"kvtierd slots "
_new = tuple.__new__
_encode = msgspec.msgpack.Encoder().encode


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Which pool a generation speaks of; it is believed only with that very file, in that boot."""

    boot: str
    pool_id: str
    pool_bytes: int
    device: int
    inode: int


class _Space(msgspec.Struct, frozen=True, array_like=True, tag=0):
    layout: Layout


class _Extents(msgspec.Struct, frozen=True, array_like=True, tag=1):
    space: Index
    extents: tuple[tuple[Index, Count], ...]


class _Placed(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    space: Index
    slot: Index
    generation: int
    key: WireKey
    dp_rank: Index
    meta: BlockMeta | None


class _Vacated(msgspec.Struct, frozen=True, array_like=True, tag=3):
    slot: Index


class _Held(msgspec.Struct, frozen=True, array_like=True, tag=4):
    number: int
    engine: str
    space: Index
    slots: tuple[Index, ...]


class _Ended(msgspec.Struct, frozen=True, array_like=True, tag=5):
    number: int


class _Mapped(msgspec.Struct, frozen=True, array_like=True, tag=6):
    engine: str
    process: bytes
    namespace: str
    dp_rank: Index


class _Unmapped(msgspec.Struct, frozen=True, array_like=True, tag=7):
    process: bytes
    engines: tuple[str, ...] | None


_Entry = _Space | _Extents | _Placed | _Vacated | _Held | _Ended | _Mapped | _Unmapped


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    fence: Index
    number: int
    generation: int
    entries: list[_Entry]


_headers = msgspec.msgpack.Decoder(Header)
_frames = msgspec.msgpack.Decoder(_Frame)


def header(of: Header) -> bytes:
    """Return the first bytes of a generation."""
    return MAGIC + checked(_encode(of))


class SlotWriter:
    """Makes one generation's frames; numbers its layouts in the order in which they came."""

    def __init__(self, namespaces: Sequence[str] = ()) -> None:
        self._numbers = {namespace: number for number, namespace in enumerate(namespaces)}

    def changes(self, counters: Counters, changes: Sequence[Change]) -> bytes:
        """Return the frame of one turn."""
        shapes = [change for change in changes if isinstance(change, Shaped)]
        entries: list[object] = [(0, shape.layout) for shape in shapes if self._number(shape)]
        for change in changes:
            match change:
                case Placed(slot, generation, block):
                    namespace, key = block.namespace, block.key
                    space = self._numbers[namespace]
                    entries.append((2, space, slot, generation, key, block.dp_rank, packed_meta(block)))
                case Vacated(slot):
                    entries.append((3, slot))
                case Held(number, engine, namespace, slots):
                    entries.append((4, number, engine, self._numbers[namespace], slots))
                case Ended(number):
                    entries.append((5, number))
                case Shaped(layout, extents):
                    entries.append((1, self._numbers[layout.namespace()], extents))
                case Mapped(engine, process, namespace, dp_rank):
                    entries.append((6, engine, process, namespace, dp_rank))
                case Unmapped(process, engines):
                    entries.append((7, process, engines))
        return checked(_encode((*counters, entries)))

    def _number(self, shape: Shaped) -> bool:
        """Number a layout; whether it is new in this generation."""
        namespace, count = shape.layout.namespace(), len(self._numbers)
        return self._numbers.setdefault(namespace, count) == count


class SlotReader:
    """Folds generations, oldest first, into a :class:`PoolState`. ``placed``: entries of blocks so far."""

    def __init__(self) -> None:
        self.state = PoolState()
        self.placed = 0
        self._layouts: list[tuple[str, Layout, tuple[int, ...]]] = []
        self._last: Block | None = None

    def namespaces(self) -> list[str]:
        """Return what the generation's numbers mean."""
        return [namespace for namespace, _, _ in self._layouts]

    def read(self, file: BinaryIO) -> Header:
        """Read a generation from its first byte, all of it but a torn end.

        Raises:
            Torn: the end is incomplete, all before was taken; at offset 0 there is not even a header.
            Unreadable: it cannot be believed.
        """
        read_magic(file, MAGIC, _STEM, "a slot table")
        self._layouts = []
        found: Header | None = None
        try:
            for body in bodies(file):
                if found is None:
                    found = _headers.decode(body)
                    self.header = found
                else:
                    self._take(_frames.decode(body))
        except (*UNDECODABLE, IndexError) as error:
            raise Unreadable(f"a record before byte {file.tell()}: {error}") from error
        if found is None:
            raise Torn(0)
        return found

    def _take(self, frame: _Frame) -> None:
        self.state.counters = Counters(frame.fence, frame.number, frame.generation)
        for entry in frame.entries:
            if type(entry) is _Placed:  # nearly all are, a million in a row at times
                self._place(entry)
            elif (change := self._change(entry)) is not None:
                self.state.apply((change,))

    def _place(self, entry: _Placed) -> None:
        """Do for a block what :meth:`PoolState.apply` does."""
        namespace, _, sizes = self._layouts[entry.space]
        self.placed += 1
        slot, key, blocks = entry.slot, entry.key, self.state.blocks
        size, before = sizes[group_of(key)], self._last
        block = self._last = Block.of(BlockId(namespace, key), size, entry.meta, entry.dp_rank, before)
        if slot in blocks:
            del blocks[slot]  # its new place is at the end
        blocks[slot] = _new(Placed, (slot, entry.generation, block))

    def _change(self, entry: _Entry) -> Change | None:
        match entry:
            case _Vacated(slot):
                return Vacated(slot)
            case _Held(number, engine, space, slots):
                return Held(number, engine, self._layouts[space][0], slots)
            case _Ended(number):
                return Ended(number)
            case _Extents(space, extents):
                return Shaped(self._layouts[space][1], extents)
            case _Mapped(engine, process, namespace, dp_rank):
                return Mapped(engine, process, namespace, dp_rank)
            case _Unmapped(process, engines):
                return Unmapped(process, engines)
            case _Space(layout):
                payload_bytes = Geometry.of(layout).payload_bytes
                self._layouts.append((layout.namespace(), layout, payload_bytes))
        return None

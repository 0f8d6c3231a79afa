"""The announced journal's form: a header, then one checked record for each batch of tier events.

::

    generation = MAGIC header record*
    header     = frame([boot id])
    record     = frame([at, entries, tiers, namespaces, mark])
    frame      : see :mod:`kvtierd.wire.frames`
    entry      = [kind, tier, namespace, [hash, group], payload bytes, dp rank, metadata]

``at`` is seconds of a clock that runs through all processes of one boot. ``tiers`` and ``namespaces`` name
what this and later entries of the generation mean by their numbers. Every entry says all there is to say, so
a record can be read twice without harm.

A generation's live entries are copied into the next one as ``KEPT`` while new ones are added, then the file
goes; so reading all files in order is right at any moment.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from kvtierd.core.model import (
    Block,
    BlockId,
    BlockKey,
    BlockMeta,
    Common,
    EventKind,
    Locality,
    Medium,
    TierEvent,
)
from kvtierd.wire.announced import History, TierLabel
from kvtierd.wire.described import packed_meta
from kvtierd.wire.frames import UNDECODABLE, Torn, Unreadable, bodies, checked, read_magic
from kvtierd.wire.templates import HASH, KEY, PARENT, TOKENS, Template, array_head, cut, in_a_row

MAGIC = b"kvtierd announced 1\n"
_MAGIC_STEM = b"kvtierd announced "


class Kind(enum.IntEnum):
    """What an entry says: a store, a removal, or a store that an older generation had."""

    STORED = 0
    REMOVED = 1
    KEPT = 2


class Mark(enum.IntEnum):
    """What a record says beside its entries."""

    NONE = 0
    OPENED = 1
    """A daemon goes on with the journal."""
    SETTLED = 2
    """All that was recorded so far has left the process."""
    CLOSED = 3
    """The same, and nothing will be told until a daemon goes on."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One residency change, with all that a later removal or a late reader needs."""

    kind: int
    tier: int
    namespace: int
    key: BlockKey
    payload_bytes: int
    dp_rank: int
    meta: BlockMeta | None


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What was told in one batch."""

    at: float
    entries: list[Entry]
    tiers: list[TierLabel] = []
    namespaces: list[str] = []
    mark: int = Mark.NONE


_STORED, _REMOVED, _KEPT = int(Kind.STORED), int(Kind.REMOVED), int(Kind.KEPT)
_REMOVAL = EventKind.REMOVED
_PLAIN, _NAMING = array_head(2), array_head(4)
_Raw = msgspec.Raw
_encode = msgspec.msgpack.Encoder().encode
_records = msgspec.msgpack.Decoder(Record)
_headers = msgspec.msgpack.Decoder(tuple[str])


def header(boot_id: str) -> bytes:
    """Return the first bytes of a generation."""
    return MAGIC + checked(_encode((boot_id,)))


class RecordWriter:
    """Makes one generation's records; numbers its tiers and namespaces, after those that it has."""

    def __init__(self, tiers: Sequence[TierLabel] = (), namespaces: Sequence[str] = ()) -> None:
        self._tiers = {label: number for number, label in enumerate(tiers)}
        self._namespaces = {name: number for number, name in enumerate(namespaces)}

    def changes(self, at: float, events: Sequence[TierEvent]) -> bytes:
        """Return the record of one batch of events."""
        known = len(self._tiers), len(self._namespaces)
        name: str | None = None
        medium: Medium | None = None
        locality: Locality | None = None
        common: Common | None = None
        kind: EventKind | None = None
        tier, space, row = 0, 0, list[Any]()
        templates: tuple[Template, Template] | None = None
        for event in events:
            block = event.block
            # The same for many in a row, and the same objects: to look for these costs half.
            if (
                event.tier is not name
                or block.common is not common
                or event.kind is not kind
                or event.medium is not medium
                or event.locality is not locality
            ):
                name, medium, locality, kind = event.tier, event.medium, event.locality, event.kind
                tier = self._tier(TierLabel(name, medium, locality))
                if block.common is not common:
                    common = block.common
                    space = self._space(common.namespace)
                number = _REMOVED if kind is _REMOVAL else _STORED
                templates = _templates(number, tier, space, common) if common.is_shared else None
            if templates is None or not block.tokens or (told_as := block.told_as).__class__ is tuple:
                row.append(_entry(number, tier, space, block))
            elif (up := block.parent) is None:
                start, size, ids, end = templates[0]
                row += start, block.key, size, told_as, ids, _Raw(block.tokens), end
            else:
                start, size, parent, ids, end = templates[1]
                row += start, block.key, size, told_as, parent, up, ids, _Raw(block.tokens), end
        return self._record(at, len(events), row, known)

    def kept(self, at: float, blocks: Sequence[tuple[TierLabel, Block]]) -> bytes:
        """Return the record of entries taken over from an older generation."""
        known = len(self._tiers), len(self._namespaces)
        row = [
            _entry(_KEPT, self._tier(label), self._space(block.namespace), block) for label, block in blocks
        ]
        return self._record(at, len(blocks), row, known)

    def mark(self, at: float, mark: Mark) -> bytes:
        """Return a record without entries."""
        return checked(_encode((at, (), (), (), int(mark))))

    def _record(self, at: float, count: int, row: list[Any], known: tuple[int, int]) -> bytes:
        tiers, namespaces = list(self._tiers)[known[0] :], list(self._namespaces)[known[1] :]
        entries = array_head(count)
        if tiers or namespaces:
            return checked(in_a_row([_NAMING, at, entries, *row, tiers, namespaces]))
        return checked(in_a_row([_PLAIN, at, entries, *row]))

    def _tier(self, label: TierLabel) -> int:
        return self._tiers.setdefault(label, len(self._tiers))

    def _space(self, namespace: str) -> int:
        return self._namespaces.setdefault(namespace, len(self._namespaces))


def _entry(kind: int, tier: int, space: int, block: Block) -> tuple[object, ...]:
    """Return an entry, to be encoded."""
    common = block.common
    return kind, tier, space, block.key, common.payload_bytes, common.dp_rank, packed_meta(block)


@functools.lru_cache(maxsize=256)
def _templates(kind: int, tier: int, space: int, common: Common) -> tuple[Template, Template] | None:
    """Return the templates of entries with tokens: without a parent, and with one."""
    if not common.described:
        return None
    root, child = (Block(common, KEY, HASH, parent, bytes(TOKENS)) for parent in (None, PARENT))
    return cut(_entry(kind, tier, space, root)), cut(_entry(kind, tier, space, child))


def read_header(file: BinaryIO) -> str:
    """Read a generation's header; returns the boot id.

    Raises:
        Torn: there is less than a header.
        Unreadable: something else, or a form of another version.
    """
    read_magic(file, MAGIC, _MAGIC_STEM, "an announced journal")
    for body in bodies(file):
        try:
            return _headers.decode(body)[0]
        except UNDECODABLE as error:
            raise Unreadable(f"its header: {error}") from error
    raise Torn(0)


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Yield a generation's records, after its header.

    Raises:
        Torn: the last record is incomplete.
        Unreadable: a record in the middle is damaged.
    """
    for body in bodies(file):
        try:
            yield _records.decode(body)
        except UNDECODABLE as error:
            raise Unreadable(f"a record before byte {file.tell()}: {error}") from error


class HistoryReader:
    """Folds the records of all generations, oldest first, into a :class:`History`.

    ``tail``: how many seconds before the last record changes are in doubt.
    """

    def __init__(self, tail: float) -> None:
        self._tail = tail
        self._older: dict[TierLabel, dict[BlockId, Block]] = {}
        self._kept: dict[TierLabel, dict[BlockId, Block]] = {}
        self._new: dict[TierLabel, dict[BlockId, Block]] = {}
        self._tiers: list[TierLabel] = []
        self._namespaces: list[str] = []
        self._last: Block | None = None
        self._recent: deque[tuple[float, TierLabel, Block]] = deque()
        self.closed = False
        self.entries = 0

    def generation(self) -> None:
        """Begin with the next file. What it kept of older ones comes before what is new in it."""
        for part in (self._kept, self._new):
            for label, blocks in part.items():
                self._older.setdefault(label, {}).update(blocks)
            part.clear()
        self._tiers, self._namespaces = [], []

    def names(self) -> tuple[list[TierLabel], list[str]]:
        """Return what the generation's numbers mean."""
        return self._tiers, self._namespaces

    def take(self, record: Record) -> None:
        """Take in the next record.

        Raises:
            Unreadable: it names what no record defined.
        """
        self._tiers += record.tiers
        self._namespaces += record.namespaces
        while self._recent and self._recent[0][0] < record.at - self._tail:
            self._recent.popleft()
        if record.mark in (Mark.SETTLED, Mark.CLOSED):
            self._recent.clear()
        self.closed = record.mark == Mark.CLOSED
        try:
            for entry in record.entries:
                key = entry.key
                block_id = BlockId(self._namespaces[entry.namespace], key)
                size, before = entry.payload_bytes, self._last
                block = self._last = Block.of(block_id, size, entry.meta, entry.dp_rank, before)
                self._apply(record.at, entry.kind, self._tiers[entry.tier], block)
        except IndexError:
            raise Unreadable("an entry names a tier or namespace that is not defined") from None
        self.entries += len(record.entries)

    def _apply(self, at: float, kind: int, label: TierLabel, block: Block) -> None:
        block_id = block.id
        older, kept = self._older.get(label), self._kept.get(label)
        new = self._new.get(label)
        if new is None:
            new = self._new[label] = {}
        if kind == _KEPT:
            if (not older or block_id not in older) and block_id not in new:
                self._kept.setdefault(label, {}).setdefault(block_id, block)
            return
        if older:
            older.pop(block_id, None)
        if kept:
            kept.pop(block_id, None)
        new.pop(block_id, None)
        if kind == _STORED:
            new[block_id] = block
        self._recent.append((at, label, block))

    def finish(self, *, whole: bool) -> History:
        """Return what the journal says."""
        self.generation()
        latest = {(label, b.id, b.hashes, b.dp_rank): (label, b) for _, label, b in self._recent}
        return History(self._older, list(latest.values()), whole)

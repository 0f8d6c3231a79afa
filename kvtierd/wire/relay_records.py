"""What was heard of an engine, as records of a file: how a restarted daemon knows what readers were told.

::

    record = length of the body (4 bytes, little-endian), CRC-32 of all that follows (4), kind (1),
             number (8), at (8, a float: seconds since the epoch), body

``BATCH`` is a batch of the engine as it came. ``FORGOTTEN``: all so far was taken back. A file that was
written anew begins with ``KEPT`` batches, made up of what was resident, and an ``AT``, the number and
digest of the batch that they are the state after. Records are written before their content is told.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtierd.wire.kvevents import BlockStored, WireEvent, encode_batch
from kvtierd.wire.relay import EngineCache, Known, Resident, Told, removals, residents, stores

_HEAD = struct.Struct("<IIBQd")
_CHECKED = 8
MAX_BODY = 1 << 28


class Kind(enum.IntEnum):
    """What a record says."""

    BATCH = 0
    KEPT = 1
    FORGOTTEN = 2
    AT = 3


class Record(NamedTuple):
    """One record; ``at`` in seconds since the epoch."""

    kind: int
    number: int
    at: float
    body: bytes


@dataclass(slots=True)
class Recovered:
    """What a file says.

    ``length``: how many bytes of it are whole. ``place``: number and digest of the last batch. ``seeds``:
    what readers know, or may. ``doubts``: what they have to be told again, because it was told in the last
    moments and may not have got out.
    """

    length: int = 0
    place: tuple[int, bytes] | None = None
    seeds: list[Told] = field(default_factory=list)
    doubts: list[Told] = field(default_factory=list)


def digest(payload: bytes) -> bytes:
    """Return what tells batches of one number apart (their time stamps differ)."""
    return hashlib.blake2b(payload, digest_size=16).digest()


def encode(record: Record) -> bytes:
    """Return a record's bytes."""
    head = _HEAD.pack(len(record.body), 0, record.kind, record.number, record.at)
    crc = zlib.crc32(record.body, zlib.crc32(head[_CHECKED:]))
    return head[:4] + crc.to_bytes(4, "little") + head[_CHECKED:] + record.body


def decode(data: bytes) -> Iterator[Record]:
    """Yield the records up to the end, or to the first that is torn: it was not told."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, crc, kind, number, when = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if length > MAX_BODY or end > len(data) or zlib.crc32(data[at + _CHECKED : end]) != crc:
            return
        yield Record(kind, number, when, data[at + _HEAD.size : end])
        at = end


def keep(known: Iterable[Known], place: tuple[int, bytes] | None, at: float) -> Iterator[bytes]:
    """Yield the records of a file written anew."""
    for rank, events in stores(known):
        yield encode(Record(Kind.KEPT, 0, at, encode_batch(at, events, rank)))
    if place is not None:
        yield encode(Record(Kind.AT, place[0], at, place[1]))


def recover(data: bytes, cache: EngineCache, *, tail: float) -> Recovered:
    """Fold a file into an empty cache; what its last ``tail`` seconds changed is in doubt."""
    records = list(decode(data))
    since = max((record.at for record in records), default=0.0) - tail
    found, late = Recovered(sum(_HEAD.size + len(record.body) for record in records)), list[Told]()
    for record in records:
        told: list[Told] = []
        if record.kind in (Kind.BATCH, Kind.KEPT):
            taken = cache.take(record.body)
            told = [] if taken is None else [taken]
        if record.kind == Kind.BATCH:
            found.place = record.number, digest(record.body)
        elif record.kind == Kind.AT:
            found.place = record.number, record.body
        elif record.kind == Kind.FORGOTTEN:
            found.place, told = None, cache.forget()
        if record.at > since and record.kind != Kind.KEPT:
            late += told
    cache.counts.clear()
    found.seeds = list(stores(cache.known.items()))
    _doubt(late, cache, found)
    return found


def _doubt(late: list[Told], cache: EngineCache, found: Recovered) -> None:
    """Have everything that changed late removed, as if readers knew it, and what is there stored again."""
    touched = dict.fromkeys(
        key for rank, events in late for event in events for key in residents(rank, event)
    )
    gone = [key for key in touched if key not in cache.known]
    found.seeds += [Told(key.rank, [_standing_for(key)]) for key in gone]
    for rank in dict.fromkeys(key.rank for key in touched):
        mine = [key for key in touched if key.rank == rank]
        found.doubts.append(Told(rank, list(removals(reversed(mine)))))
        found.doubts += stores((key, cache.known[key]) for key in mine if key in cache.known)


def _standing_for(key: Resident) -> WireEvent:
    return BlockStored(
        block_hashes=(key.hash,),
        parent_block_hash=None,
        token_ids=(),
        block_size=0,
        lora_id=None,
        medium=key.medium,
        lora_name=None,
        group_idx=key.group,
        locality=key.locality,
    )

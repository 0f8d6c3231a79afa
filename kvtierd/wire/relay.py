"""What an engine's own event batches mean: normalised, remembered, and taken back when they are void.

Events come in any form that vLLM published so far (0.10 to 0.33, map or array) and leave as the structs that
real readers understand:

* ``ownership``, ``session_id`` and ``lookahead_token_ids`` stay behind: readers drop events that have them.
* Hashes become unsigned 64-bit numbers: of 32 bytes the low 64 bits (what vLLM itself sends by default), of
  a negative one (SGLang) its two's complement.
* A store whose tokens cannot be dealt out to its hashes (sliding windows skip blocks but send all tokens)
  becomes placeholders: that a block is there is known, which tokens it holds is not.
* ``AllBlocksCleared`` means the engine's own cache. It becomes removals of just what the engine announced on
  the device, so that nothing of kvtierd's tiers is touched.
* Unknown event types, empty stores and stores that name themselves as parent are counted and skipped.

Residencies are a set, as with every reader: engines repeat stores of blocks they reuse.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvtierd.core.model import EventHash, Locality
from kvtierd.wire.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    UnknownEvent,
    WireEvent,
    decode_batch,
    pack,
)
from kvtierd.wire.projection import DEVICE

MAX_BLOCKS = 1 << 20
"""Residencies that one engine can have; more are not believed (a GPU has some hundred thousand)."""
MAX_RANK = 1 << 20
MAX_HASHES = 256
"""Hashes in one removal, so that taking back a whole cache can be told piece by piece."""
_U64 = (1 << 64) - 1
_LOCALITIES = frozenset(locality.value for locality in Locality)


class Resident(msgspec.Struct, frozen=True, gc=False):
    """What tells an engine's residencies apart."""

    rank: int
    hash: int
    group: int
    medium: str
    locality: str | None


Known = tuple[Resident, tuple[BlockStored, int]]
"""A residency, the event that announced it, and its place in that."""


class Told(NamedTuple):
    """Events of one dp rank, for all audiences."""

    rank: int
    events: list[WireEvent]


class EngineCache:
    """The residencies that one engine announced. ``dp_rank``: its rank, ``None``: what its batches say.

    ``known`` maps each to the event that announced it and the place in that; in the order of announcement.
    """

    def __init__(self, dp_rank: int | None = None, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.dp_rank = dp_rank
        self.known: dict[Resident, tuple[BlockStored, int]] = {}
        self.on_device = 0
        """How many of them are in GPU memory."""
        self.counts: Counter[str] = Counter()
        self._max_blocks = max_blocks

    def take(self, payload: bytes) -> Told | None:
        """Take one batch of the engine; return what to tell, ``None`` if it is no batch at all."""
        try:
            batch = decode_batch(payload)
        except msgspec.MsgspecError:
            self.counts["malformed"] += 1
            return None
        rank = self.dp_rank if self.dp_rank is not None else batch.data_parallel_rank or 0
        if not 0 <= rank < MAX_RANK:
            self.counts["malformed"] += 1
            return None
        told: list[WireEvent] = []
        for event in batch.events:
            if isinstance(event, UnknownEvent):
                self.counts["unknown_events"] += 1
            elif isinstance(event, AllBlocksCleared):
                self.counts["cleared"] += 1
                device = [key for key in self.known if key.rank == rank and key.medium == DEVICE]
                told += self._drop(device)
            elif isinstance(event, BlockStored):
                told += self._stored(rank, event)
            else:
                told += self._removed(rank, event)
        self.counts["events"] += len(batch.events)
        return Told(rank, told)

    def forget(self) -> list[Told]:
        """Take back all that is known, leaf first."""
        ranks = sorted({key.rank for key in self.known})
        return [Told(rank, self._drop([key for key in self.known if key.rank == rank])) for rank in ranks]

    def _stored(self, rank: int, event: BlockStored) -> Sequence[WireEvent]:
        parent = _number(event.parent_block_hash) if event.parent_block_hash is not None else None
        hashes = tuple(map(_number, event.block_hashes))
        if not hashes:
            self.counts["empty_stores"] += 1  # a sliding window's, where no block is left in it
            return ()
        if parent in hashes or len(set(hashes)) < len(hashes):
            self.counts["refused_stores"] += 1
            return ()
        medium, locality = _place(event.medium, event.locality)
        keys = [Resident(rank, h, event.group_idx or 0, medium, locality) for h in hashes]
        if len(self.known) + len(keys) > self._max_blocks:
            self.counts["overflowed"] += len(keys)
            return ()
        whole = event.block_size > 0 and len(event.token_ids) == event.block_size * len(hashes)
        whole = whole and (event.extra_keys is None or len(event.extra_keys) == len(hashes))
        plain = msgspec.structs.replace(
            event,
            block_hashes=hashes,
            parent_block_hash=parent,
            medium=medium,
            locality=locality,
            ownership=None,
            session_id=None,
            lookahead_token_ids=None,
        )
        told = [plain] if whole else [_placeholder(plain, h) for h in hashes]
        self.counts["placeholders"] += 0 if whole else len(hashes)
        places = ((event, index) for event in told for index in range(len(event.block_hashes)))
        for key, place in zip(keys, places, strict=True):
            if key not in self.known:
                self.known[key] = place
                self.on_device += medium == DEVICE
        return told

    def _removed(self, rank: int, event: BlockRemoved) -> Iterator[WireEvent]:
        medium, locality = _place(event.medium, event.locality)
        group = event.group_idx or 0
        keys = [Resident(rank, _number(h), group, medium, locality) for h in event.block_hashes]
        gone = [key for key in keys if key in self.known]
        self.counts["unknown_removals"] += len(keys) - len(gone)
        for key in gone:
            self._forget(key)
        return removals(gone)

    def _drop(self, keys: Sequence[Resident]) -> list[WireEvent]:
        """Take residencies back in reverse order of their announcement: engines announce parents first."""
        gone = keys[::-1]
        for key in gone:
            self._forget(key)
        return list(removals(gone))

    def _forget(self, key: Resident) -> None:
        if self.known.pop(key, None) is not None:
            self.on_device -= key.medium == DEVICE


def residents(rank: int, event: WireEvent) -> list[Resident]:
    """Return what a normalised event is about."""
    if isinstance(event, AllBlocksCleared):
        return []
    group, medium = event.group_idx or 0, event.medium or DEVICE
    return [Resident(rank, _number(h), group, medium, event.locality) for h in event.block_hashes]


def stores(known: Iterable[Known]) -> Iterator[Told]:
    """Return events that announce residencies anew, those of one rank and of a chain together."""
    for rank, group in itertools.groupby(known, lambda item: item[0].rank):
        for event in pack((_single(*place) for _, place in group), most=MAX_HASHES):
            yield Told(rank, [event])


def _single(event: BlockStored, index: int) -> BlockStored:
    """Return the part of an event that announces one of its hashes."""
    if len(event.block_hashes) == 1:
        return event
    first, size = index * event.block_size, event.block_size
    return msgspec.structs.replace(
        event,
        block_hashes=(event.block_hashes[index],),
        parent_block_hash=event.block_hashes[index - 1] if index else event.parent_block_hash,
        token_ids=event.token_ids[first : first + size],
        extra_keys=None if event.extra_keys is None else (event.extra_keys[index],),
    )


def removals(keys: Iterable[Resident]) -> Iterator[WireEvent]:
    """Return the events that take residencies of one rank back, in order."""
    hashes: list[EventHash] = []
    last: Resident | None = None
    for key in keys:
        if last is not None and (not _together(last, key) or len(hashes) == MAX_HASHES):
            yield _removal(last, hashes)
            hashes = []
        hashes.append(key.hash)
        last = key
    if last is not None:
        yield _removal(last, hashes)


def _together(one: Resident, other: Resident) -> bool:
    """Return whether one event can take both back."""
    return (one.group, one.medium, one.locality) == (other.group, other.medium, other.locality)


def _removal(key: Resident, hashes: Sequence[EventHash]) -> BlockRemoved:
    return BlockRemoved(tuple(hashes), key.medium, key.group, key.locality)


def _placeholder(event: BlockStored, event_hash: EventHash) -> BlockStored:
    """Say that a block is there, as vLLM says it where it knows no more."""
    return msgspec.structs.replace(
        event, block_hashes=(event_hash,), parent_block_hash=None, token_ids=(), block_size=0, extra_keys=None
    )


def _place(medium: str | None, locality: str | None) -> tuple[str, str | None]:
    return (medium or DEVICE).upper(), locality if locality in _LOCALITIES else None


def _number(event_hash: EventHash) -> int:
    return (int.from_bytes(event_hash[-8:], "big") if isinstance(event_hash, bytes) else event_hash) & _U64

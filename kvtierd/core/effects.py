"""What comes out of the ladder: answers to requests and work for the edges.

Answers travel on the engine socket as they are. Work effects carry an ``op`` number; the worker ends by
returning :class:`kvtierd.core.stimuli.Finished` with it. Slots are unit numbers (:mod:`geometry`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from kvtierd.core.model import Block, BlockId, BlockKey, KeyState, SkipReason


class ErrorCode(enum.StrEnum):
    """Why a request was refused; the message beside it says what and what to do."""

    BAD_REQUEST = "bad_request"
    BAD_VERSION = "bad_version"
    NOT_ATTACHED = "not_attached"
    NOT_ALLOWED = "not_allowed"
    POOL_EXHAUSTED = "pool_exhausted"
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_TIER = "unknown_tier"
    STALE_POOL = "stale_pool"
    BUSY = "busy"
    STOPPING = "stopping"
    INTERNAL = "internal"


EventHash = int | bytes


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all answers; ``id`` is the request's. A reply with ``id`` 0 is a notice."""

    id: int


class Refused(Reply, frozen=True, kw_only=True, tag="error"):
    """The request was understood well enough to be refused; nothing happened."""

    code: ErrorCode
    message: str


class Attached(Reply, frozen=True, kw_only=True, tag="attached"):
    """Two descriptors travel with this frame: the pool's mapping and the liveness pipe's write end.

    With ``presence_bytes`` (only where the feature is on) a third: the cells of :mod:`kvtierd.core.presence`.
    All sizes in bytes. ``rank_offsets[g][r]`` is where rank r's part of a block of group g starts in a slot.
    """

    session: int
    namespace: str
    pool_id: str
    pool_bytes: int
    unit_bytes: int
    slot_bytes: int
    payload_bytes: tuple[int, ...]
    rank_offsets: tuple[tuple[int, ...], ...]
    fence: int
    tiers: tuple[str, ...]
    presence_bytes: int = 0


_STATES = (*KeyState, *(KeyState.MISS,) * (256 - len(KeyState)))
"""By number; whoever is older than a state that is added one day takes it for a MISS."""


class LookedUp(Reply, frozen=True, kw_only=True, tag="looked_up", rename={"found": "states"}):
    """``found``: a byte for each key, the number of its state. ``prefix``: how many leading keys are no MISS.

    ``lease`` covers the first ``leased`` keys, or all HITs (``leased`` of them) where asked ``everywhere``.
    ``sources`` names for each key of the prefix the tier that it is being promoted from ("": none); it is
    empty where nothing is.
    """

    found: bytes  # an array of enum members takes ten times as long to code, and as many bytes
    prefix: int
    lease: int | None = None
    leased: int = 0
    sources: tuple[str, ...] = ()

    @property
    def states(self) -> tuple[KeyState, ...]:
        """One for each key."""
        found = self.found
        count = len(found)
        if count and found.count(found[0]) == count:
            return (_STATES[found[0]],) * count
        return tuple(map(_STATES.__getitem__, found))


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    """A key that got no slot, and why."""

    key: BlockKey
    reason: SkipReason


class Prepared(Reply, frozen=True, kw_only=True, tag="prepared"):
    """``slots[i]`` is reserved for ``keys[i]``. Without keys there is no job (0)."""

    job: int
    generation: int
    pool_id: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    skipped: tuple[Skipped, ...] = ()


class Committed(Reply, frozen=True, kw_only=True, tag="committed"):
    """The keys that are visible now; the job's other keys are void."""

    stored: tuple[BlockKey, ...]


class Loaded(Reply, frozen=True, kw_only=True, tag="loaded"):
    """Leased slots of the leading ``keys`` of the request that could be had in time.

    ``sources[i]`` names the tier that served key i; ``lease`` is 0 when ``keys`` is empty.
    """

    lease: int
    pool_id: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    sources: tuple[str, ...]


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """The request was carried out on ``count`` blocks."""

    count: int = 0


class Removed(Reply, frozen=True, kw_only=True, tag="removed"):
    """What an operator's request removed (with ``dry_run``: would have), by tier.

    ``namespaces``: those it looked at. ``unknown``: those it left alone since no engine has told their model
    and tenant. ``left``: blocks that were to go and are in use.
    """

    blocks: dict[str, int]
    bytes: dict[str, int]
    namespaces: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    left: int = 0


class InventoryEntry(msgspec.Struct, frozen=True, array_like=True):
    """One residency: a block in a tier, with the hashes that its events carry."""

    tier: str
    medium: str
    locality: str | None
    key: BlockKey
    hashes: tuple[int | bytes, ...]
    dp_rank: int


class SurveyEntry(msgspec.Struct, frozen=True, array_like=True):
    """One residency of any namespace; ``bytes`` is what it occupies in the tier.

    ``hashes``: those of its events, empty where that is the key's own
    (:func:`kvtierd.core.model.event_hash`).
    """

    tier: str
    namespace: str
    key: BlockKey
    bytes: int
    dp_rank: int
    hashes: tuple[EventHash, ...] = ()


class InventoryPage(Reply, frozen=True, kw_only=True, tag="inventory_page"):
    """``cursor`` is 0 after the last page."""

    entries: tuple[InventoryEntry, ...]
    cursor: int
    total: int


class Revoked(Reply, frozen=True, kw_only=True, tag="revoked"):
    """Notice (``id`` 0): jobs or leases of this engine ended; acknowledge ``fence`` once no copy runs."""

    fence: int


LadderReply = (
    Refused | Attached | LookedUp | Prepared | Committed | Loaded | Done | InventoryPage | Removed | Revoked
)


class Answer(msgspec.Struct, frozen=True):  # a dataclass takes five times as long to make when frozen
    """Send this reply or notice on the session."""

    session: int
    reply: LadderReply


@dataclass(frozen=True, slots=True)
class BlockAt:
    """A block and the pool slot that it is written from or read into."""

    block: Block
    slot: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write blocks of the pool into a tier."""

    op: int
    tier: str
    blocks: tuple[BlockAt, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Read blocks of a tier into pool slots and verify them."""

    op: int
    tier: str
    blocks: tuple[BlockAt, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete blocks from a tier. ``corrupt``: they failed verification, keep them aside if the tier can."""

    op: int
    tier: str
    ids: tuple[BlockId, ...]
    corrupt: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Look, in the background, which of these blocks a shared tier holds; ends with a Probed stimulus."""

    op: int
    tier: str
    ids: tuple[BlockId, ...]


Effect = Answer | Write | Read | Delete | Probe

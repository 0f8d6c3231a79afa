"""What goes into the ladder: engine requests, outcomes of workers, sessions coming and going, time.

Requests are the very structs that travel on the engine socket (:mod:`kvtierd.wire.messages` adds the
handshake around them), so there is one definition of each verb. Every request has an ``id`` chosen by the
client; its answer (:mod:`kvtierd.core.effects`) carries the same ``id``. Durations are seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtierd.core.model import Block, BlockId, BlockMeta, Index, Layout, Name, Scope, Seconds, WireKey

TraceParent = Annotated[str, Meta(max_length=128)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all requests; a tagged map on the wire."""

    id: Index


class Role(enum.StrEnum):
    """What a session does: only a scheduler reserves and commits, a worker maps and copies."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Attach(Request, frozen=True, kw_only=True, tag="attach"):
    """Bind the connection to a layout's namespace. ``process`` is a random name of the calling process."""

    layout: Layout
    engine_id: Name
    process: bytes
    dp_rank: Index = 0
    role: Role = Role.SCHEDULER
    rank: Index = 0


class Lookup(Request, frozen=True, kw_only=True, tag="lookup"):
    """Ask for the state of many keys; ``lease`` (seconds) pins the leading HITs until released.

    ``everywhere``: the lease pins every HIT, also behind a MISS. ``touch``: a request for the
    keys came: mark them as just used, and look for the unknown in shared tiers (PENDING meanwhile), as
    ``promote`` does too. ``scope``: the tiers that COLD blocks may be in and be promoted from.
    """

    keys: tuple[WireKey, ...]
    promote: bool = False
    lease: Seconds | None = None
    everywhere: bool = False
    touch: bool = False
    scope: Scope | None = None


class PrepareStore(Request, frozen=True, kw_only=True, tag="prepare_store"):
    """Reserve a slot for each key that is not there yet. ``meta`` is empty or parallel to ``keys``.

    ``traceparent``: the engine's span that this belongs to, as W3C Trace Context writes it.
    """

    keys: tuple[WireKey, ...]
    meta: tuple[BlockMeta | None, ...] = ()
    scope: Scope | None = None
    traceparent: TraceParent | None = None


class Commit(Request, frozen=True, kw_only=True, tag="commit"):
    """Make a job's blocks visible, but for the ``failed`` ones."""

    job: int
    generation: int
    pool_id: str
    failed: tuple[WireKey, ...] = ()


class Abort(Request, frozen=True, kw_only=True, tag="abort"):
    """Give a job's slots back; says that no copy into them is running any more."""

    job: int


class Fail(Request, frozen=True, kw_only=True, tag="fail"):
    """A worker's word that it could not copy these keys of a job: they are void."""

    job: int
    keys: tuple[WireKey, ...]


class Load(Request, frozen=True, kw_only=True, tag="load"):
    """Lease the slots of the leading keys, promoting from secondary tiers until ``deadline`` seconds.

    ``traceparent`` as in :class:`PrepareStore`.
    """

    keys: tuple[WireKey, ...]
    deadline: Seconds = 0.0
    scope: Scope | None = None
    traceparent: TraceParent | None = None


class Release(Request, frozen=True, kw_only=True, tag="release"):
    """End a lease of a lookup or load; says that no copy out of its slots is running any more."""

    lease: int


class Renew(Request, frozen=True, kw_only=True, tag="renew"):
    """Give jobs and leases (by ``numbers``) of this connection their whole time to live again."""

    numbers: tuple[int, ...]


class Touch(Request, frozen=True, kw_only=True, tag="touch"):
    """Mark keys as just used, in every tier."""

    keys: tuple[WireKey, ...]


class Evict(Request, frozen=True, kw_only=True, tag="evict"):
    """Remove keys from the named tiers (``None``: all). Bytes under a lease stay in place till it ends."""

    keys: tuple[WireKey, ...]
    tiers: tuple[str, ...] | None = None


class Reset(Request, frozen=True, kw_only=True, tag="reset"):
    """Remove every block of the session's namespace from the named tiers (``None``: all).

    Answered when the blocks' storage is gone, so that no restart finds them again.
    """

    tiers: tuple[str, ...] | None = None


class Prefetch(Request, frozen=True, kw_only=True, tag="prefetch"):
    """Start promoting keys into the pool; answered at once."""

    keys: tuple[WireKey, ...]


class Inventory(Request, frozen=True, kw_only=True, tag="inventory"):
    """One page of what is resident in the session's namespace; ``cursor`` 0 takes a new snapshot."""

    tier: str | None = None
    cursor: Index = 0
    limit: Annotated[int, Meta(ge=1, le=65536)] = 4096


class Acknowledge(Request, frozen=True, kw_only=True, tag="acknowledge"):
    """This process has no copy running that belongs to a job or lease revoked up to ``fence``."""

    fence: int


class Goodbye(Request, frozen=True, kw_only=True, tag="goodbye"):
    """This process touches the pool no more; the connection is closed after the answer."""


LadderRequest = (
    Attach
    | Lookup
    | PrepareStore
    | Commit
    | Abort
    | Fail
    | Load
    | Release
    | Renew
    | Touch
    | Evict
    | Reset
    | Prefetch
    | Inventory
    | Acknowledge
    | Goodbye
)


class OperatorReset(Request, frozen=True, kw_only=True, tag="operator_reset"):
    """Remove all blocks that are chosen from the named tiers (``None``: all), whoever holds them.

    Chosen is what fits everything given: ``namespaces`` (each in full, or how it begins), ``model`` and
    ``tenant`` of the layout. Answered as :class:`Reset` is; with ``dry_run`` at once, and nothing changes.
    """

    namespaces: tuple[Name, ...] | None = None
    model: Name | None = None
    tenant: Name | None = None
    tiers: tuple[Name, ...] | None = None
    dry_run: bool = False


class OperatorEvict(Request, frozen=True, kw_only=True, tag="operator_evict"):
    """Remove what may go first from a tier, leaf first, until ``blocks`` or ``bytes`` went or nothing may.

    ``namespace`` (in full, or how it begins): only there; then neither bound has to be given. What is in use
    stays.
    """

    tier: Name
    blocks: Annotated[int, Meta(ge=1)] | None = None
    bytes: Annotated[int, Meta(ge=1)] | None = None
    namespace: Name | None = None
    dry_run: bool = False


OperatorRequest = OperatorReset | OperatorEvict
"""What only the control socket takes, without an attach."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator's request arrived on a connection of the control socket."""

    session: int
    request: OperatorRequest


class Asked(msgspec.Struct, frozen=True):  # a dataclass takes five times as long to make when frozen
    """A request arrived on a session (the number that the edge gave the connection)."""

    session: int
    request: LadderRequest


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A connection ended without a goodbye; its process may still be copying."""

    session: int


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """Every liveness descriptor that was handed to this process hung up."""

    process: bytes


class Status(enum.Enum):
    """How one block of a worker's operation ended.

    ``GONE`` and ``CORRUPT`` take the block's residency away; ``FAILED`` is a passing fault and does not;
    ``FULL`` is a write refused for want of space.
    """

    OK = "ok"
    GONE = "gone"
    CORRUPT = "corrupt"
    FAILED = "failed"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One block's result. ``stored_bytes``: what it occupies in the tier, after a write that is OK."""

    id: BlockId
    status: Status
    stored_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """An operation (the number of a Write, Read or Delete effect) ended; one outcome per block, in order.

    ``seconds``: from the start of its first job to the end of its last, without waiting for a worker.
    """

    op: int
    outcomes: Sequence[Outcome]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that a backend proved to be there; ``idle_seconds``: how long ago it was last used."""

    block: Block
    stored_bytes: int
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stalled:
    """An operation is past the tier's deadline; its threads may touch its slots until it is Finished."""

    op: int


@dataclass(frozen=True, slots=True)
class Probed:
    """A Probe effect ended: which of its blocks the tier holds. ``failed``: nothing is known, ask later."""

    op: int
    found: Sequence[FoundBlock]
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A part of a tier's content as its scan at start saw it, least recently used first.

    Blocks are hits at once; they are announced, root first, when the ``last`` part has come. ``tenants``:
    whose namespaces are that come up, as far as the storage knows.
    """

    tier: str
    blocks: Sequence[FoundBlock]
    last: bool = False
    tenants: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usable:
    """Whether a tier's storage can be used at all: ``reason`` says why not and is empty if it can.

    ``stalled``: not known, since it does not answer.
    """

    tier: str
    reason: str = ""
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: expire jobs, leases and load deadlines."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Nobody may come back for what only the pool holds: write it down. Loads are served on.

    ``stores``: whether new ones are taken meanwhile.
    """

    stores: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """Take stores again after a drain."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The limits of a secondary, as in :class:`kvtierd.core.tier.TierSpec`."""

    capacity: int | None
    budget: int
    ttl: float | None
    max_load_time: float | None


@dataclass(frozen=True, slots=True)
class Retune:
    """Other limits are in force: of tiers by name, and for jobs and leases that begin from now on (seconds).

    What is more than a tier may hold now leaves little by little.
    """

    tiers: Mapping[str, TierLimits]
    job_ttl: float
    lease_ttl: float
    max_leases: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Clean stop: answer what waits; announce that the pool's blocks are gone, unless it is kept."""

    keep_pool: bool = False


Worked = Finished | Stalled | Probed | Found | Usable
Steering = Drain | Resume | Retune
Stimulus = Asked | Ordered | SessionClosed | ProcessDied | Worked | Tick | Steering | Stop
